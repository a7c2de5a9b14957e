"""A small correct rollout server over ``transformers``, with one switch per mistake that the checks must find.

Of the swift, trl and vllm dialects, and of the native one but for its weight transfer. A switch is asked only where it
matters, and the server remembers which ones a check came to.
"""
