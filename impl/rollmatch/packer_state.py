"""What a checkpoint keeps beside weights and optimizer: segments that wait for a row, and a window under way."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rollmatch.errors import LaunchError
from rollmatch.records import PolicyTarget, Sample, Segment

PACKER_STATE_FILE = "carry-rank{rank}.json"


class PackerStateUnfit(LaunchError):
    """What waited when a checkpoint was written is there for this rank, and of this data set."""

    code = "carry-unfit"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerState:
    """Of one rank. Made and eaten by ``trainer``."""

    waiting: tuple[Segment, ...] = ()
    """Segments in the packing buffer, oldest first."""
    parts: tuple[tuple[Segment, ...], ...] = ()
    """Segments of the window under way, per part; empty between windows."""


def write_packer_state(folder: Path, carry: PackerState, *, rank: int) -> None:
    """Write the rank's file into a checkpoint's folder."""
    waiting = [_as_fields(segment) for segment in carry.waiting]
    parts = [[_as_fields(segment) for segment in part] for part in carry.parts]
    (folder / PACKER_STATE_FILE.format(rank=rank)).write_text(json.dumps({"waiting": waiting, "parts": parts}))


def read_packer_state(folder: Path, samples: Sequence[Sample], *, rank: int) -> PackerState:
    """Read it back. Errors: ``PackerStateUnfit``."""
    file = folder / PACKER_STATE_FILE.format(rank=rank)
    by_id = {sample.sample_id: sample for sample in samples}
    try:
        told = json.loads(file.read_text())
        waiting = _as_segments(told["waiting"], by_id)
        parts = tuple(_as_segments(part, by_id) for part in told["parts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Go on with the ranks, the packing and the data set of the run that wrote it, or start anew."
        raise PackerStateUnfit(f"{type(error).__name__}: {error}", key=str(file), remedy=remedy) from error
    return PackerState(waiting=waiting, parts=parts)


def _as_fields(segment: Segment) -> tuple[int, dict[str, Any]]:
    told = {field.name: getattr(segment, field.name) for field in fields(segment) if field.name != "sample"}
    if segment.policy is not None:
        told["policy"] = asdict(segment.policy)
    return segment.sample.sample_id, told


def _as_segments(told: Sequence[tuple[int, Mapping[str, Any]]], samples: Mapping[int, Sample]) -> tuple[Segment, ...]:
    return tuple(_as_segment(samples[sample_id], named) for sample_id, named in told)


def _as_segment(sample: Sample, told: Mapping[str, Any]) -> Segment:
    policy = told.get("policy")
    return Segment(
        sample=sample,
        **{name: _as_tuple(value) for name, value in told.items() if name != "policy"},
        policy=None if policy is None else PolicyTarget(**{name: _as_tuple(value) for name, value in policy.items()}),
    )


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
