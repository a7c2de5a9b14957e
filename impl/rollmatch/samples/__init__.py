"""JSONL -> samples, checked before anything is trained; their order and the windows it is cut into. Needs no torch."""

from rollmatch.samples.jsonl import BadSamples, load_samples
from rollmatch.samples.order import LearnerOrder
from rollmatch.samples.window import ReusedOrder, StepShape, Window, WindowPlan

__all__ = ["BadSamples", "LearnerOrder", "ReusedOrder", "StepShape", "Window", "WindowPlan", "load_samples"]
