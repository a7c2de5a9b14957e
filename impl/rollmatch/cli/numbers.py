"""Kinds of numbers on a command line, for argparse: what is out of range is wrong usage, named by its option."""

import argparse
import math

from rollmatch.config.connection import LAST_PORT


def positive(text: str) -> int:
    """A whole number from 1."""
    return _at_least(int(text), 1)


def natural(text: str) -> int:
    """A whole number from 0."""
    return _at_least(int(text), 0)


def port(text: str) -> int:
    """1 to 65535."""
    number = positive(text)
    if number > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is more than {LAST_PORT}")
    return number


def share(text: str) -> float:
    """Above 0, up to 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number


def seconds(text: str) -> float:
    """A finite time from 0."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return number


def _at_least(number: int, least: int) -> int:
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number
