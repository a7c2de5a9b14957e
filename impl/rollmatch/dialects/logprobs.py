"""Whether a server returns log-probabilities of the distribution it samples from, or of the model's own.

A stock ``vllm serve`` returns the second unless it was started otherwise; they differ as soon as a temperature or a cut
shapes the first.
"""

from rollmatch.dialects.prompt import Prompt, SamplingRules
from rollmatch.dialects.session import RolloutServer
from rollmatch.errors import RolloutError

TOLERANCE = 1e-3
"""How far from 0 the log-probability of the only token left may be."""
QUESTION = "How many?"


def check_logprobs(server: RolloutServer, *, prompt_token_ids: tuple[int, ...]) -> None:
    """Request one token where sampling is cut to a single one, which then is certain, whatever the model thinks.

    A model may be certain by itself: so the same is requested once more without that token. Of two tokens, one at least
    is not certain before the cut. ``prompt_token_ids`` are those of ``QUESTION``.

    Errors: ``logprobs-of-another-distribution``, those of ``RolloutServer.infer``.
    """
    certain = _ask(server, prompt_token_ids, without=())
    _ask(server, prompt_token_ids, without=certain)


def _ask(server: RolloutServer, prompt_token_ids: tuple[int, ...], *, without: tuple[int, ...]) -> tuple[int, ...]:
    """The response, of one token."""
    prompt = Prompt(
        request_id="logprobs",
        prompt_token_ids=prompt_token_ids,
        messages=({"role": "user", "content": QUESTION},),
        images=(),
        seed=1,
    )
    rules = SamplingRules(
        max_tokens=1,
        temperature=1.0,
        top_p=1.0,
        top_k=1,
        repetition_penalty=1.0,
        stop_token_ids=(),
        banned_token_ids=without,
        logprobs=True,
    )
    (reply,) = server.infer([prompt], rules)
    logprobs = reply.logprobs or ()
    if len(logprobs) != 1 or abs(logprobs[0]) > TOLERANCE:
        problem = f"{logprobs[0]:.3g} for the only token left" if logprobs else "none at all"
        raise RolloutError(
            f"{server.base_url} returns other log-probabilities than those it samples by: {problem}",
            code="logprobs-of-another-distribution",
            key=server.base_url,
            remedy="Start vllm serve with --logprobs-mode processed_logprobs.",
        )
    return reply.response_token_ids
