"""A JSONL file -> samples, or every bad record of it at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rollmatch.data.chat import check_chat, is_chat, make_chat_sample
from rollmatch.data.place import Place
from rollmatch.data.record import check_record, make_sample
from rollmatch.errors import DataError, ErrorList
from rollmatch.records import GroundTruth, Sample

NUM_SHOWN = 20
"""Problems of a file that are told in full; the others are counted."""


class DatasetUnreadable(DataError):
    """The file cannot be read."""

    code = "dataset-unreadable"


class DatasetEmpty(DataError):
    """The file holds no sample."""

    code = "dataset-empty"


class LineNotJson(DataError):
    """A line is not one JSON value in UTF-8, or holds a name twice, or NaN; an empty line is neither."""

    code = "line-not-json"


class BadSamples(ErrorList):
    """Everything wrong with a data set; the message shows the first 20 problems and counts the others."""

    code = "bad-samples"

    def __str__(self) -> str:
        shown = [str(error) for error in self.errors[:NUM_SHOWN]]
        if self.num_hidden:
            shown.append(f"... and {self.num_hidden} more problems")
        return "\n".join(shown)

    @property
    def num_hidden(self) -> int:
        """Problems the message does not show."""
        return max(0, len(self.errors) - NUM_SHOWN)


def load_samples(
    path: str | Path,
    image_root: str | Path | None = None,
    ordering: Literal["as_given", "sorted"] = "as_given",
    *,
    chat_system: str | None = None,
) -> list[Sample]:
    """Read and check a whole data set.

    Records have objects; with ``chat_system`` they may have their own prompt instead, and a bare prompt follows that
    system message (none if it is empty).

    Image paths start at ``image_root``, or else at the directory of the file. ``sorted`` orders the objects of a
    sample by top edge, then left edge.

    Errors: ``BadSamples``, each of whose errors has the key ``file:line``.
    """
    root = Path(path).parent if image_root is None else Path(image_root)
    errors: list[DataError] = []
    samples: list[Sample] = []
    for index, line in enumerate(_read_lines(path)):
        place = Place(sample_id=index, key=f"{path}:{index + 1}", image_root=root, system=chat_system or "")
        record, found = _parse_line(line, place.key)
        asks = chat_system is not None and is_chat(record)
        found += [] if found else (check_chat if asks else check_record)(record, place)
        if found:
            errors += found
        else:
            samples.append(_ordered((make_chat_sample if asks else make_sample)(record, place), ordering))
    if errors:
        raise BadSamples(errors)
    return samples


def top_left(truth: GroundTruth) -> tuple[int, int]:
    """Top edge, then left edge.

    >>> from rollmatch.records import Geometry
    >>> top_left(GroundTruth(desc="leaf", geometry=Geometry.POLY, bins=(30, 5, 20, 9, 40, 9)))
    (5, 20)
    """
    return min(truth.bins[1::2]), min(truth.bins[0::2])


def _ordered(sample: Sample, ordering: str) -> Sample:
    return replace(sample, objects=tuple(sorted(sample.objects, key=top_left))) if ordering == "sorted" else sample


def _read_lines(path: str | Path) -> list[bytes]:
    """Lines end at line feeds only: other line separators may stand inside JSON texts."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        remedy = "Name a JSONL file."
        raise BadSamples([DatasetUnreadable(str(error.strerror), key=str(path), remedy=remedy)]) from error
    if not content.strip():
        raise BadSamples([DatasetEmpty("the file holds no sample", key=str(path), remedy="Write one per line.")])
    return content.removesuffix(b"\n").split(b"\n")


def _parse_line(line: bytes, key: str) -> tuple[Any, list[DataError]]:
    try:
        text = line.decode("utf-8")
        return json.loads(text, object_pairs_hook=_without_twins, parse_constant=_refuse_constant), []
    except (ValueError, RecursionError) as error:
        problem = f"the line is not JSON: {error}" if line.strip() else "the line is empty"
        return None, [LineNotJson(problem, key=key, remedy="Write one JSON object per line.")]


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return dict(pairs)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
