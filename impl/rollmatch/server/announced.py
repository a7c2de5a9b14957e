"""What a learner announces, checked against what the server holds, before a byte is received."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from math import prod

from rollmatch.errors import SyncError
from rollmatch.server.identity import Model
from rollmatch.server.payloads import AdapterPlan, AnnouncedMerge, SyncRequest, TensorSpec
from rollmatch.weights.plan import FLOATS, Merge, Spec, TensorMismatch
from rollmatch.weights.transfer_plan import MergePlan, TransferPlan

_SAME_MODEL = "Serve the model that is trained."


class AnnouncementInvalid(SyncError):
    """An announcement contradicts itself.

    ``code``: ``tensor-repeated``, ``bucket-invalid``, ``adapter-invalid`` or ``digest-mismatch``.
    """

    code = "announcement-invalid"
    status = HTTPStatus.BAD_REQUEST


def check_tensor(spec: TensorSpec, model: Model, *, is_cast: bool = False) -> None:
    """``is_cast``: one floating type may stand for another. Errors: ``TensorMismatch``."""
    held = model.tensors.get(model.aliases.get(spec.name, spec.name))
    if held is None:
        raise _unknown(spec.name)
    if spec.shape != held.shape:
        problem = f"announced with shape {list(spec.shape)}, held with {list(held.shape)}"
        raise TensorMismatch(problem, key=spec.name, remedy=_SAME_MODEL, code="tensor-shape-mismatch")
    dtype = spec.dtype.removeprefix("torch.")
    if dtype != held.dtype and not (is_cast and {dtype, held.dtype} <= set(FLOATS)):
        problem = f"announced as {spec.dtype}, held as {held.dtype}"
        raise TensorMismatch(problem, key=spec.name, remedy=f"Send {held.dtype}.", code="tensor-dtype-mismatch")


def check_complete(names: Iterable[str], model: Model) -> None:
    """Errors: ``TensorMismatch`` with the first missing name as key."""
    missing = sorted(set(model.tensors) - set(names))
    if missing:
        problem = f"not sent, and {len(missing) - 1} others"
        raise TensorMismatch(problem, key=missing[0], remedy="Send every tensor in one sync.", code="tensor-missing")


def check_sync(request: SyncRequest, model: Model) -> None:
    """The whole announcement. Errors: ``AnnouncementInvalid``, ``TensorMismatch``."""
    names = [spec.name for spec in request.tensors]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        remedy = "Announce each tensor once."
        raise AnnouncementInvalid("announced twice", key=repeated[0], remedy=remedy, code="tensor-repeated")
    _check_buckets(request.tensors, request.buckets)
    if request.digests is not None and len(request.digests) != len(request.tensors):
        problem = f"{len(request.digests)} digests for {len(request.tensors)} tensors"
        raise _bad_bucket(problem, "digests", "Send one digest per tensor, or null.")
    if request.adapter is not None:
        check_adapter(request.adapter, request.tensors, model)
        return
    for spec in request.tensors:
        check_tensor(spec, model)
    check_complete(names, model)


def _check_buckets(tensors: Sequence[TensorSpec], buckets: Sequence[int]) -> None:
    if sum(buckets) != len(tensors):
        problem = f"buckets hold {sum(buckets)} tensors, {len(tensors)} are announced"
        raise _bad_bucket(problem, "buckets", "Let the buckets cover all tensors in order.")
    first = 0
    for index, size in enumerate(buckets):
        dtypes = {spec.dtype for spec in tensors[first : first + size]}
        if len(dtypes) > 1:
            problem = f"holds {' and '.join(sorted(dtypes))}"
            raise _bad_bucket(problem, f"buckets[{index}]", "Begin a new bucket where the type changes.")
        first += size


def check_adapter(adapter: AdapterPlan, tensors: Sequence[TensorSpec], model: Model) -> None:
    """Every weight and every factor is there, and they fit. Errors: ``AnnouncementInvalid``, ``TensorMismatch``."""
    sent = {spec.name: spec for spec in tensors}
    for spec in tensors:
        if spec.dtype.removeprefix("torch.") not in FLOATS:
            problem, remedy = f"announced as {spec.dtype}", f"Send {', '.join(FLOATS)}."
            raise TensorMismatch(problem, key=spec.name, remedy=remedy, code="tensor-dtype-mismatch")
    used: set[str] = set()
    for index, merge in enumerate(adapter.merges):
        if merge.name not in model.tensors:
            raise _unknown(merge.name)
        names = [merge.lora_a, merge.lora_b, *([merge.magnitude] if merge.magnitude else [])]
        for name in names:
            if name not in sent:
                raise _bad_adapter(f"{merge.name} needs {name}, which is not announced", f"adapter.merges[{index}]")
        _check_factors(merge, sent, model)
        used |= set(names)
    unused = sorted(set(sent) - used)
    if unused:
        raise _bad_adapter("is announced, and no weight is merged with it", unused[0])


def _check_factors(merge: AnnouncedMerge, sent: Mapping[str, TensorSpec], model: Model) -> None:
    """A [R, I, ...], B [O, R, ...] and the magnitude [O] fit the weight [O, I, ...]."""
    weight, lora_a, lora_b = model.tensors[merge.name].shape, sent[merge.lora_a].shape, sent[merge.lora_b].shape
    rank = lora_a[0] if lora_a else 0
    fits = len(weight) >= 2 and lora_a[1:] == weight[1:] and lora_b[:2] == (weight[0], rank)
    if not fits or prod(lora_b[2:]) != 1 or not 1 <= rank <= max(weight):
        raise _bad_adapter(f"{list(lora_a)} and {list(lora_b)} do not fit {list(weight)}", merge.name)
    if merge.magnitude is not None and prod(sent[merge.magnitude].shape) != weight[0]:
        raise _bad_adapter(
            f"a magnitude of {list(sent[merge.magnitude].shape)} does not fit {list(weight)}", merge.name
        )


def _unknown(name: str) -> TensorMismatch:
    problem = "the served model has no such tensor"
    return TensorMismatch(problem, key=name, remedy=_SAME_MODEL, code="tensor-unknown")


def _bad_bucket(problem: str, key: str, remedy: str) -> AnnouncementInvalid:
    return AnnouncementInvalid(problem, key=key, remedy=remedy, code="bucket-invalid")


def _bad_adapter(problem: str, key: str) -> AnnouncementInvalid:
    remedy = "Announce every adapter tensor, in the shape that fits its weight."
    return AnnouncementInvalid(problem, key=key, remedy=remedy, code="adapter-invalid")


def plan_of(request: SyncRequest, model: Model, *, in_place: bool) -> TransferPlan:
    """What the workers are to receive, and where it is written in place, to merge."""
    merges = request.adapter if in_place else None
    return TransferPlan(
        sync_id=request.sync_id,
        tensors=specs_of(request.tensors),
        buckets=request.buckets,
        digests=request.digests,
        digests_follow=request.digests is None,
        may_repeat=may_repeat(request),
        merge=None if merges is None else merge_plan_of(merges, model),
        aliases=tuple(sorted(model.aliases)),
        in_place=in_place,
    )


def specs_of(tensors: Sequence[TensorSpec]) -> tuple[Spec, ...]:
    """As the workers read them."""
    return tuple(Spec(spec.name, spec.dtype.removeprefix("torch."), spec.shape) for spec in tensors)


def merge_plan_of(adapter: AdapterPlan, model: Model) -> MergePlan:
    """How the workers are to merge."""
    return MergePlan(
        merges=tuple(Merge(**merge.model_dump()) for merge in adapter.merges),
        merged_digests=adapter.merged_digests,
        model=specs_of(tuple(model.tensors.values())),
    )


def may_repeat(request: SyncRequest) -> bool:
    """Whether nothing of a request but its version belongs to one sync only."""
    return request.digests is None and (request.adapter is None or request.adapter.merged_digests is None)
