"""A griffe extension: doctests in docstrings become highlighted blocks of the Python API page."""

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"(?:^>>> .*(?:\n(?!\s*$).*)*)(?:\n\n?(?=>>> ).*(?:\n(?!\s*$).*)*)*", re.MULTILINE)


class Doctests(Extension):
    """Fence doctests, and write literal-block marks ``::`` as Markdown has them."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change one object's docstring."""
        if obj.docstring is not None:
            fenced = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", fenced, flags=re.MULTILINE)
