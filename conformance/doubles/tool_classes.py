"""Classes that tests name among tools, as TRL's ``environment_factory`` takes them."""

import random
from threading import Lock


class Counter:
    """Counts from where its reset begins; cannot be copied."""

    num_made = 0

    def __init__(self):
        Counter.num_made += 1
        self.lock, self.resets = Lock(), []

    def reset(self, answer=None, **columns):
        self.count, self.answer = random.randrange(1000), answer
        self.resets.append(columns["prompt"])
        return f"count={self.count}"

    def add(self, number: int) -> str:
        """
        Add a number.

        Args:
            number: What to add.
        """
        self.count += number
        return f"count={self.count}"

    @staticmethod
    def shout(text: str) -> str:
        """
        Say it louder.

        Args:
            text: What to say.
        """
        return text.upper()

    def get_reward(self):
        return float(self.count % 10)

    def _hidden(self):
        raise AssertionError


class Silent:
    """Shows nothing first, and judges by a coroutine."""

    def reset(self, **columns):
        self.said = ""

    async def say(self, text: str) -> str:
        """
        Say something.

        Args:
            text: What to say.
        """
        self.said += text
        return self.said

    async def get_reward(self):
        return float(len(self.said))


class Chance(Silent):
    """Shows something else at each reset."""

    num_resets = 0

    def reset(self, **columns):
        super().reset()
        Chance.num_resets += 1
        return f"reset {Chance.num_resets}"


class Dice(Silent):
    """Answers by chance."""

    def roll(self) -> str:
        """Roll a die."""
        return str(random.random())


class Nothing:
    """Has no reset."""


def counts(environments, **columns):
    """A reward of TRL's form."""
    return [float(one.count) for one in environments]
