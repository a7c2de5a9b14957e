"""Distillation on the policy's own completions: teachers, divergences and the objective."""
