"""Adapters into weights: the same arithmetic on learners and on rollout servers."""
