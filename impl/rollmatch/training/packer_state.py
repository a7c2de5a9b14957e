"""What a checkpoint keeps beside weights and optimizer: segments that wait for a row, and a window under way."""

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rollmatch.data import Window
from rollmatch.data.lazy import samples_by_id
from rollmatch.errors import LaunchError, kind_and_text
from rollmatch.model.images import ImageFeatures
from rollmatch.records import PolicyTarget, Sample, Segment

PACKER_STATE_FILE = "packer-rank{rank}.json"
BEFORE_RESUME = 0
"""Policy version of what was generated before the run was resumed: versions restart, the first one sent is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerState:
    """What one rank keeps. Made and restored by ``trainer``."""

    waiting: tuple[Segment, ...] = ()
    """Segments in the packing buffer, oldest first."""
    parts: tuple[tuple[Segment, ...], ...] = ()
    """Segments of the window under way, per part; empty between windows."""
    summary: Mapping[str, float] = field(default_factory=dict)
    """What the window's rollouts were worth, as the log says it in each of its steps."""


@dataclass(slots=True, kw_only=True)
class WindowTargets:
    """What the optimizer steps of a window learn from."""

    window: Window
    parts: tuple[tuple[Segment, ...], ...]
    """Segments of each part of the window."""
    features: MutableMapping[int, ImageFeatures] = field(default_factory=dict)
    """By sample id; what is missing is computed again."""
    summary: Mapping[str, float] = field(default_factory=dict)
    """What its rollouts were worth, for the log."""


def packer_state(waiting: Sequence[Segment], targets: WindowTargets | None, *, step: int) -> PackerState:
    """What is under way after ``step`` optimizer steps."""
    is_under_way = targets is not None and targets.window.first_step < step < targets.window.end_step
    if targets is None or not is_under_way:
        return PackerState(waiting=tuple(waiting))
    return PackerState(waiting=tuple(waiting), parts=targets.parts, summary=targets.summary)


def write_packer_state(folder: Path, state: PackerState, *, rank: int) -> None:
    """Write the rank's file into a checkpoint's folder."""
    waiting = [_as_fields(segment) for segment in state.waiting]
    parts = [[_as_fields(segment) for segment in part] for part in state.parts]
    stored = {"waiting": waiting, "parts": parts, "summary": dict(state.summary)}
    (folder / PACKER_STATE_FILE.format(rank=rank)).write_text(json.dumps(stored))


def read_packer_state(folder: Path, samples: Sequence[Sample], *, rank: int) -> PackerState:
    """Read it back. Errors: ``carry-unfit``."""
    file = folder / PACKER_STATE_FILE.format(rank=rank)
    try:
        stored = json.loads(file.read_text())
        named = (sample_id for part in (stored["waiting"], *stored["parts"]) for sample_id, _ in part)
        by_id = samples_by_id(samples, named)
        waiting = _as_segments(stored["waiting"], by_id)
        parts = tuple(_as_segments(part, by_id) for part in stored["parts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Resume with the ranks, the packing and the data set of the run that wrote it, or start a new run."
        raise LaunchError(kind_and_text(error), code="carry-unfit", key=str(file), remedy=remedy) from error
    return PackerState(waiting=waiting, parts=parts, summary=stored.get("summary", {}))


def forget_versions(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Segments of a checkpoint, older than every version of the resumed run, whose numbers restart."""
    return tuple(replace(segment, policy_version=BEFORE_RESUME) for segment in segments)


def _as_fields(segment: Segment) -> tuple[int, dict[str, object]]:
    values = {field.name: getattr(segment, field.name) for field in fields(segment) if field.name != "sample"}
    if segment.policy is not None:
        values["policy"] = asdict(segment.policy)
    return segment.sample.sample_id, values


def _as_segments(
    stored: Sequence[tuple[int, Mapping[str, object]]], samples: Mapping[int, Sample]
) -> tuple[Segment, ...]:
    return tuple(_as_segment(samples[sample_id], values) for sample_id, values in stored)


def _as_segment(sample: Sample, values: Mapping[str, Any]) -> Segment:
    policy = values.get("policy")
    return Segment(
        sample=sample,
        **{name: _as_tuple(value) for name, value in values.items() if name != "policy"},
        policy=None if policy is None else PolicyTarget(**{name: _as_tuple(value) for name, value in policy.items()}),
    )


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
