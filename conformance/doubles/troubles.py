"""Environments that get into trouble: which one, the sample's number says."""

import asyncio
import os
import time

from conformance.doubles.ladders import Ladder

HANGS, RAISES, FLOODS, DIES, FAILS_TO_BEGIN = 1, 2, 3, 4, 5
FLOOD = 1000


class Troubled(Ladder):
    """A ladder whose second step goes wrong."""

    def __init__(self, slip=0.0, trouble=None, steps=0):
        super().__init__(slip)
        self.trouble, self.steps = trouble, steps

    def reset(self, sample, rng):
        self.trouble = sample.sample_id
        if self.trouble == FAILS_TO_BEGIN:
            raise OSError("no board")
        return super().reset(sample, rng)

    def clone(self, rng):
        twin = type(self)(self.slip, self.trouble, self.steps)
        twin.rung, twin.rng = self.rung, rng
        return twin

    def step(self, action):
        self.steps += 1
        if self.steps == 2 and self.trouble in (HANGS, RAISES, FLOODS, DIES):
            return self.go_wrong()
        return super().step(action)

    def go_wrong(self):
        if self.trouble == HANGS:
            time.sleep(600)
        if self.trouble == RAISES:
            raise KeyError("lost")
        if self.trouble == DIES:
            os._exit(3)
        return "é" * (FLOOD // 2 + 1), 0.0, False, False  # two bytes each


class Waiting(Ladder):
    """A ladder of coroutines; a step of sample 1 never returns."""

    async def reset(self, sample, rng):
        self.number = sample.sample_id
        return super().reset(sample, rng)

    def clone(self, rng):
        twin = Waiting(self.slip)
        twin.rung, twin.rng, twin.number = self.rung, rng, self.number
        return twin

    async def step(self, action):
        await asyncio.sleep(600 if self.number == HANGS else 0)
        return super().step(action)


class Locked(Troubled):
    """Cannot be pickled."""

    def reset(self, sample, rng):
        self.held = lambda: None
        return super().reset(sample, rng)
