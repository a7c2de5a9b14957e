"""The process of a rollout server: application, start, end."""
