"""Whether servers that prove nothing apply an adapter that is sent alone: their greedy tokens show it, before training.

ms-swift's server answers 200 before it has loaded an adapter, and also when loading fails. An adapter at the start of a
run changes nothing, so noise is sent in its place: random matrices B. Prompts are text, so only adapters of the
language model are accepted; vLLM leaves out those of a vision tower without an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from rollmatch.errors import SyncError
from rollmatch.model.parts import NAMES, Part, count_parts
from rollmatch.model.policy import unwrap
from rollmatch.records import RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.weights.named_weights import named_weights

QUESTIONS = ("How many?", "Where is it?", "Say a number.", "What comes next: 1, 2, 3")
DECODING = Decoding(max_new_tokens=16)
_SHARES = (0.25, 1.0)
"""Of a weight's spread, that the noise changes it by; the second where the first changes no token."""


def prove_adapters(backend: VllmServerBackend, model: nn.Module) -> None:
    """Send noise as the adapter and compare greedy tokens; afterwards the policy is as before, and the servers are not.

    The learner's next sync replaces the noise. Errors: ``adapter-not-applied``, those of ``push_adapter``.
    """
    check_parts(model)
    learner = HfBackend(model, backend.template, batch_size=len(QUESTIONS))
    requests = [_request(backend, place, text) for place, text in enumerate(QUESTIONS)]
    before = _tokens(learner, requests)
    for share in _SHARES:
        with _noise(model, share):
            expected = _tokens(learner, requests)
            if expected == before:
                continue
            backend.push_adapter(named_weights(model).adapter(), version=backend.policy_version + 1)
        _check(backend, requests, expected, before)
        return
    problem = "not even noise in the adapter changes what the policy writes, so that nothing can be shown"
    raise SyncError(problem, code="adapter-not-applied", key="tuner", remedy="Set sync.mode to full.")


def check_parts(model: nn.Module) -> None:
    """Errors: ``adapter-not-applied``, where a part has adapters that vLLM leaves out."""
    for name, count in count_parts(model, unwrap(model)).items():
        if count.num_trained and name != NAMES[Part.LANGUAGE]:
            problem = f"the {name} has an adapter, which vLLM leaves out"
            remedy = "Set sync.mode to full, or adapt the language model alone (tuner.freeze_vit, freeze_aligner)."
            raise SyncError(problem, code="adapter-not-applied", key="tuner.target_regex", remedy=remedy)


def _check(
    backend: VllmServerBackend,
    requests: Sequence[RolloutRequest],
    expected: Sequence[tuple[int, ...]],
    before: Sequence[tuple[int, ...]],
) -> None:
    """Each server writes what the changed policy writes, as far as rounding allows; the old policy does not."""
    least = sum(map(common_prefix, before, expected))
    for place, server in enumerate(backend.servers):
        rollouts = backend.generate_on(place, requests, DECODING, start=0)
        found = sum(map(common_prefix, (one.response_token_ids for one in rollouts), expected))
        if found <= least:
            raise SyncError(
                f"{server.base_url} writes {found} tokens of {sum(map(len, expected))} as the policy does with the "
                f"adapter it was sent; without an adapter it would be {least}",
                code="adapter-not-applied",
                key=server.base_url,
                remedy="Look at the server's output (rank above --vllm_max_lora_rank?), or set sync.mode to full.",
            )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs.

    >>> common_prefix((1, 2, 3), (1, 2)), common_prefix((1,), (2, 1))
    (2, 0)
    """
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


@contextmanager
def _noise(model: nn.Module, share: float) -> Iterator[None]:
    """Matrices B drawn so that each weight changes by this share of its spread; put back at the end."""
    generator, kept = torch.Generator().manual_seed(1), list[tuple[torch.Tensor, torch.Tensor]]()
    try:
        with torch.no_grad():
            for layer in cast("Iterator[Any]", (one for one in model.modules() if hasattr(one, "lora_A"))):
                name = layer.active_adapters[0]
                lora_a, lora_b = layer.lora_A[name].weight, layer.lora_B[name].weight
                kept.append((lora_b, lora_b.detach().clone()))
                spread = layer.get_base_layer().weight.float().std()
                product = layer.scaling[name] * len(lora_a) ** 0.5 * lora_a.float().std()
                noise = torch.randn(lora_b.shape, generator=generator) * (share * spread / product).item()
                lora_b.copy_(noise)
        yield
    finally:
        with torch.no_grad():
            for weight, old in kept:
                weight.copy_(old)


def _request(backend: VllmServerBackend, place: int, text: str) -> RolloutRequest:
    sample = Sample(sample_id=place, origin="adapter proof", images=(), messages=(("user", text),))
    return RolloutRequest(
        request_id=f"adapter-{place}",
        sample=sample,
        prompt_token_ids=tuple(backend.template.prompt_token_ids(sample)),
        seed=1,
    )


def _tokens(learner: HfBackend, requests: Sequence[RolloutRequest]) -> list[tuple[int, ...]]:
    return [rollout.response_token_ids for rollout in learner.generate(requests, DECODING)]
