"""A ``vllm serve`` that judges tokens, without an engine: real HTTP, and the arithmetic model behind it."""

from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conformance.doubles.http_server import http_server, read_body, send

MAX_LOGPROBS, MAX_MODEL_LEN = 20, 128


class TeacherDouble:
    """``faults``: statuses of the next completions; ``mend``: what is made of a right body before it is sent."""

    def __init__(self, directory, *, tokenizer=None, mend=lambda body: body, max_logprobs=MAX_LOGPROBS):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or directory)
        self.mend, self.max_logprobs, self.faults, self.judged = mend, max_logprobs, [], []

    def answer(self, handler):
        path, body = handler.path, read_body(handler)
        if path == "/v1/models":
            send(handler, 200, {"data": [{"id": "teacher", "max_model_len": MAX_MODEL_LEN}]})
        elif path == "/detokenize":
            send(handler, 200, {"prompt": self.tokenizer.decode(body["tokens"])})
        elif self.faults:
            send(handler, self.faults.pop(0), {"error": {"message": "not now"}})
        elif body["prompt_logprobs"] > self.max_logprobs:
            problem = f"Requested prompt logprobs of {body['prompt_logprobs']}, which is greater than max allowed"
            send(handler, 400, {"error": {"message": problem}})
        else:
            self.judged.append(body["prompt"])
            send(handler, 200, self.mend({"choices": [{"prompt_logprobs": self.logprobs_of(**body)}]}))

    @torch.no_grad()
    def logprobs_of(self, *, prompt, prompt_logprobs, **_):
        """As vLLM: nothing for the first token; then the likeliest, and the prompt's own."""
        logprobs, rows = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1), [None]
        for token_id, row in zip(prompt[1:], logprobs[:-1], strict=True):
            ids = dict.fromkeys([token_id, *row.topk(prompt_logprobs).indices.tolist()])
            rows.append({str(one): {"logprob": row[one].item(), "rank": int((row >= row[one]).sum())} for one in ids})
        return rows


@contextmanager
def serving(teacher):
    with http_server(teacher.answer) as server:
        yield server.url
