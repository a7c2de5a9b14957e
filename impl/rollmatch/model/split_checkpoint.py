"""A policy that ranks saved in parts (FSDP2, ``torch.distributed.checkpoint``), read by one process."""

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from rollmatch.model.adapters import is_adapted
from rollmatch.model.source import SPLIT

if TYPE_CHECKING:
    from peft import PeftModel


_METADATA = "torch.distributed.checkpoint.metadata"
_NAMED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
    ("collections", "OrderedDict"),
}
"""What the description of parts names, beside classes of its own module and torch's dtypes."""


class _Description(pickle.Unpickler):
    """Reads the description of parts, which torch unpickles, whatever it names."""

    def find_class(self, module: str, name: str) -> Any:
        """Errors: ``UnpicklingError``."""
        if module == _METADATA and "." not in name:
            found = super().find_class(module, name)
            is_known = getattr(found, "__module__", "") == _METADATA
        else:
            is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            is_known = is_dtype or (module, name) in _NAMED
            found = super().find_class(module, name) if is_known else None
        if not is_known:
            raise pickle.UnpicklingError(f"its description names {module}.{name}")
        return found


def check_parts(checkpoint: Path) -> None:
    """Raise where the parts of a checkpoint hold more than tensors and plain values, which torch would run."""
    for path in checkpoint.glob("*/.metadata"):
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        with path.open("rb") as file:
            described = _Description(file).load()
        for index, stored in described.storage_data.items():
            if isinstance(described.state_dict_metadata[index.fqn], BytesStorageMetadata):
                with (path.parent / stored.relative_path).open("rb") as file:
                    file.seek(stored.offset)
                    torch.load(io.BytesIO(file.read(stored.length)), weights_only=True)


def is_split(checkpoint: Path) -> bool:
    """Whether the checkpoint holds a policy in parts."""
    return (checkpoint / SPLIT).is_dir()


def read_split(policy: nn.Module, checkpoint: Path) -> nn.Module:
    """The policy, as made for training, with the weights of a checkpoint that any number of ranks saved."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    check_parts(checkpoint)
    if not is_adapted(policy):
        state = get_model_state_dict(policy)
        load({"model": state}, checkpoint_id=checkpoint / SPLIT, no_dist=True)
        set_model_state_dict(policy, state)
        return policy
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    adapter = cast("PeftModel", policy).active_adapter
    state = get_peft_model_state_dict(policy, adapter_name=adapter)
    load({"model": state}, checkpoint_id=checkpoint / SPLIT, no_dist=True)
    set_peft_model_state_dict(policy, state, adapter_name=adapter)
    return policy
