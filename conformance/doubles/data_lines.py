"""Lines of data sets, and the command that converts them."""

from rollmatch.cli.main import main

SIZE = (640, 480)


def annotation(number, box, **fields):
    return {"id": number, "image_id": 7, "category_id": 90, "bbox": box, "area": 1, "iscrowd": 0, **fields}


def run(*arguments):
    return main(["data", "convert", *map(str, arguments)])


SWIFT_LINE = {"images": ["a.jpg"], "objects": {"ref": ["x"], "bbox": [[1, 2, 30, 40]]}}
NATIVE_LINE = {"images": ["a.jpg"], "width": 640, "height": 480, "objects": [{"desc": "x", "bbox_2d": [1, 2, 30, 40]}]}
