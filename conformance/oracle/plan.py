"""What a run does when, as plain lists: order of samples, windows, seeds, rows."""

from itertools import combinations

import numpy as np


def parts_of_epoch(num_samples, keys, epoch, *, ranks):
    """[rank][step] samples of each optimizer step of an epoch, in micro-batches; passes over a window included."""
    order = np.random.default_rng([keys["training.seed"], epoch]).permutation(num_samples).tolist()
    batch, accumulation = keys["training.per_device_train_batch_size"], keys["training.gradient_accumulation_steps"]
    per_step, passes = batch * accumulation * ranks, keys["custom.extra.grpo.num_iterations"]
    if passes > 1:  # whole steps only; a data set that is smaller than one is gone through again until it fills it
        num_steps = max(num_samples // per_step, 1)
        order = (order * per_step)[: num_steps * per_step]
        window = per_step * keys["custom.extra.grpo.steps_per_generation"]
        parts = [order[start : start + window] for start in range(0, len(order), window)]
        order = [index for part in parts for _ in range(passes) for index in part]
    if ranks > 1:  # the last round is filled from the beginning
        rounds = -(-len(order) // (batch * ranks))
        order = (order * rounds * batch * ranks)[: rounds * batch * ranks]
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    mine = [batches[rank::ranks] for rank in range(ranks)]
    return [[own[s : s + accumulation] for s in range(0, len(own), accumulation)] for own in mine]


def windows(num_samples, keys, *, ranks, num_steps):
    """For each optimizer step: (first step of its window, [rank] samples of the window, [rank] samples of the step,
    [rank] number of micro-batches); a sample stands there by its place in the window.
    """
    length = keys["custom.extra.grpo.steps_per_generation"] * keys["custom.extra.grpo.num_iterations"]
    made, epoch = [], 0
    while len(made) < num_steps:
        parts = parts_of_epoch(num_samples, keys, epoch, ranks=ranks)
        for start in range(0, len(parts[0]), length):
            uses = [own[start : start + length] for own in parts]
            distinct = len(uses[0]) // keys["custom.extra.grpo.num_iterations"]
            first = len(made)
            for step in range(len(uses[0])):
                rows = []
                for own in uses:
                    sizes = [sum(map(len, part)) for part in own[:distinct]]
                    begin = sum(sizes[: step % distinct])
                    whole = [index for part in own[:distinct] for micro in part for index in micro]
                    rows.append((whole, list(range(begin, begin + sizes[step % distinct])), len(own[step])))
                made.append((first, *map(list, zip(*rows, strict=True))))
        epoch += 1
    return made[:num_steps]


def seed_of(keys, *, step, rank, index):
    """Of one request; never 0."""
    word = np.random.SeedSequence([keys["training.seed"], step, rank, index]).generate_state(1, np.uint32)[0]
    return int(word) % 2**31 or 1


def rows_of(waiting, num_rows, capacity):
    """(rows, what waits on): the oldest, and those that fill its row best; ``waiting`` are (length, thing)."""
    rows, waiting = [], list(waiting)
    for left in reversed(range(num_rows)):
        free, kept = waiting[: len(waiting) - left], waiting[len(waiting) - left :]
        oldest, others = free[0], free[1:]
        best, room = (), capacity - oldest[0]
        sums = {0: ()}  # of lengths -> the first subset in lexical order
        for count in range(1, len(others) + 1):
            for chosen in combinations(range(len(others)), count):
                total = sum(others[i][0] for i in chosen)
                if total <= room and (total not in sums or chosen < sums[total]):
                    sums[total] = chosen
        best = sums[max(sums)]
        rows.append([oldest, *(others[i] for i in best)])
        waiting = [one for i, one in enumerate(others) if i not in best] + kept
    return rows, waiting
