"""What a run does when, as plain lists: order of samples, windows, seeds, rows."""

from itertools import combinations, pairwise

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


def chunks(num_requests, num_servers, rank, ranks):
    """(first request, the one after the last, server) of each chunk of ceil(N / S)."""
    size, first = -(-num_requests // num_servers), rank * num_servers // ranks
    starts = range(0, num_requests, size or 1)
    return [(start, min(start + size, num_requests), (first + i) % num_servers) for i, start in enumerate(starts)]


def calls(num_requests, num_servers, rank, ranks, *, pieces):
    """(first request, the one after the last) of each call: chunks in even pieces, the first ones larger."""
    made = []
    for start, stop, _ in chunks(num_requests, num_servers, rank, ranks):
        ends = sorted({start + -(-(stop - start) * piece // pieces) for piece in range(pieces + 1)})
        made += pairwise(ends)
    return made


def sampled_seeds(dialect, prompts, seeds):
    """What the responses of one call are sampled by: its own seed each, where the dialect has that."""
    if dialect == "swift":
        return [seeds[0] + place for place in range(len(seeds))]
    if dialect != "trl":
        return seeds
    found, places = list(seeds), {}
    for place, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt), []).append(place)
    for count in {len(own) for own in places.values()}:  # a call for all prompts that occur so often
        alike = [place for own in places.values() if len(own) == count for place in own]
        for i, place in enumerate(alike):
            found[place] = seeds[alike[0]] + i
    return found


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
