"""JSONL -> samples, checked before anything is trained, and the order the learner owns. Needs no torch."""

from rollmatch.samples.jsonl import BadSamples, load_samples
from rollmatch.samples.order import LearnerOrder

__all__ = ["BadSamples", "LearnerOrder", "load_samples"]
