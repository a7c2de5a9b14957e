"""``rollmatch data convert``: detection data sets of other projects to ours, and back."""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rollmatch.data.formats import BadLabel, LabeledImage, OnBad, raise_bad
from rollmatch.errors import ConfigError

FORMATS = ("coco", "yolo", "swift", "native")
"""``coco`` reads LVIS, too."""
PROMPT = "Detect all objects in the image."


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``data convert`` with its options."""
    below = commands.add_parser("data", help="convert detection data sets").add_subparsers(
        required=True, metavar="COMMAND"
    )
    parser = below.add_parser("convert", help="COCO, LVIS, YOLO and ms-swift data sets to ours, and back")
    parser.set_defaults(command=convert)
    parser.add_argument("source", type=Path, metavar="INPUT", help="instances JSON, data.yaml or JSONL")
    parser.add_argument("out", type=Path, metavar="OUTPUT", help="JSONL or instances JSON; a directory for yolo")
    parser.add_argument("--from", choices=FORMATS, required=True, dest="source_format", help="coco reads LVIS, too")
    parser.add_argument("--to", choices=FORMATS, default="native", dest="target_format", help="default: our JSONL")
    parser.add_argument("--images", type=Path, metavar="DIR", help="where images are; default: the input's directory")
    parser.add_argument(
        "--relative", action="store_true", help="write image paths that start at the output's directory"
    )
    parser.add_argument(
        "--categories", type=Path, metavar="FILE", help="instances JSON whose category ids --to coco keeps"
    )
    parser.add_argument("--split", default="train", help="of a YOLO data set")
    parser.add_argument("--polygons", action="store_true", help="write outlines instead of boxes, where there are any")
    parser.add_argument("--prompt", default=PROMPT, help="question of each line, with --to swift")
    parser.add_argument("--skip-bad", action="store_true", help="leave out entries that cannot be read, and count them")


def convert(options: argparse.Namespace) -> None:
    """Convert, and print what was written and dropped. Errors: ``label-invalid``, ``file-missing``,
    ``output-exists``, ``argument-not-used``."""
    _check(options)
    skipped: list[BadLabel] = []

    def skip(error: BadLabel) -> None:
        skipped.append(error)
        print(f"skipped: {error}", file=sys.stderr)

    bad = skip if options.skip_bad else raise_bad
    partial = options.out.with_name(f"{options.out.name}.partial")
    if partial.is_dir():  # of a conversion that was cut off
        shutil.rmtree(partial)
    lines = _write(options, _read(options, bad), bad, partial)
    partial.replace(options.out)
    for line in lines:
        print(line)
    if skipped:
        print(f"skipped {len(skipped)} bad entries")
    print(f"wrote {options.out}")


def _check(options: argparse.Namespace) -> None:
    if not options.source.is_file():
        remedy = "Give an instances JSON (coco), a data.yaml (yolo) or a JSONL file (swift, native)."
        raise ConfigError(f"{options.source} is not a file", code="file-missing", key="INPUT", remedy=remedy)
    if options.categories and not options.categories.is_file():
        problem, remedy = f"{options.categories} is not a file", "Give the instances JSON whose ids are kept."
        raise ConfigError(problem, code="file-missing", key="--categories", remedy=remedy)
    if options.out.exists():
        remedy = "Remove it, or name another output."
        raise ConfigError(f"{options.out} exists", code="output-exists", key="OUTPUT", remedy=remedy)
    if options.categories and options.target_format != "coco":
        problem, remedy = "is used with --to coco alone", "Leave it out."
        raise ConfigError(problem, code="argument-not-used", key="--categories", remedy=remedy)
    if options.relative and options.target_format == "yolo":
        problem, remedy = "does not apply: YOLO's images are links in the output", "Leave it out."
        raise ConfigError(problem, code="argument-not-used", key="--relative", remedy=remedy)


def _read(options: argparse.Namespace, bad: OnBad) -> Iterator[LabeledImage]:
    images = options.images or options.source.parent
    if options.source_format == "coco":
        from rollmatch.data.formats.coco import read_coco

        return read_coco(options.source, images, bad=bad)
    if options.source_format == "yolo":
        from rollmatch.data.formats.yolo import read_yolo

        return read_yolo(options.source, options.split, bad=bad)
    if options.source_format == "swift":
        from rollmatch.data.formats.swift import read_swift

        return read_swift(options.source, images, bad=bad)
    from rollmatch.data.formats.native import read_native

    return read_native(options.source, images, bad=bad)


def _named(image: str, out: Path | None) -> str:
    """The path of an image as a file holds it: absolute, or from the directory of ``out``."""
    path = Path(image).resolve()  # not by its text: sub/.. is another directory where sub is a link
    return str(path) if out is None else os.path.relpath(path, out.parent.resolve())


def _write(options: argparse.Namespace, images: Iterator[LabeledImage], bad: OnBad, out: Path) -> list[str]:
    out.parent.mkdir(parents=True, exist_ok=True)
    if options.target_format in ("coco", "swift"):
        images = (replace(image, path=_named(image.path, out if options.relative else None)) for image in images)
    if options.target_format == "coco":
        from rollmatch.data.formats.coco import read_categories, write_coco

        write_coco(images, out, read_categories(options.categories) if options.categories else None)
    elif options.target_format == "yolo":
        from rollmatch.data.formats.yolo import write_yolo

        write_yolo(images, out)
    elif options.target_format == "swift":
        from rollmatch.data.formats.swift import write_swift

        write_swift(images, out, prompt=options.prompt)
    else:
        from rollmatch.data.formats.native import NativeWriter

        writer = NativeWriter(out, polygons=options.polygons, relative=options.relative, bad=bad)
        writer.upright = options.out.with_name(f"{options.out.stem}-upright")
        return list(writer.write(images).lines())
    return []
