"""Seconds that a step spends on the tensors of its images: one after the other, as the learner does, and in processes.

    python benchmarks/rollout/image_preparation.py MODEL [--images 128] [--size 1280 960] [--group 8] [--processes 2]

MODEL is a directory with a processor of the Qwen family. Images are JPEG files of noise, and are not made smaller. Both
ways prepare an image once, however many completions its group has; ``serial_per_completion_s`` is what it would cost to
prepare it for each of them.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from rollmatch.model.images import ImageProcessing


@cache
def processing(directory: str, most_pixels: int) -> ImageProcessing:
    """The model's, once per process."""
    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(directory)
    processor.image_processor.size["longest_edge"] = most_pixels  # Qwen's name of the largest area
    return ImageProcessing(processor, directory)


def prepare(directory: str, most_pixels: int, path: str) -> dict[str, np.ndarray]:
    """Decode an image and run the processor; arrays, because they travel to the learner's process."""
    with Image.open(path) as image:
        features = processing(directory, most_pixels).process([image.convert("RGB")])
    return {name: tensor.numpy() for name, tensor in features.tensors.items()}


def decode(path: str) -> None:
    """Read an image alone."""
    with Image.open(path) as image:
        image.convert("RGB")


def make_images(folder: Path, number: int, size: Sequence[int]) -> list[str]:
    """JPEG files of smooth noise."""
    random, paths = np.random.default_rng(0), []
    for place in range(number):
        coarse = Image.fromarray(random.integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8))
        path = folder / f"{place}.jpg"
        coarse.resize(tuple(size)).save(path, quality=90)
        paths.append(str(path))
    return paths


def seconds(work: object) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 960))
    parser.add_argument("--group", type=int, default=8, help="completions per image")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = make_images(Path(folder), options.images, options.size)
        one = partial(prepare, options.model, options.size[0] * options.size[1])
        arrays = one(paths[0])
        decoded = seconds(lambda: [decode(path) for path in paths])
        serial = seconds(lambda: [one(path) for path in paths])
        with ProcessPoolExecutor(options.processes, mp_context=get_context("forkserver")) as pool:
            list(pool.map(one, paths[: options.processes]))  # start, import
            pooled = seconds(lambda: list(pool.map(one, paths)))
    figures = {
        "images": options.images,
        "size": list(options.size),
        "tensor_mb_per_image": sum(array.nbytes for array in arrays.values()) / 1e6,
        "decode_s": decoded,
        "serial_s": serial,
        "serial_ms_per_image": 1000 * serial / options.images,
        "serial_per_completion_s": serial * options.group,
        "processes": options.processes,
        "pooled_s": pooled,
    }
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    sys.stdout.write(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
