"""GRPO: rewards, group advantages and the objective."""
