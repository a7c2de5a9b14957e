"""Secrets in a configuration: hidden wherever it is written, printed or shown."""

import re
from typing import Any

from rollmatch.errors import HIDDEN, without_credentials

_SECRET_KEY = re.compile(
    r"(^|[_-])(password|passwd|secret|authorization|(api|access|private|secret)[_-]?key"
    r"|(api|hub|hf|auth|access|refresh|session|bearer|github|wandb)[_-]token)$|^token$",
    re.IGNORECASE,
)


def without_secrets(tree: Any, key: str = "") -> Any:
    """A tree of plain values, with the values of secret keys and the credentials of URLs hidden.

    >>> without_secrets({"hub_token": "hf_x", "base_url": ["http://me:word@node7:8000"], "pad_token": "<pad>"})
    {'hub_token': '***', 'base_url': ['http://***@node7:8000'], 'pad_token': '<pad>'}
    >>> without_secrets({"x-api-key": "x", "aws_secret_access_key": "x"})
    {'x-api-key': '***', 'aws_secret_access_key': '***'}
    """
    if isinstance(tree, dict):
        return {name: without_secrets(value, str(name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(value, key) for value in tree]
    if isinstance(tree, str) and tree:
        return HIDDEN if _SECRET_KEY.search(key) else without_credentials(tree)
    return tree
