"""Samples of calls that take turns on one GPU, their memory, and what they were taken on."""

import importlib.metadata
import os
import platform
import statistics
import time

import torch

HEAD_START_CYCLES = 40_000_000
"""About 20 ms of a GPU that does nothing, in which Python gets ahead, as it is ahead behind a model's layers."""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "triton", "liger-kernel", "flash-attn")


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201


def on_gpu():
    return torch.cuda.is_available()


def device():
    return torch.device("cuda" if on_gpu() else "cpu")


def time_once(call):
    """Seconds from the moment the GPU is free until the call's work is done."""
    if not on_gpu():
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def peak_of(call):
    """Bytes that a call takes beyond what is there before it; 0 without a GPU."""
    if not on_gpu():
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def take_turns(calls, *, rounds, limit_s):
    """Name -> samples and peak: each call once for its memory, then all in turn while rounds and time last."""
    figures = {}
    for name, call in calls.items():
        call()
        figures[name] = {"peak_bytes": peak_of(call), "samples_s": []}
        say(f"  {name}: warm, peak {figures[name]['peak_bytes'] / 1e9:.2f} GB")
    began = time.perf_counter()
    for turn in range(rounds):
        if turn >= 2 and time.perf_counter() - began > limit_s:
            say(f"  {turn} of {rounds} rounds in {limit_s} s")
            break
        for name, call in calls.items():
            figures[name]["samples_s"].append(time_once(call))
    for name, one in figures.items():
        one["median_s"] = statistics.median(one["samples_s"])
        say(f"  {name}: {one['median_s'] * 1000:.2f} ms (of {len(one['samples_s'])})")
    return figures


def matmul_tflops(size):
    """What this device multiplies per second in bfloat16, in 10**12 operations."""
    left, right = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    time_once(lambda: left @ right)
    seconds = statistics.median(time_once(lambda: left @ right) for _ in range(5))
    return 2 * size**3 / seconds / 1e12


def surroundings():
    """Hardware and versions."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    gpu = torch.cuda.get_device_properties(0) if on_gpu() else None
    return {
        "gpu": gpu
        and {"name": gpu.name, "memory_bytes": gpu.total_memory, "multiprocessors": gpu.multi_processor_count},
        "cpu": {"machine": platform.machine(), "cores": os.cpu_count()},
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def judge(bars, name, value, *, at_least=None, at_most=None):
    """Write one bar down with whether it was met."""
    met = value >= at_least if at_least is not None else value <= at_most
    bars[name] = {"value": value, "at_least": at_least, "at_most": at_most, "met": met}
    bound = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
    say(f"  {'met   ' if met else 'MISSED'} {name}: {value:.4g} ({bound})")
