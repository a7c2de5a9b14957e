"""The samples of a split, from where the configuration says they are."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rollmatch.config.custom import CustomConfig
from rollmatch.data.jsonl import ReadRules, SystemMessages, load_samples
from rollmatch.errors import DataError
from rollmatch.records import Sample

Split = Literal["train", "val"]


def load_split(
    custom: CustomConfig, split: Split, *, ordering: str | None = None, skipped: list[DataError] | None = None
) -> Sequence[Sample]:
    """All samples of a split, checked; none where there is no such split.

    Errors: those of ``load_samples`` and of ``load_hub_samples``.
    """
    if split == "val" and not custom.is_evaluated:
        return ()
    order: Literal["as_given", "sorted"] = "as_given" if ordering == "as_given" else custom.object_ordering
    systems = SystemMessages(chats=custom.chat_system, objects=custom.prompts.system, answered=custom.teaches_text)
    if custom.dataset is None:
        path = origin_of(custom, split)
        return load_samples(path, custom.image_root, order, systems=systems, skipped=skipped)
    from rollmatch.data.hub import load_hub_samples

    rules = ReadRules(image_root=Path(custom.image_root or "."), ordering=order, systems=systems)
    return load_hub_samples(custom.dataset, split, rules, skipped=skipped)


def content_digest(custom: CustomConfig, split: Split) -> str:
    """Hexadecimal digest of what a split holds, wherever that is; empty where there is no such split.

    Of files every byte counts, images beside them do not; of a data set's rows see ``hub_digest``.
    """
    if split == "val" and not custom.is_evaluated:
        return ""
    if custom.dataset is None:
        with open(origin_of(custom, split), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    from rollmatch.data.hub import hub_digest

    return hub_digest(custom.dataset, split)


def origin_of(custom: CustomConfig, split: Split) -> str:
    """Where a split comes from, for people: a file, or the data set and its split."""
    if custom.dataset is not None:
        return f"{custom.dataset.source}[{getattr(custom.dataset, split)}]"
    path: str = getattr(custom, f"{split}_jsonl")
    return path
