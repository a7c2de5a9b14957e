"""What a learner announces, checked against what the server holds, before a byte is received."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rollmatch.errors import SyncError
from rollmatch.server.identity import Model
from rollmatch.server.payloads import AdapterPlan, SyncRequest, TensorSpec


class _BadAnnouncement(SyncError):
    """Branch: the announcement itself is wrong."""

    status = 400


class TensorUnknown(_BadAnnouncement):
    """Every announced tensor is one of the model's."""

    code = "tensor-unknown"


class TensorMissing(_BadAnnouncement):
    """A full sync brings every tensor of the model."""

    code = "tensor-missing"


class TensorShapeMismatch(_BadAnnouncement):
    """A tensor has the shape that the model holds."""

    code = "tensor-shape-mismatch"


class TensorDtypeMismatch(_BadAnnouncement):
    """A tensor has the type that the model holds."""

    code = "tensor-dtype-mismatch"


class TensorRepeated(_BadAnnouncement):
    """A tensor is announced once."""

    code = "tensor-repeated"


class BucketInvalid(_BadAnnouncement):
    """Buckets cover all tensors in order, each with tensors of one type."""

    code = "bucket-invalid"


class AdapterInvalid(_BadAnnouncement):
    """Merges name tensors that are sent, and weights that the model has."""

    code = "adapter-invalid"


class AliasDiffers(_BadAnnouncement):
    """Tied tensors are equal."""

    code = "digest-mismatch"


_SAME_MODEL = "Serve the model that is trained."


def check_tensor(spec: TensorSpec, model: Model) -> None:
    """Errors: ``TensorUnknown``, ``TensorShapeMismatch``, ``TensorDtypeMismatch``."""
    held = model.tensors.get(model.aliases.get(spec.name, spec.name))
    if held is None:
        raise TensorUnknown("the served model has no such tensor", key=spec.name, remedy=_SAME_MODEL)
    if spec.shape != held.shape:
        problem = f"announced with shape {list(spec.shape)}, held with {list(held.shape)}"
        raise TensorShapeMismatch(problem, key=spec.name, remedy=_SAME_MODEL)
    if spec.dtype.removeprefix("torch.") != held.dtype:
        problem = f"announced as {spec.dtype}, held as {held.dtype}"
        raise TensorDtypeMismatch(problem, key=spec.name, remedy=f"Send {held.dtype}.")


def check_complete(names: Iterable[str], model: Model) -> None:
    """Errors: ``TensorMissing``, naming the first one."""
    missing = sorted(set(model.tensors) - set(names))
    if missing:
        problem = f"not sent, and {len(missing) - 1} others"
        raise TensorMissing(problem, key=missing[0], remedy="Send every tensor in one sync.")


def check_aliases(digests: Mapping[str, str], model: Model) -> None:
    """A tied tensor that is sent, too, equals the one it is tied to. Errors: ``AliasDiffers``."""
    for alias, target in model.aliases.items():
        if alias in digests and digests[alias] != digests.get(target):
            problem = f"is tied to {target} here, but arrived with other bytes"
            raise AliasDiffers(problem, key=alias, remedy="Untie them in config.json, or train them tied.")


def check_sync(request: SyncRequest, model: Model) -> None:
    """All of it. Errors: every class of this file."""
    names = [spec.name for spec in request.tensors]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise TensorRepeated("announced twice", key=repeated[0], remedy="Announce each tensor once.")
    _check_buckets(request.tensors, request.buckets)
    if request.digests is not None and len(request.digests) != len(request.tensors):
        problem = f"{len(request.digests)} digests for {len(request.tensors)} tensors"
        raise BucketInvalid(problem, key="digests", remedy="Send one digest per tensor, or null.")
    if request.adapter is not None:
        _check_adapter(request.adapter, names, model)
        return
    for spec in request.tensors:
        check_tensor(spec, model)
    check_complete(names, model)


def _check_buckets(tensors: Sequence[TensorSpec], buckets: Sequence[int]) -> None:
    if sum(buckets) != len(tensors):
        problem = f"buckets hold {sum(buckets)} tensors, {len(tensors)} are announced"
        raise BucketInvalid(problem, key="buckets", remedy="Let the buckets cover all tensors in order.")
    first = 0
    for place, size in enumerate(buckets):
        dtypes = {spec.dtype for spec in tensors[first : first + size]}
        if len(dtypes) > 1:
            problem = f"holds {' and '.join(sorted(dtypes))}"
            raise BucketInvalid(problem, key=f"buckets[{place}]", remedy="Begin a new bucket where the type changes.")
        first += size


def _check_adapter(adapter: AdapterPlan, names: Sequence[str], model: Model) -> None:
    sent = set(names)
    for place, merge in enumerate(adapter.merges):
        key = f"adapter.merges[{place}]"
        if merge.name not in model.tensors:
            raise TensorUnknown("the served model has no such tensor", key=merge.name, remedy=_SAME_MODEL)
        parts = [merge.lora_a, merge.lora_b, *([merge.magnitude] if merge.magnitude else [])]
        for part in parts:
            if part not in sent:
                problem = f"{merge.name} needs {part}, which is not announced"
                raise AdapterInvalid(problem, key=key, remedy="Announce every adapter tensor.")
