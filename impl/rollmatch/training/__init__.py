"""The trainer: one step, its checkpoints, its report, its evaluation."""
