"""What forked commands find done: the digits' processor is read, with which transformers loads 200 modules.

The forkserver imports this first: the garbage collector need not walk through what it loads.
"""

import gc

gc.disable()

from conformance.doubles.digits import template_of  # noqa: E402

template_of()
