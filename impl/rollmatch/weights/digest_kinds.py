"""Each way of weights has its own digest of a tensor, 16 bytes in hexadecimal, named in a server's identity."""

from rollmatch.weights.digest import DIGEST_KIND
from rollmatch.weights.mixed_digest import MIXED_KIND

GLOO, DIRECT = "gloo", "direct"
"""Staged beside what is served, over gloo; straight into what is served, over NCCL where there are GPUs."""
DIGEST_KINDS = {GLOO: DIGEST_KIND, DIRECT: MIXED_KIND}
