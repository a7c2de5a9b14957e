"""Portable vectors: inputs with the outputs that the specification asks for, for implementations in any language."""
