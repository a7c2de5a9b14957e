"""The policy: weights, adapters, chat template, vocabulary."""
