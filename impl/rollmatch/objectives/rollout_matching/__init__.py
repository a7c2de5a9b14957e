"""Rollout matching: parse, match, append; its segments and its loss."""
