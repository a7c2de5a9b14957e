"""The learner's side of the border: calls to rollout servers of any dialect. Needs no torch."""
