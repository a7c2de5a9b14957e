"""The section ``custom.dataset``: a Hugging Face data set in place of JSONL files."""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rollmatch.config.section import Count, Listed, Section, Text

FILE_FORMATS = ("parquet", "arrow", "json", "csv")
"""Sources whose ``train`` and ``val`` are files."""
_SWIFT_ID = re.compile(r"(?:(?P<hub>HF|MS)::)?(?P<source>[^:#]+)(?::(?P<name>[^:#]+))?(?:#(?P<take>\d+))?")
_OF_MODELSCOPE = ("swift", "AI-ModelScope", "modelscope", "iic")
"""Owners on ModelScope in the examples of ms-swift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftId:
    """A data set as ms-swift names it: ``[HF::|MS::]id_or_path[:subset][#number]``."""

    source: str
    name: str | None
    take: int | None
    is_modelscope: bool

    @property
    def keys(self) -> dict[str, object]:
        """Keys of ``custom.dataset`` that are set."""
        return {key: value for key in ("source", "name", "take") if (value := getattr(self, key)) is not None}


def read_swift_id(text: str) -> SwiftId | None:
    """None where it is nothing of the kind.

    >>> read_swift_id("AI-MO/NuminaMath-TIR#1000").keys, read_swift_id("HF::org/x:sub").keys
    ({'source': 'AI-MO/NuminaMath-TIR', 'take': 1000}, {'source': 'org/x', 'name': 'sub'})
    >>> read_swift_id("swift/self-cognition").is_modelscope, read_swift_id("a:b:c")
    (True, None)
    """
    if "://" in text or (found := _SWIFT_ID.fullmatch(text)) is None:
        return None
    source, take = found["source"], found["take"]
    is_modelscope = found["hub"] == "MS" or (found["hub"] is None and source.partition("/")[0] in _OF_MODELSCOPE)
    return SwiftId(
        source=source, name=found["name"], take=None if take is None else int(take), is_modelscope=is_modelscope
    )


def from_modelscope(source: str) -> str:
    """What to type for a data set of ModelScope."""
    return f"Run modelscope download --dataset {source} --local_dir DIR, and write source: DIR."


class ColumnsConfig(Section):
    """Columns of the data set; a dot reaches into a struct, as in objects.bbox."""

    image: Text | None = "image"
    """An image, or its path, relative to custom.image_root; a list of several; null: samples are text alone."""
    boxes: Text | None = "objects.bbox"
    """The boxes of an image, a list of four numbers each; null where samples have a prompt."""
    descs: Text | None = "objects.category"
    """Their descriptions, one each; numbers of a ClassLabel become its names."""
    crowds: Text | None = None
    """Whether each object is a crowd region, which goes to metadata.crowd; null: there are none."""
    prompt: Text | None = None
    """Own question of each sample, or a chat as in messages (variants with rewards, answer_format text); null uses
    custom.prompts."""
    completion: Text | None = None
    """Answer to prompt, a text or a chat of one message (answer_format text)."""
    messages: Text | None = None
    """Own chat of each sample (variants with rewards, answer_format text), a list of {role, content}."""
    metadata: Listed[Text] | None = None
    """Columns that reward functions get in sample.metadata; null: where samples have a question, all that the other
    keys do not name, but for images."""

    @property
    def has_questions(self) -> bool:
        """Whether samples have a question of their own, and no boxes."""
        return self.prompt is not None or self.messages is not None


class DatasetConfig(Section):
    """A data set that the package datasets reads, without conversion."""

    source: Text = Field(examples=["cppe-5"])
    """Hub id, local directory, or parquet, arrow, json or csv: then train and val name files."""
    name: Text | None = None
    """Configuration of the data set on the hub."""
    revision: Text | None = None
    """Commit or tag on the hub; name a commit where a run is to be repeated exactly."""
    train: Text = "train"
    """Split of the training samples, such as train or train[:90%], or a file pattern."""
    val: Text | None = "validation"
    """Split of the evaluation samples, or a file pattern; null: the run is not evaluated."""
    streaming: bool = False
    """Read only the first take records, without downloading the rest; they are stored in the cache of datasets."""
    take: Count | None = None
    """Use only the first records of each split; required with streaming. Unit: samples."""
    columns: ColumnsConfig = ColumnsConfig()
    """Columns of the data set."""
    box: Literal["xywh", "xyxy", "cxcywh"] | None = None
    """The four numbers of a box: COCO's left, top, width, height; two corners; centre and size. Required for boxes."""
    unit: Literal["pixel", "norm1", "norm1000"] = "pixel"
    """Unit of these numbers: pixels of the image, 0..1, or 0..1000."""
