"""Environments of several turns: what they are, and episodes played in them."""
