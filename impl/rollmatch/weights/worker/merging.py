"""Adapters merged on the server, in the order of operations that the learner's own merge has.

What is served afterwards equals the learner's merge bit for bit; digests prove it. Every other weight is the base that
the server was started with, read from the model directory again where something else had been loaded. A gloo group
stages the weights that change; a direct group writes one after the other into the served model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rollmatch.errors import SyncError
from rollmatch.model.merge import AdaptedWeight, LoraFactors, check_fit, merge_by_kernel, merge_weight, merges_by_kernel
from rollmatch.weights.digest import DigestMismatch, add_mixed, bytes_of, digest_of
from rollmatch.weights.finite import check_totals, totals_of
from rollmatch.weights.plan import Merge
from rollmatch.weights.transfer_plan import MergePlan
from rollmatch.weights.worker.receiver import Received, Receiver
from rollmatch.weights.worker.weight_layout import WeightLayout, write_tensors

_SPARE_BYTES = 4 * 2**30
"""Of a GPU's memory, left to the engine and to merging."""
_AT_ONCE = 16
"""Weights that are merged by one launch, and may stand beside the model until their digests are made."""


class AdapterMisfit(SyncError):
    """An adapter's tensors do not fit the weight they change."""

    code = "adapter-invalid"
    status = 400


class FrozenWeights:
    """Weights of the model directory, those that are merged read once. On a GPU while they fit, else in memory.

    Floating tensors have the served type.
    """

    def __init__(self, directory: str, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._paths: dict[str, Path] = {}
        for path in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._paths |= dict.fromkeys(file.keys(), path)
        self._kept: dict[str, Tensor] = {}
        self.changed: set[str] | None = None
        """Names of served weights that are not the base's; None for all."""

    def take(self, name: str) -> Tensor:
        """On the device; kept for the next merge. Errors: ``KeyError``."""
        if name not in self._kept:
            self._kept[name] = self._keep(self.read(name))
        return self._kept[name].to(self.device, non_blocking=True)

    def read(self, name: str) -> Tensor:
        """From the file, not kept."""
        with safe_open(self._paths[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def names_to_restore(self, names: Iterable[str], merged: Iterable[str]) -> list[str]:
        """Of the weights ``names``: those that something else was loaded into, and that no merge writes again.

        >>> base = FrozenWeights("models/none", dtype=torch.float32, device=torch.device("cpu"))
        >>> base.names_to_restore(["a", "b", "c"], ["a"])
        ['b', 'c']
        >>> base.changed = {"a", "b"}  # by another adapter before
        >>> base.names_to_restore(["a", "b", "c"], ["a"])
        ['b']
        """
        return sorted(set(names) - set(merged) if self.changed is None else self.changed - set(merged))

    def _keep(self, tensor: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return tensor.clone()  # the file's own pages may be read from the disk again
        free, _ = torch.cuda.mem_get_info(self.device)
        return tensor.to(self.device) if free > tensor.nbytes + _SPARE_BYTES else tensor.pin_memory()


def merge_received(receiver: Receiver, plan: MergePlan, base: FrozenWeights) -> dict[str, str]:
    """Replace the received adapter by merged weights, and by the base's where the model holds something else.

    Returns the digests of all that was merged. Errors: ``AdapterMisfit``, ``DigestMismatch``, ``WeightsNotFinite``.
    """
    parts = receiver.take()
    merged = dict[str, Tensor]()
    digests = dict[str, str]()
    blocks = list[Tensor]()
    for merge in plan.merges:
        weight = base.take(merge.name)
        blocks.append(receiver.free_block(weight.nbytes))
        out = blocks[-1].view(weight.dtype).view(weight.shape)
        merged[merge.name] = merge_named(merge, weight, parts, out=out)
        digests[merge.name] = digest_of(out).hex()
    check_merged(digests, plan.merged_digests)
    check_totals(list(merged), totals_of(list(merged.values())))
    restored = base.names_to_restore((spec.name for spec in plan.model), merged)
    tensors = merged | {name: base.read(name) for name in restored}
    receiver.put_back(Received(tensors=tensors, blocks=blocks, merged=frozenset(merged)))
    return digests


def merge_in_place(
    layout: WeightLayout, plan: MergePlan, adapter: Mapping[str, Tensor], base: FrozenWeights, *, sums: Tensor
) -> Tensor:
    """Write merged weights, and the base's where something else is, on the current stream of a GPU.

    Adds what their digests are made of to [len(plan.merges), 2] ``sums``; returns [len(plan.merges)] ``totals_of``
    them. Errors: ``AdapterMisfit``, ``weights-broken``; the model may then hold a mixture.
    """
    names = [merge.name for merge in plan.merges]
    for name in base.names_to_restore((spec.name for spec in plan.model), names):
        write_tensors(layout.model, layout, {name: base.read(name).to(base.device)})
    base.changed, totals = set(names), list[Tensor]()
    for start in range(0, len(names), _AT_ONCE):
        some = plan.merges[start : start + _AT_ONCE]
        merged = _merge_together(layout, some, adapter, base)
        write_tensors(layout.model, layout, merged)
        add_mixed([bytes_of(tensor) for tensor in merged.values()], sums[start : start + len(some)])
        totals.append(totals_of(list(merged.values())))
    return torch.cat(totals)


def merge_named(merge: Merge, weight: Tensor, tensors: Mapping[str, Tensor], *, out: Tensor | None = None) -> Tensor:
    """A weight with the adapter of which a merge names the tensors; ``out`` as ``merge_weight``.

    Errors: ``AdapterMisfit``, ``KeyError``.
    """
    with _misfits(merge.name):
        return merge_weight(weight, _factors_of(merge, tensors), out=out)


def _factors_of(merge: Merge, tensors: Mapping[str, Tensor]) -> LoraFactors:
    magnitude = None if merge.magnitude is None else tensors[merge.magnitude]
    lora_a, lora_b = tensors[merge.lora_a], tensors[merge.lora_b]
    return LoraFactors(lora_a=lora_a, lora_b=lora_b, magnitude=magnitude, scaling=merge.scaling)


@contextmanager
def _misfits(name: str) -> Iterator[None]:
    """Errors: ``AdapterMisfit``, for torch's."""
    try:
        yield
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        raise AdapterMisfit(problem, key=name, remedy="Send the adapter of this model.") from error


def check_merged(digests: Mapping[str, str], wanted: Mapping[str, str] | None) -> None:
    """Errors: ``DigestMismatch``."""
    for name, digest in (wanted or {}).items():
        if digests.get(name) != digest:
            problem = f"merged with digest {digests.get(name)}, the learner's merge has {digest}"
            raise DigestMismatch(problem, key=name, remedy="Send full weights.")


def _merge_together(
    layout: WeightLayout, merges: Sequence[Merge], adapter: Mapping[str, Tensor], base: FrozenWeights
) -> dict[str, Tensor]:
    """In the model already, where a weight lies there as one run."""
    merged, by_kernel = dict[str, Tensor](), list[AdaptedWeight]()
    for merge in merges:
        weight, factors = base.take(merge.name), _factors_of(merge, adapter)
        whole = layout.by_name[merge.name].whole
        memory = whole if whole is not None and whole.dtype == weight.dtype else torch.empty_like(weight)
        out = merged[merge.name] = memory.view(weight.shape)
        with _misfits(merge.name):
            if merges_by_kernel(weight, factors):
                check_fit(weight, factors)
                by_kernel.append(AdaptedWeight(weight, factors, out))
            else:
                merge_weight(weight, factors, out=out)
    if by_kernel:
        merge_by_kernel(by_kernel)
    return merged
