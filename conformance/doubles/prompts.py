"""Prompts of four ids, and as much of a template as a backend of servers needs."""

from types import SimpleNamespace

from conformance.doubles.records import make_request
from rollmatch.model.template import TemplateOptions
from rollmatch.rollout.backend import Decoding

STOP = 9
TEMPLATE = SimpleNamespace(
    messages=lambda sample: [{"role": "user", "content": "?"}],
    banned_ids=(7,),
    options=TemplateOptions(),
    vocabulary=SimpleNamespace(stop_ids={STOP}, stop_texts=("<|im_end|>",)),
)
GREEDY = Decoding(max_new_tokens=4)


def requests_of(num_requests):
    return [make_request(i, prompt_token_ids=(100 + i, 5, STOP, 6)) for i in range(num_requests)]
