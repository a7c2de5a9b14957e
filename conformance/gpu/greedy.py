"""What a server answers greedily."""

from pathlib import Path

from conformance.doubles.digits import GREEDY, requests_for, scenes, template_of
from rollmatch.data.ids import pack_ids


def answers(server, num_scenes):
    """A scene at a time, so that no batch rounds otherwise than another."""
    template = template_of()
    sampling = {
        "max_tokens": GREEDY.max_new_tokens,
        "stop_token_ids": [template.vocabulary.stop_id],
        "logit_bias": dict.fromkeys(template.banned_ids, -100.0),
    }
    written = []
    for request in requests_for(scenes()[:num_scenes]):
        image = Path(request.sample.images[0]).read_bytes()
        body = {"request_id": "x", "prompt_token_ids": pack_ids(request.prompt_token_ids), "images": [image]}
        written += server.infer([body], **sampling)[0]
    return written
