"""Functions and callbacks without a name of their own that a script passes: lambdas, closures, partials, instances.

They get one in this module, by the order in which they are passed. Every rank runs the script, so all have the same.
"""

import re
import sys
from functools import partial


def name_passed(item: object) -> str:
    """``module:name`` of an object from now on.

    >>> name_passed(lambda answer, sample: 1.0).rpartition("_")[0]
    'rollmatch.interop.passed:function'
    """
    module = sys.modules[__name__]
    for name, known in vars(module).items():
        if known is item:
            return f"{__name__}:{name}"
    inner = item.func if isinstance(item, partial) else item
    word = re.sub(r"\W", "", getattr(inner, "__name__", type(inner).__name__).replace("<lambda>", "function"))
    number = sum(name.startswith(f"{word}_") for name in vars(module))
    setattr(module, f"{word}_{number}", item)
    return f"{__name__}:{word}_{number}"
