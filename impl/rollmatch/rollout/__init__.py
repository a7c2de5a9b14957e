"""Samples in, rollouts out: one frozen copy of the policy writes one response per sample, un-packed."""
