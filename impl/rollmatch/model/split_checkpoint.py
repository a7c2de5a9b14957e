"""A policy that ranks saved in parts (FSDP2, ``torch.distributed.checkpoint``), read by one process."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import nn

from rollmatch.model.adapters import is_adapted
from rollmatch.model.source import SPLIT

if TYPE_CHECKING:
    from peft import PeftModel


def is_split(checkpoint: Path) -> bool:
    """Whether the checkpoint holds a policy in parts."""
    return (checkpoint / SPLIT).is_dir()


def read_split(policy: nn.Module, checkpoint: Path) -> nn.Module:
    """The policy, as made for training, with the weights of a checkpoint that any number of ranks saved."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

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
