"""Reward functions for tasks that many have; named in ``custom.extra.grpo.rewards`` as ``module:function``."""
