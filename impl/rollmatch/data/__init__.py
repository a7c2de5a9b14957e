"""JSONL -> samples, checked before anything is trained; their order and the windows it is cut into. Needs no torch."""

from rollmatch.data.jsonl import BadSamples, SystemMessages, load_samples
from rollmatch.data.lazy import LazySamples, spread
from rollmatch.data.order import LearnerOrder, Reuse, ReusedOrder, StepShape, Window, WindowPlan

__all__ = [
    "BadSamples",
    "LazySamples",
    "LearnerOrder",
    "Reuse",
    "ReusedOrder",
    "StepShape",
    "SystemMessages",
    "Window",
    "WindowPlan",
    "load_samples",
    "spread",
]
