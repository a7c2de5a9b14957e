"""Rollouts in, segments out: parse strictly, match with the ground truth, append what was missed.

``parse`` reads one response, ``match`` pairs its objects with the true ones, ``transport`` says which bins the
paired slots should have held, ``append`` writes the rest, ``rollout_matching`` walks through all four. No torch.
"""
