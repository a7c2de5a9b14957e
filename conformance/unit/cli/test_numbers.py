"""Numbers on the command line."""

import argparse

import pytest

from rollmatch.cli import numbers


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (numbers.positive, ("1",), ("0",)),
        (numbers.natural, ("0",), ("-1",)),
        (numbers.port, ("1", "65535"), ("0", "65536")),
        (numbers.share, ("0.01", "1"), ("0", "1.01")),
        (numbers.seconds, ("0", "7.5"), ("-0.1", "inf", "nan")),
    ],
)
def test_numbers_of_options_have_bounds(read, good, bad):
    assert [float(read(text)) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)
