"""JSONL -> samples, checked before anything is trained; their order and the windows it is cut into. Needs no torch."""

from rollmatch.data.jsonl import BadSamples, load_samples
from rollmatch.data.order import LearnerOrder, Reuse, ReusedOrder, StepShape, Window, WindowPlan

__all__ = ["BadSamples", "LearnerOrder", "Reuse", "ReusedOrder", "StepShape", "Window", "WindowPlan", "load_samples"]
