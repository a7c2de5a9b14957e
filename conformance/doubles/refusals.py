"""What a test expects of an input that is rejected: code, key, and words of the problem or the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollmatch.errors import ErrorList, RollmatchError


@contextmanager
def refused(
    code: str, key: str | None = None, *, problem: str = "", remedy: str = ""
) -> Iterator[pytest.ExceptionInfo]:
    """Expect one error, alone or as the only one of a list; ``problem`` and ``remedy`` are parts of its texts."""
    with pytest.raises(RollmatchError) as caught:
        yield caught
    (error,) = caught.value.errors if isinstance(caught.value, ErrorList) else (caught.value,)
    assert error.code == code
    assert key is None or error.key == key
    assert problem in error.problem
    assert remedy in error.remedy
