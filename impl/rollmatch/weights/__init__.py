"""Weights on their way to rollout engines: plan, digests, senders, receivers, transports."""
