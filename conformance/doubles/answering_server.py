"""A rollout server whose engine is transformers: it answers with the weights that a sync has brought."""

import io
import threading
from types import SimpleNamespace

import torch
from PIL import Image

from conformance.doubles.engine import RememberingEngine
from conformance.doubles.native_double import NativeDouble
from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.model.checkpoint import merged_weights

SAMPLING = threading.Lock()
"""torch's generator, which answers that are sampled take from, is one for all threads."""


class AnsweringServer(NativeDouble):
    """Of the native dialect; ``answered`` is what it said, a request's id -> (prompt ids, response ids)."""

    def __init__(self, model, template):
        super().__init__({name: tensor.clone() for name, tensor in merged_weights(model)})
        self.engine = RememberingEngine(model, template)
        self.answered = {}

    def commit(self, body):
        returned = super().commit(body)
        self.engine.load_weights(self.served.items())
        self.engine.reset_prefix_cache()
        self.engine.reset_encoder_cache()
        return returned

    def infer(self, body):
        returned = super().infer(body)
        for request, response in zip(body["requests"], returned["responses"], strict=True):
            images = [body["images"][place] for place in request["images"]]
            prompt, written = self._write(request, images, body["sampling"])
            self.answered[request["request_id"]] = (prompt, written)
            response |= {"prompt_token_ids": pack_ids(prompt), "response_token_ids": pack_ids(written)}
            response["finish_reason"] = "stop" if written[-1] in body["sampling"]["stop_token_ids"] else "length"
        return returned

    def _write(self, request, images, sampling):
        images = [Image.open(io.BytesIO(raw)).convert("RGB") for raw in images]
        ids = [int(token_id) for token_id in unpack_ids(request["prompt_token_ids"])]
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
        returned = SimpleNamespace(
            max_tokens=sampling["max_tokens"],
            temperature=sampling["temperature"],
            logit_bias={int(token_id): bias for token_id, bias in sampling["logit_bias"].items()},
            stop_token_ids=sampling["stop_token_ids"],
        )
        with SAMPLING:
            torch.manual_seed(request["seed"])
            (answer,) = self.engine.generate([prompt], [returned], use_tqdm=False)
        return answer.prompt_token_ids, answer.outputs[0].token_ids
