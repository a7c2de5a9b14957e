"""Segments in, gradients out: pack them into rows, mask what is not to be learnt, score the rest.

``pack`` and ``mask`` work on plain lists and need no torch; ``collate``, ``attention`` and ``loss`` do.
"""
