"""Let a CUDA build of torchvision import beside a CPU build of torch.

vLLM's CPU wheel requires torchvision, and the package index may only offer builds whose compiled part needs CUDA.
Qwen3-VL's processor needs only the pure-torch part, which imports once the two operators exist that
torchvision describes to the compiler (``nms``, ``qnms``). ``rollmatch doctor --fix`` has Python run this file at
start-up, where and only where that is needed. It costs nothing until torchvision is imported. Can go when the CPU
wheel's dependency resolves to a CPU build.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_declared: list[object] = []
"""Keeps torch's library handle: the declarations vanish with it."""


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is first looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()
        return None


def _declare_operators() -> None:
    import torch

    if torch.version.cuda is not None or _declared:
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
