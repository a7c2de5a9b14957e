"""Segments in, gradients out: pack segments into rows, run the model on them, score the tokens that are learned.

``pack`` and ``balance`` work on plain lists and need no torch; ``batch``, ``attention`` and ``head`` do.
"""
