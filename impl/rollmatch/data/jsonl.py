"""A JSONL file -> samples, or every bad record of it at once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rollmatch.data.chat import check_chat, is_chat, make_chat_sample, with_columns, with_completion
from rollmatch.data.checked import fingerprint_of, num_objects_checked
from rollmatch.data.content import plain_record
from rollmatch.data.lazy import LazySamples, LineIndex
from rollmatch.data.place import Place, image_path
from rollmatch.data.quick import parse_json, quick_record
from rollmatch.data.record import check_record, make_sample
from rollmatch.errors import DataError, ErrorList, RollmatchError
from rollmatch.records import GroundTruth, Sample

NUM_SHOWN = 20
"""Problems of a file that are reported in full; the others are counted."""
NUM_LINES = 5
"""Lines that are named beside the first one with the same problem."""
LAZY_ABOVE = 50_000
"""Lines above which samples are made when they are used, not before; their images are opened then, too."""


class BadSamples(ErrorList):
    """Everything wrong with a data set; the message shows the first 20 problems and counts the others."""

    code = "bad-samples"

    def __str__(self) -> str:
        shown = [str(error) for error in self.shown]
        if self.num_hidden:
            shown.append(f"... and {self.num_hidden} more problems")
        return "\n".join(shown)

    @property
    def shown(self) -> list[RollmatchError]:
        """The first problems; what several records have alike is one, with the lines of the others."""
        return [_as_one(alike) for alike in self._groups[:NUM_SHOWN]]

    @property
    def num_hidden(self) -> int:
        """Problems the message does not show."""
        return max(0, len(self._groups) - NUM_SHOWN)

    @property
    def _groups(self) -> list[list[RollmatchError]]:
        groups: dict[tuple[str, ...], list[RollmatchError]] = {}
        for error in self.errors:
            groups.setdefault((error.code, error.problem, error.remedy), []).append(error)
        return [*groups.values()]


def _as_one(alike: Sequence[RollmatchError]) -> RollmatchError:
    first, *others = alike
    if not others:
        return first
    lines = ", ".join(error.key.rpartition(":")[2] for error in others[:NUM_LINES])
    more = ", ..." if len(others) > NUM_LINES else ""
    problem = f"{first.problem} (and {len(others)} more: {lines}{more})"
    return DataError(problem, code=first.code, key=first.key, remedy=first.remedy)


def top_left(truth: GroundTruth) -> tuple[int, int]:
    """Top edge, then left edge.

    >>> from rollmatch.records import Geometry
    >>> top_left(GroundTruth(desc="leaf", geometry=Geometry.POLY, bins=(30, 5, 20, 9, 40, 9)))
    (5, 20)
    """
    return min(truth.bins[1::2]), min(truth.bins[0::2])


class SystemMessages(NamedTuple):
    """Which records bring their own chat, and the system messages in front of bare prompts; empty: none."""

    chats: str | None = None
    """In records without objects; None: there are no such records."""
    objects: str = ""
    """In records with objects."""
    answered: bool = False
    """Whether all records are chats that end with the answer, which is taught; or prompt and completion."""


NO_SYSTEM = SystemMessages()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRules:
    """How records become samples."""

    image_root: Path
    ordering: Literal["as_given", "sorted"] = "as_given"
    systems: SystemMessages = NO_SYSTEM

    def read(self, record: Any, sample_id: int, key: str) -> tuple[Sample | None, list[DataError]]:
        """The sample, or what is wrong with the record."""
        answered = self.systems.answered
        record = with_completion(record) if answered else record
        record = with_columns(record) if answered or self.systems.chats is not None else record
        record, errors = plain_record(record, key)
        if errors:
            return None, errors
        asks = answered or (self.systems.chats is not None and is_chat(record))
        system = self.systems.chats if asks else self.systems.objects
        place = Place(sample_id=sample_id, key=key, image_root=self.image_root, system=system or "", answered=answered)
        errors = list((check_chat if asks else check_record)(record, place))
        if errors:
            return None, errors
        sample = (make_chat_sample if asks else make_sample)(record, place)
        if self.ordering == "sorted":
            sample = replace(sample, objects=tuple(sorted(sample.objects, key=top_left)))
        return sample, []


def load_samples(
    path: str | Path,
    image_root: str | Path | None = None,
    ordering: Literal["as_given", "sorted"] = "as_given",
    *,
    systems: SystemMessages = NO_SYSTEM,
    skipped: list[DataError] | None = None,
) -> Sequence[Sample]:
    """Read and check a whole data set; blank lines are passed over.

    Records have objects, and may have their own prompt beside them; with ``systems.chats`` they may have it instead.

    Image paths start at ``image_root``, or else at the directory of the file. ``sorted`` orders the objects of a
    sample by top edge, then left edge. Of more than ``LAZY_ABOVE`` lines only an index is kept: images must exist, but
    are opened when their sample is used.

    Errors: ``BadSamples``, each of whose errors has the key ``file:line``. With ``skipped``, they go there, and bad
    records are left out; a file without any good one is an error still.
    """
    root = Path(path).parent if image_root is None else Path(image_root)
    lines = JsonlFile(path, ReadRules(image_root=root, ordering=ordering, systems=systems))
    errors: list[DataError] = []
    samples = lines.lazy(errors) if len(lines.index) > LAZY_ABOVE else lines.eager(errors)
    if errors and (skipped is None or not samples):
        raise BadSamples(errors)
    if skipped is not None:
        skipped += errors
    return samples


class JsonlFile:
    """The records of a file. Errors: ``BadSamples`` of ``dataset-unreadable`` or ``dataset-empty``."""

    def __init__(self, path: str | Path, rules: ReadRules) -> None:
        self.path, self.rules = path, rules
        try:
            self.index = LineIndex(path)
            is_empty = not any(line.strip() for line in self.index)
        except OSError as error:
            remedy = "Name a JSONL file."
            raise BadSamples(
                [DataError(str(error.strerror), code="dataset-unreadable", key=str(path), remedy=remedy)]
            ) from error
        if is_empty:
            raise BadSamples(
                [
                    DataError(
                        "the file holds no sample", code="dataset-empty", key=str(path), remedy="Write one per line."
                    )
                ]
            )

    def eager(self, errors: list[DataError]) -> list[Sample]:
        """All good samples; what is wrong with the others goes to ``errors``."""
        samples = []
        for place, line in enumerate(self.index):
            sample, found = self._read(place, line)
            errors += found
            if sample is not None:
                samples.append(sample)
        return samples

    def lazy(self, errors: list[DataError]) -> LazySamples:
        """As ``eager``, but samples are made at their use; images are only looked for.

        A rank looks at no line of a file that its launcher has found to be right.
        """
        fingerprint = fingerprint_of(self.path, self.rules)
        if (known := num_objects_checked(fingerprint)) is not None:
            return LazySamples(self._at, np.arange(len(self.index)), num_objects=known)
        good, num_objects = np.ones(len(self.index), dtype=bool), 0
        for place, line in enumerate(self.index):
            record = quick_record(line)
            if record is not None and all(map(self._exists, record.images)):
                num_objects += len(record.objects)
                continue
            sample, found = self._read(place, line)
            errors += found
            good[place] = sample is not None
            num_objects += 0 if sample is None else len(sample.objects)
        found_right = fingerprint if good.all() else ""
        return LazySamples(self._at, np.flatnonzero(good), num_objects=num_objects, fingerprint=found_right)

    def _at(self, place: int) -> Sample:
        """Errors: ``BadSamples``."""
        sample, errors = self._read(place, self.index.line(place))
        if sample is None:
            raise BadSamples(errors)
        return sample

    def _read(self, place: int, line: bytes) -> tuple[Sample | None, list[DataError]]:
        key = f"{self.path}:{place + 1}"
        if not line.strip():  # between records, and after the last one
            return None, []
        try:
            record = parse_json(line.decode("utf-8-sig" if place == 0 else "utf-8"))  # Windows' editors write a mark
        except ValueError as error:
            problem, remedy = f"the line is not JSON: {error}", "Write one JSON object per line."
            kind = Path(self.path).suffix.lstrip(".")
            if isinstance(error, UnicodeDecodeError):
                remedy = "Save the file unpacked, as UTF-8; custom.dataset reads parquet, arrow and csv."
            if is_document := place == 0 and line.strip() in (b"[", b"{"):
                problem, kind = "the file is one JSON document over several lines", "json"
            if is_document or (place == 0 and kind in ("parquet", "arrow", "csv")):
                remedy = f"Read it as it is: custom.dataset: {{source: {kind}, train: {self.path}, val: FILE, columns: "
                remedy += "{prompt: COLUMN}}; or write one JSON object per line."
                raise BadSamples([DataError(problem, code="line-not-json", key=key, remedy=remedy)]) from error
            return None, [DataError(problem, code="line-not-json", key=key, remedy=remedy)]
        return self.rules.read(record, place, key)

    def _exists(self, image: str) -> bool:
        return os.path.isfile(image_path(image, self.rules.image_root))
