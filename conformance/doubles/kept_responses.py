"""Sampled responses in whose midst weights change, and what each of their tokens must be."""

from itertools import accumulate
from pathlib import Path

import numpy as np

from conformance.doubles.digits import load_model, template_of
from conformance.doubles.logprobs import TOLERANCE, found_in
from conformance.doubles.server_fixtures import held
from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.records import Rollout

PER_SCENE = 2


class SampledResponses:
    """Long responses to scenes with images, sampled at temperature 1, with log-probabilities."""

    def __init__(self, instance, requests, *, length):
        self.instance, self.server, self.length = instance, instance.server, length
        self.requests = [request for request in requests for _ in range(PER_SCENE)]

    def write(self):
        """Their rollouts by the native dialect; the ends of turns are tokens like others."""
        batch = [
            {
                "request_id": str(place),
                "prompt_token_ids": pack_ids(request.prompt_token_ids),
                "images": [Path(request.sample.images[0]).read_bytes()],
                "seed": place + 1,
            }
            for place, request in enumerate(self.requests)
        ]
        sampling = {"max_tokens": self.length, "temperature": 1.0, "ignore_eos": True, "logprobs": True}
        sampling["logit_bias"] = dict.fromkeys(template_of().banned_ids, -100.0)
        status, body = self.server.post_packed("/native/infer/", {"requests": batch, "sampling": sampling})
        assert status == 200, body
        return [self.rollout(answer) for answer in body["responses"]]

    def rollout(self, answer):
        return Rollout(
            request_id=answer["request_id"],
            prompt_token_ids=tuple(unpack_ids(answer["prompt_token_ids"]).tolist()),
            response_token_ids=tuple(unpack_ids(answer["response_token_ids"]).tolist()),
            stop_id=None,
            policy_version=answer["policy_version"],
            response_logprobs=tuple(np.frombuffer(answer["logprobs"], "<f4").tolist()),
            version_runs=tuple(map(tuple, answer["policy_versions"])),
        )

    def held(self):
        """A call in a thread; inside, all responses have begun, and the engines stand still."""
        num = len(self.requests)
        return held(self.instance, self.write, num_tokens=40 * num, num_running=num)

    def errors(self, rollouts, weights):
        """[responses, tokens] distance of each log-probability from transformers' by the weights of a policy.

        transformers reads the whole response at once: keys and values of all tokens are of these weights, too.
        """
        model = load_model()
        model.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()}, strict=False)
        found = found_in(model, self.requests, rollouts, temperature=1.0)
        return np.abs(np.array(found) - np.array([rollout.response_logprobs for rollout in rollouts]))

    def check(self, rollouts, weights_of, *, tolerance=TOLERANCE):
        """Every token was sampled from the weights of the version that is named for it.

        Some token beside a change is not of the version on its other side: a count that is off by one would show.

        ``tolerance``: of log-probabilities, in nats.
        """
        own, other = [], []
        errors = {version: self.errors(rollouts, weights) for version, weights in weights_of.items()}
        for place, rollout in enumerate(rollouts):
            versions, lengths = zip(*rollout.policy_versions, strict=True)
            assert sum(lengths) == len(rollout.response_token_ids) == self.length
            assert list(versions) == sorted(set(versions))
            assert rollout.policy_version == versions[0]
            ends = list(accumulate(lengths))
            own += [errors[v][place, end - n : end].max() for v, end, n in zip(versions, ends, lengths, strict=True)]
            for before, after, end in zip(versions, versions[1:], ends, strict=False):
                other += [errors[after][place, end - 1], errors[before][place, end]]
        assert max(own) < tolerance
        assert not other or max(other) > tolerance
