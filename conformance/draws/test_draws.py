"""Drawn runs agree with the oracle; more of them, and longer: ``python -m conformance.draws --seconds 600``."""

import os
from types import SimpleNamespace

import pytest

from conformance.draws.__main__ import search


@pytest.mark.slow
def test_drawn_runs_agree_with_the_oracle(capsys):
    """10 draws, 150 in CI, as far as four minutes go; always of one seed: the command above looks for new ones."""
    draws = 150 if "ROLLMATCH_STRICT" in os.environ else 10
    options = SimpleNamespace(draws=draws, seconds=240, seed=7, ranks=None, shrink_seconds=60)
    assert search(options) == 0, capsys.readouterr().out
