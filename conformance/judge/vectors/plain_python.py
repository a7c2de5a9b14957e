"""Seeds and advantages without any dependency: an example for other languages.

``rollmatch-vectors run python plain_python.py``
"""

import json
import sys
from math import fsum, sqrt

MASK = 2**32 - 1  # all arithmetic of seeds is in unsigned 32 bits


def words_of(number):
    """Little-endian 32-bit words; 0 has one."""
    return [number & MASK] + (words_of(number >> 32) if number > MASK else [])


class Hash:
    """A multiplicative hash whose constant moves on with every use."""

    def __init__(self, constant, factor):
        self.constant, self.factor = constant, factor

    def __call__(self, value):
        value ^= self.constant
        self.constant = self.constant * self.factor & MASK
        value = value * self.constant & MASK
        return value ^ value >> 16


def mix(left, right):
    value = 0xCA01F9DD * left - 0x4973F715 * right & MASK
    return value ^ value >> 16


def seed_of(run_seed, step, rank, index):
    """numpy's ``SeedSequence([run_seed, step, rank, index]).generate_state(1)``, in 1 .. 2**31 - 1."""
    entropy = [word for number in (run_seed, step, rank, index) for word in words_of(number)]
    scramble = Hash(0x43B0D7E5, 0x931E8875)
    pool = [scramble(word) for word in entropy[:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mix(pool[target], scramble(pool[source]))
    for word in entropy[4:]:
        pool = [mix(value, scramble(word)) for value in pool]
    return (Hash(0x8B51F9DD, 0x58F38DED)(pool[0]) & 0x7FFFFFFF) or 1


def seeds(given):
    place = given["run_seed"], given["step"], given["rank"]
    return {"seeds": [seed_of(*place, index) for index in range(given["num_requests"])]}


def deviation(rewards):
    mean = fsum(rewards) / max(len(rewards), 1)
    return sqrt(fsum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1))


def advantages(given):
    everything = [reward for group in given["groups"] for reward in group if reward is not None]
    return {"advantages": [group_advantages(group, deviation(everything), **given) for group in given["groups"]]}


def group_advantages(group, deviation_of_batch, baseline, scale, **_):
    known = [reward for reward in group if reward is not None]
    if len(set(known)) < 2:
        return [0] * len(group)
    divisor = {"group": deviation(known) + 1e-4, "batch": deviation_of_batch + 1e-4, "none": 1}[scale]
    size = len(known) - (baseline == "leave_one_out")
    return [0 if one is None else (one * len(known) - fsum(known)) / size / divisor for one in group]


CASES = {"seeds": seeds, "advantages": advantages}
for line in sys.stdin:
    vector = json.loads(line)
    function = CASES.get(vector["case"])
    reply = {"output": function(vector["input"])} if function else {"unsupported": "only seeds and advantages"}
    sys.stdout.write(json.dumps({"id": vector["id"], **reply}) + "\n")
    sys.stdout.flush()
