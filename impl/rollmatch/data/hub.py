"""Samples of a Hugging Face data set: columns are mapped to the fields of our records, row by row, when they are used.

The order of rows is that of the split, so a run is as reproducible as with JSONL. Images that the data set holds as
bytes are written to the cache once, under the hash of their bytes, because backends get paths.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rollmatch.config.dataset import FILE_FORMATS, DatasetConfig, from_modelscope, read_swift_id
from rollmatch.data.formats.native import CUT, is_cut, to_bins, why_without_area
from rollmatch.data.image import ImageUnreadable, check_image, read_header
from rollmatch.data.jsonl import LAZY_ABOVE, BadSamples, ReadRules
from rollmatch.data.lazy import MOST_SPREAD, LazySamples
from rollmatch.data.place import image_path
from rollmatch.errors import ConfigError, DataError, first_line
from rollmatch.records import Sample

SECTION = "custom.dataset"
CACHE_VARIABLE = "ROLLMATCH_CACHE"
"""Directory of images that data sets hold as bytes; default: ~/.cache/rollmatch."""
NORMS = {"norm1": 1.0, "norm1000": 1000.0}


def load_hub_samples(
    config: DatasetConfig, split: str, rules: ReadRules, *, skipped: list[DataError] | None = None
) -> Sequence[Sample]:
    """Samples of one split, by its key (``train`` or ``val``). Large ones are checked in part, the rest at their use.

    Errors: ``package-missing``, ``dataset-unreadable``, ``column-missing``, ``BadSamples``.
    """
    rows = HubRows(config, split, rules)
    count = len(rows.table)
    looked_at = range(count) if count <= LAZY_ABOVE else np.linspace(0, count - 1, MOST_SPREAD).astype(int).tolist()
    errors: list[DataError] = []
    bad, num_objects = [], 0
    for place in looked_at:
        sample, found = rows.read(place)
        num_objects += 0 if sample is None else len(sample.objects)
        errors += found
        bad += [place] if found else []
    if errors and (skipped is None or len(bad) == len(looked_at)):
        raise BadSamples(errors)
    if skipped is not None:
        skipped += errors
    good = np.setdiff1d(np.arange(count), np.array(bad, dtype=np.int64))
    dropped = Counter(rows.dropped)  # rows are read again when they are used
    return LazySamples(rows.sample, good, num_objects=num_objects if len(looked_at) == count else None, dropped=dropped)


def hub_digest(config: DatasetConfig, split: str) -> str:
    """Hexadecimal digest of the number of rows, and of what at most ``MOST_SPREAD`` of them hold, evenly from first to
    last. datasets' own fingerprint differs with the times of files, too.
    """
    table = _load(config, split)
    places = np.linspace(0, len(table) - 1, min(len(table), MOST_SPREAD)).astype(int).tolist()
    digest = xxhash.xxh3_128(str(len(table)).encode())
    for column in table.with_format("arrow")[places].combine_chunks().columns:
        for buffer in (buffer for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None):
            digest.update(buffer)
    return digest.hexdigest()


class HubRows:
    """Rows of one split as records."""

    def __init__(self, config: DatasetConfig, split: str, rules: ReadRules) -> None:
        self.config, self.rules, self.columns = config, rules, config.columns
        self.origin = f"{config.source}[{getattr(config, split)}]"
        self.table = _load(config, split)
        self.dropped: Counter[str] = Counter()
        """Why boxes were left out -> their number, over all reads."""
        is_text = self.columns.has_questions
        if is_text and "image" not in self.columns.model_fields_set and "image" not in self.table.features:
            self.columns = self.columns.model_copy(update={"image": None})
        for name in ("image", "prompt", "completion", "messages", *(() if is_text else ("boxes", "descs", "crowds"))):
            self._check(f"columns.{name}", getattr(self.columns, name))
        for column in self.columns.metadata or ():
            self._check("columns.metadata", column)
        if self.columns.metadata is None:
            self.columns = self.columns.model_copy(update={"metadata": self._others() if is_text else ()})
        self.names = [] if is_text else _label_names(self.table.features, self.columns.descs)

    def _others(self) -> tuple[str, ...]:
        """Columns that no key names, but for images."""
        columns = self.columns
        named = {columns.image, columns.prompt, columns.completion, columns.messages}
        pictures = {name for name, feature in self.table.features.items() if "Image(" in repr(feature)}
        return tuple(name for name in self.table.features if name not in named | pictures)

    def sample(self, place: int) -> Sample:
        """One sample. Errors: ``BadSamples``."""
        sample, errors = self.read(place)
        if sample is None:
            raise BadSamples(errors)
        return sample

    def read(self, place: int) -> tuple[Sample | None, list[DataError]]:
        """One sample, or what is wrong with its row; the row's key is ``source[split]:row``, from 0."""
        key = f"{self.origin}:{place}"
        try:
            record = self._record(self.table[place])
        except (FileNotFoundError, ImageUnreadable) as error:
            image = error.filename if isinstance(error, FileNotFoundError) else error.key
            return None, [*check_image(image, size=None, key=key)]
        except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
            problem = f"the row does not fit the mapping: {error!r}"
            return None, [
                DataError(problem, code="row-invalid", key=key, remedy=f"Correct {SECTION}.columns, box or unit.")
            ]
        return self.rules.read(record, place, key)

    def _record(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = self.columns
        found = _reach(row, columns.image) if columns.image else None
        images = [_path_of(image, self.rules.image_root) for image in _listed(found)]
        record: dict[str, Any] = {"images": images}
        metadata = {name: _reach(row, name) for name in columns.metadata or ()}
        if columns.has_questions:
            named = ("prompt", columns.prompt), ("completion", columns.completion), ("messages", columns.messages)
            found = {name: _reach(row, column) for name, column in named if column}
            is_chat = isinstance(found.get("prompt"), list) and not columns.completion
            record |= {("messages" if is_chat and name == "prompt" else name): one for name, one in found.items()}
        else:
            if not images:
                raise ValueError("there is no image")
            size, _ = read_header(images[0])
            objects, crowds = self._objects(row, size)
            metadata |= {"crowd": crowds} if crowds else {}
            record |= {"width": size[0], "height": size[1], "objects": objects}
        return record | ({"metadata": metadata} if metadata else {})

    def _objects(self, row: dict[str, Any], size: tuple[int, int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        columns = self.columns
        boxes, descs = _reach(row, columns.boxes) or [], _reach(row, columns.descs) or []
        flags = (_reach(row, columns.crowds) or []) if columns.crowds else [False] * len(boxes)
        objects, crowds = list[dict[str, Any]](), list[dict[str, Any]]()
        for box, desc, flag in zip(boxes, descs, flags, strict=True):
            corners = self._corners(box, size)
            if is_cut(corners, size):
                self.dropped[CUT] += 1
            if (reason := why_without_area(corners, size)) is not None:
                self.dropped[reason] += 1
                continue
            item = {"desc": self._desc(desc), "bbox_2d": list(to_bins(corners, size))}
            (crowds if flag else objects).append(item)
        return objects, crowds

    def _desc(self, desc: object) -> object:
        if not (self.names and isinstance(desc, int)):
            return desc
        if desc < 0:  # as datasets writes what has no label
            raise ValueError(f"class {desc} has no name")
        return self.names[desc]

    def _corners(self, box: Sequence[float], size: tuple[int, int]) -> list[float]:
        """[x1, y1, x2, y2] pixels."""
        if len(box) != 4:
            raise ValueError(f"a box has {len(box)} numbers")
        norm = NORMS.get(self.config.unit)
        scales = (1.0, 1.0) if norm is None else (size[0] / norm, size[1] / norm)
        left, top, third, fourth = (float(value) * scales[place % 2] for place, value in enumerate(box))
        if self.config.box == "xyxy":
            return [left, top, third, fourth]
        if self.config.box == "cxcywh":
            left, top = left - third / 2, top - fourth / 2
        return [left, top, left + third, top + fourth]

    def _check(self, key: str, column: str | None) -> None:
        """Errors: ``column-missing``."""
        known = list(_paths(self.table.features))
        if column is not None and column not in known:
            problem, remedy = f"{self.origin} has no column {column}", f"Name one of {', '.join(known)}, or null."
            raise ConfigError(problem, code="column-missing", key=f"{SECTION}.{key}", remedy=remedy)


def _load(config: DatasetConfig, split: str) -> Any:
    """The rows of a split; images stay encoded. Errors: ``package-missing``, ``dataset-unreadable``."""
    try:
        import datasets
    except ImportError as error:
        problem, remedy = "needs the package datasets, which is not installed", "Install it: pip install 'datasets>=4'."
        raise ConfigError(problem, code="package-missing", key=SECTION, remedy=remedy) from error
    _check_source(config, split)
    datasets.disable_progress_bars()
    wanted = getattr(config, split)
    files = {"data_files": wanted} if config.source in FILE_FORMATS else {}
    try:
        table = datasets.load_dataset(
            config.source,
            config.name,
            revision=config.revision,
            split="train" if files else wanted,
            streaming=config.streaming,
            **files,
        )
        for name, feature in (table.features or {}).items():
            encoded = [feature.feature] if hasattr(feature, "feature") else [feature]
            if isinstance(encoded[0], datasets.Image):
                kept = datasets.Image(decode=False)
                table = table.cast_column(name, datasets.List(kept) if hasattr(feature, "feature") else kept)
        if config.streaming:
            return datasets.Dataset.from_generator(partial(iter, table.take(config.take)), features=table.features)
    except (OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = first_line(error) or repr(error)
        remedy = "Correct source, name, revision or the split; a hub id needs a network, or its files in the cache."
        if (named := read_swift_id(config.source)) is not None and named.is_modelscope:
            remedy = f"If this is an id of ModelScope: {from_modelscope(named.source)}"
        raise ConfigError(
            f"cannot be read: {reason}", code="dataset-unreadable", key=f"{SECTION}.{split}", remedy=remedy
        ) from error
    return table if config.take is None else table.select(range(min(config.take, len(table))))


def _check_source(config: DatasetConfig, split: str) -> None:
    """datasets takes a path for a hub id, and without files a format's name reads the working directory.

    Errors: ``dataset-unreadable``.
    """
    name, problem = config.source, None
    swift = None if Path(name).exists() else read_swift_id(name)
    if swift is not None and swift.source != name:
        typed = ", ".join(f"{key}: {value}" for key, value in swift.keys.items())
        note = " take uses the first records, where ms-swift draws them." if swift.take else ""
        remedy = from_modelscope(swift.source) if swift.is_modelscope else f"Write {typed}.{note}"
        problem = f"{name} is an id in ms-swift's form"
        raise ConfigError(problem, code="dataset-unreadable", key=f"{SECTION}.source", remedy=remedy)
    if Path(name).is_file():
        name, problem = Path(name).suffix.lstrip(".").replace("jsonl", "json"), "is a file"
    elif name not in FILE_FORMATS and name.isidentifier() and find_spec(f"datasets.packaged_modules.{name}"):
        problem = f"{name} is a format that is not read here"
    if problem is not None:
        known = ", ".join(FILE_FORMATS)
        remedy = (
            f"Write source: {name}, and {split}: its path."
            if name in FILE_FORMATS
            else f"Convert it; {known} are read."
        )
        raise ConfigError(problem, code="dataset-unreadable", key=f"{SECTION}.source", remedy=remedy)


def _label_names(features: Any, column: str | None) -> list[str]:
    """Names of a column of class numbers; empty where it holds texts."""
    feature: Any = features
    for part in column.split(".") if column else ():
        feature = feature.feature if hasattr(feature, "feature") else feature
        feature = feature[part] if isinstance(feature, dict) else None
    while hasattr(feature, "feature"):
        feature = feature.feature
    return list(getattr(feature, "names", ()))


def _paths(features: Any) -> Iterator[str]:
    """Names of columns, and of the parts of structs."""
    for name, feature in features.items():
        yield name
        inner = feature.feature if hasattr(feature, "feature") else feature
        if isinstance(inner, dict):
            yield from (f"{name}.{part}" for part in _paths(inner))


def _reach(row: Any, column: str | None) -> Any:
    """A value inside a row; of a list of structs the list of their values.

    >>> _reach({"objects": [{"bbox": 1}, {"bbox": 2}]}, "objects.bbox"), _reach({"a": {"b": [3]}}, "a.b")
    ([1, 2], [3])
    """
    value = row
    for part in column.split(".") if column else ():
        if value is None:
            return None
        value = [one[part] for one in value] if isinstance(value, list) else value[part]
    return value


def _listed(found: Any) -> list[Any]:
    """One image or several as a list; null is none.

    >>> _listed(None), _listed("a.png"), _listed(["a.png", None])
    ([], ['a.png'], ['a.png'])
    """
    return [image for image in (found if isinstance(found, list) else [found]) if image is not None]


def _path_of(image: Any, root: Path) -> str:
    """The path of an image; one of bytes is written to the cache first."""
    if isinstance(image, dict):
        raw, path = image.get("bytes"), image.get("path")
        if raw is None:
            image = path
        else:
            return cached_image(raw, Path(path or "").suffix)
    if not isinstance(image, str) or not image:
        raise ValueError(f"the image is {type(image).__name__}")
    return image_path(image, root)


def cached_image(raw: bytes, suffix: str) -> str:
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "rollmatch") / "images"
    name = xxhash.xxh3_128_hexdigest(raw)
    path = cache / name[:2] / f"{name}{suffix}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_bytes(raw)
        unfinished.replace(path)
    return str(path)
