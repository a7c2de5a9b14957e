"""Weights back: when they move (``fence``); how is the backend's affair."""
