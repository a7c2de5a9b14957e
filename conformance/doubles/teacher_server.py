"""A ``vllm serve`` that judges tokens, without an engine: real HTTP, and a model of this process behind it."""

import base64
import io
from contextlib import contextmanager

import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from conformance.doubles.http_server import http_server, read_body, send
from rollmatch.model.images import ImageProcessing, expand_placeholders, image_arguments, read_config

MAX_LOGPROBS, MAX_MODEL_LEN = 20, 128
ROUTE_OF_IMAGES = "/inference/v1/generate"


class TeacherDouble:
    """``faults``: statuses of the next completions; ``mend``: what is made of a right body before it is sent;
    ``sees``: whether it has vLLM's route that takes images.
    """

    def __init__(self, directory, *, tokenizer=None, mend=lambda body: body, sees=True):
        self.model, self.images = _load(directory)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or directory)
        self.mend, self.max_logprobs, self.sees, self.faults, self.judged = mend, MAX_LOGPROBS, sees, [], []

    def answer(self, handler):
        path, body = handler.path, read_body(handler)
        if path == "/v1/models":
            length = MAX_MODEL_LEN if self.images is None else 4 * MAX_MODEL_LEN
            send(handler, 200, {"data": [{"id": "teacher", "max_model_len": length}]})
        elif path == "/detokenize":
            send(handler, 200, {"prompt": self.tokenizer.decode(body["tokens"])})
        elif self.faults:
            send(handler, self.faults.pop(0), {"error": {"message": "not now"}})
        elif path == ROUTE_OF_IMAGES:
            self.judge_images(handler, body)
        else:
            self.judge(handler, body["prompt"], body["prompt_logprobs"], lambda rows: {"choices": [rows]})

    def judge_images(self, handler, body):
        if not self.sees:
            send(handler, 404, {"detail": "Not Found"})
            return
        urls = [part["url"] for part in body["content_parts"]]
        pictures = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in urls]
        features = self.images.process(pictures)
        ids = expand_placeholders(body["token_ids"], features.expansions, placeholder_id=self.images.placeholder_id)
        self.judge(handler, list(ids), body["sampling_params"]["prompt_logprobs"], lambda rows: rows, features)

    def judge(self, handler, prompt, num_top, framed, features=None):
        if num_top > self.max_logprobs:
            problem = f"Requested prompt logprobs of {num_top}, which is greater than max allowed"
            send(handler, 400, {"error": {"message": problem}})
            return
        self.judged.append(prompt)
        rows = self.logprobs_of(prompt, num_top, features)
        send(handler, 200, self.mend(framed({"prompt_logprobs": rows})))

    @torch.no_grad()
    def logprobs_of(self, prompt, num_top, features=None):
        """As vLLM: nothing for the first token; then the likeliest, and the prompt's own."""
        ids = torch.tensor([prompt])
        given = {} if features is None else image_arguments(ids, [features], self.model)
        logprobs, rows = self.distribution(self.model(ids, **given).logits[0]), [None]
        for token_id, row in zip(prompt[1:], logprobs[:-1], strict=True):
            ids = dict.fromkeys([token_id, *row.topk(num_top).indices.tolist()])
            rows.append({str(one): {"logprob": row[one].item(), "rank": int((row >= row[one]).sum())} for one in ids})
        return rows

    def distribution(self, logits):
        return logits.log_softmax(-1)


def _load(directory):
    """A model, and what prepares its images; None for a model of texts."""
    has_images = "vision_config" in read_config(directory)
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    return model, ImageProcessing(AutoProcessor.from_pretrained(directory), directory) if has_images else None


@contextmanager
def serving(teacher):
    with http_server(teacher.answer) as server:
        yield server.url
