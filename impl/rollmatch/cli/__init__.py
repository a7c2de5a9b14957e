"""Commands: ``rollmatch check``, ``train``, ``serve``, ``plan`` and what they start."""
