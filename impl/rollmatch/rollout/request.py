"""Samples -> requests, each with a seed of its own. Needs no torch."""

from collections.abc import Callable, Sequence

import numpy as np

from rollmatch.records import RolloutRequest, Sample


def derive_seed(run_seed: int, *, step: int, rank: int, index: int) -> int:
    """One seed per request from (``training.seed``, ``global_step``, rank, within-step sample index).

    In 1 .. 2**31 - 1: never 0, which ms-swift reads as unset. Uses numpy's SeedSequence, whose mixing is stable
    across versions and machines.

    >>> derive_seed(42, step=3, rank=0, index=5) == derive_seed(42, step=3, rank=0, index=5)
    True
    >>> len({derive_seed(42, step=3, rank=rank, index=index) for rank in range(2) for index in range(50)})
    100
    """
    word = np.random.SeedSequence([run_seed, step, rank, index]).generate_state(1, np.uint32)[0]
    return (int(word) & 0x7FFFFFFF) or 1


def make_requests(
    samples: Sequence[Sample],
    *,
    prompt_of: Callable[[Sample], tuple[int, ...]],
    run_seed: int,
    step: int,
    rank: int,
) -> list[RolloutRequest]:
    """One request per sample, in order; the id reads ``<optimizer step>.<rank>.<index>``.

    A sample that is to be answered several times stands there as often: each place has a seed of its own.
    """
    return [
        RolloutRequest(
            request_id=f"{step}.{rank}.{index}",
            sample=sample,
            prompt_token_ids=prompt_of(sample),
            seed=derive_seed(run_seed, step=step, rank=rank, index=index),
        )
        for index, sample in enumerate(samples)
    ]
