"""Seconds that a step spends on the images of its groups, before and after they were shared; all in one run.

    python benchmarks/rollout/image_preparation.py MODEL [--images 128] [--size 1280 960] [--group 8] [--generation 10]

MODEL is a directory with a processor of the Qwen family. Images are JPEG files of noise, and are not made smaller.

=========================  =======================================================================================
``per_completion_s``       tensors made for every completion (extrapolated from one per image)
``serial_s``               once per image, one after the other, when the rollouts are there
``threads_s``              once per image, by threads, when the rollouts are there
``after_generation_s``     what is left of it when the rollouts are there, begun before a generation of so many seconds
``left_of_serial``         that, as a share of ``serial_s``, which is what preparing them in the step costs
``cpu_s_per_image``        processor time of one image; other work on the machine adds nothing to it
``bar``                    for 128 images and 8 threads with a core each, from ``cpu_s_per_image``: the generation that
                           hides all of it, and what a shorter one may be for 0.5 s to be left
``call_mb``, ``decode_s``  a call of all completions on its way to a server: its size, and decoding its images there
=========================  =======================================================================================
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from rollmatch.dialects.native.client import encode
from rollmatch.dialects.prompt import Prompt, SamplingRules
from rollmatch.model.images import MOST_THREADS, ImagePreparation, ImageProcessing, num_threads
from rollmatch.records import Sample
from rollmatch.server.images import ImageReader

BAR_IMAGES, BAR_S = 128, 0.5
"""Of a learner beside seven servers: images a step, and what they may cost of it."""
RULES = SamplingRules(
    max_tokens=512,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    repetition_penalty=1.0,
    stop_token_ids=(2,),
    banned_token_ids=(),
    logprobs=False,
)


def make_images(folder: Path, number: int, size: Sequence[int]) -> list[Path]:
    """JPEG files."""
    random, paths = np.random.default_rng(0), []
    for place in range(number):
        coarse = Image.fromarray(random.integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8))
        coarse.resize(tuple(size)).save(folder / f"{place}.jpg", quality=90)
        paths.append(folder / f"{place}.jpg")
    return paths


def seconds(work: Callable[[], object]) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_learner(directory: str, paths: Sequence[Path], *, group: int, generation_s: float) -> dict[str, object]:
    """The learner's tensors."""
    processor = AutoProcessor.from_pretrained(directory)
    processor.image_processor.size["longest_edge"] = 2**24  # Qwen's name of the largest area
    processing = ImageProcessing(processor, directory)
    samples = [
        Sample(sample_id=place, origin="", images=(str(path),), objects=(), width=1, height=1)
        for place, path in enumerate(paths)
    ]

    def prepare(sample: Sample) -> object:
        with Image.open(sample.images[0]) as image:
            return processing.process([image.convert("RGB")])

    preparation = ImagePreparation(prepare)  # type: ignore[arg-type]
    tensors = preparation.collect(samples[:1])[0].tensors  # also starts a thread
    began_cpu = time.process_time()
    serial = seconds(lambda: [prepare(sample) for sample in samples])
    cpu_per_image = (time.process_time() - began_cpu) / len(samples)
    threads = seconds(lambda: preparation.collect(samples))
    preparation.begin(samples)
    time.sleep(generation_s)  # a learner of its own waits for servers
    after_generation = seconds(lambda: preparation.collect(samples))
    hidden_behind = BAR_IMAGES * cpu_per_image / MOST_THREADS
    return {
        "threads": num_threads(),
        "cpu_s_per_image": cpu_per_image,
        "tensor_mb_per_image": sum(tensor.nbytes for tensor in tensors.values()) / 1e6,
        "per_completion_s": serial * group,
        "serial_s": serial,
        "threads_s": threads,
        "generation_s": generation_s,
        "after_generation_s": after_generation,
        "left_of_serial": after_generation / serial,
        "bar": {"hidden_behind_s": hidden_behind, "half_a_second_left_at_s": max(0.0, hidden_behind - BAR_S)},
    }


def measure_call(paths: Sequence[Path], group: int) -> dict[str, dict[str, float]]:
    """One call to one server, images in every request and once."""
    prompts = [
        Prompt(request_id=f"{path}{i}", prompt_token_ids=(5,), messages=(), images=(path.read_bytes(),), seed=1)
        for path in paths
        for i in range(group)
    ]
    once = encode(prompts, RULES)
    held = once | {"requests": [{"images": list(prompt.images)} for prompt in prompts], "images": []}
    reader = ImageReader(())

    def decode_all(shared: bool) -> None:
        budget = reader.budget()
        for prompt in prompts:
            budget.left = 2**62  # not what is measured
            reader.read(prompt.images[0], budget if shared else reader.budget(), item=0, key="")

    return {
        "per_completion": {"call_mb": _megabytes(held), "decode_s": seconds(lambda: decode_all(False))},
        "once": {"call_mb": _megabytes(once), "decode_s": seconds(lambda: decode_all(True))},
    }


def _megabytes(body: object) -> float:
    return len(msgspec.msgpack.encode(body)) / 1e6


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 960))
    parser.add_argument("--group", type=int, default=8, help="completions per image")
    parser.add_argument("--generation", type=float, default=10, help="seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = make_images(Path(folder), options.images, options.size)
        learner = measure_learner(options.model, paths, group=options.group, generation_s=options.generation)
        call = measure_call(paths[: max(1, options.images // options.group)], options.group)
    figures = {"images": options.images, "size": list(options.size), "cores": os.cpu_count(), "group": options.group}
    sys.stdout.write(json.dumps(_rounded(figures | {"learner": learner, "call": call})) + "\n")


if __name__ == "__main__":
    main()
