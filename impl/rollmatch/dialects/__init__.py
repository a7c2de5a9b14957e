"""Protocols of rollout servers: for each dialect its routes, client and weight sender."""
