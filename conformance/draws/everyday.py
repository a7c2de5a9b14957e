"""The draws of every day: those of many that hold the most pairs of values together, in ``everyday.jsonl``.

    python -m conformance.draws.everyday --of 3000

A mistake seldom shows at one value; most show where two come together. The first draws of a seed hold few of all pairs;
the same number of draws that are chosen one after the other, each for the pairs that it adds, holds many.
Choose again where the strategy draws something new.
"""

import argparse
import json
import sys
import tempfile
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from hypothesis import Phase, given, seed

from conformance.draws.__main__ import ROUND, rules_of
from conformance.draws.compare import judge
from conformance.draws.strategy import runs
from conformance.oracle.defaults import G, T
from conformance.oracle.sampling import TooClose

FILE = Path(__file__).with_name("everyday.jsonl")
FIRST = ("custom.trainer_variant=", "overlong ")
"""Beginnings of features of which each is in some draw, however few pairs that draw has."""
NUMBER = {1: 12, 2: 2}
"""Ranks -> draws with so many; processes of ranks take ten seconds to start."""


def everyday() -> list[dict]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def features(draw: dict) -> set[str]:
    """What a draw holds: values of keys, and where it fails, resumes, has images.

    >>> sorted(features({"keys": {"a": 1}, "servers": [{}, {}], "samples": []}))
    ['a=1', 'images=0', 'resume=None', 'servers=2']
    """
    keys = draw["keys"]
    found = {f"{key}={json.dumps(value)}" for key, value in keys.items()}
    found |= {f"{name}={draw[name]}" for name in ("family", "dialect", "ranks", "dropout", "rows") if name in draw}
    found.add(f"servers={len(draw['servers'])}")
    found |= {f"server {place} {one['fails'][0][2]}" for place, one in enumerate(draw["servers"]) if "fails" in one}
    images = max((len(one.get("images", ())) for one in draw["samples"]), default=0)
    found.add(f"images={images}")
    if (rule := keys.get("overlong", "error")) != "error":
        found.add(f"overlong {rule} with{'' if images else 'out'} images")
    window = keys.get(f"{G}.steps_per_generation", 1) * keys.get(f"{G}.num_iterations", 1)
    resume, last = draw.get("resume"), keys.get(f"{T}.max_steps")
    found.add(f"resume={resume and (resume % window, window, resume == last)}")
    return found


def chosen(draws: list[dict], number: int, held: set) -> list[dict]:
    """``number`` draws that learn, each the one with the most pairs that those before lack; at first one of each
    feature that begins as ``FIRST``."""
    own = [features(draw) for draw in draws]
    wanted = {name for names in own for name in names if name.startswith(FIRST)} if number > 2 else set()
    pairs = [{*combinations(sorted(names), 2)} for names in own]
    found: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(found) < number:
            open_ = [i for i, names in enumerate(own) if pairs[i] and (not wanted or wanted & names)]
            place = max(open_, key=lambda i: len(pairs[i] - held))
            new, pairs[place] = pairs[place] - held, set()
            where = Path(folder) / str(place)
            with suppress(TooClose):
                judge(draws[place], where, Path(folder) / "models")
                if (where / "run" / "checkpoint-1").exists():  # it was not refused
                    held |= new
                    wanted -= own[place]
                    found.append(draws[place])
                    sys.stdout.write(f"{len(found)}: {len(new)} more pairs\n")
    return found


def drawn(number: int, ranks: int) -> list[dict]:
    """Different draws of so many ranks, less those that are refused for wrong keys."""
    found: dict[str, dict] = {}
    rules = rules_of(Phase.generate)
    for part in range(number // ROUND):
        keep = rules(given(draw=runs(ranks=ranks))(lambda draw: found.update({json.dumps(draw): draw})))
        seed(part)(keep)()
    return [draw for draw in found.values() if draw.get("ranks", 1) == ranks and "wrong" not in draw]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=int, default=3000, metavar="N", help="draws to choose from")
    options, held, found = parser.parse_args(), set(), []
    for ranks, number in NUMBER.items():
        found += chosen(drawn(options.of, ranks), number, held)
    FILE.write_text("".join(json.dumps(draw) + "\n" for draw in found))


if __name__ == "__main__":
    main()
