"""Rollout servers of drawn runs: they write by a script, record every call, and hold the weights of every sync."""

import base64
import io
import struct
from contextlib import contextmanager

from PIL import Image
from safetensors.torch import load_file

from conformance.doubles.native_double import ROUTES, NativeDouble, serving
from conformance.doubles.stock_server import StockDouble
from conformance.judge.ports import free_port
from conformance.oracle.policy import PICTURE
from conformance.oracle.script import write


class ScriptedServer(NativeDouble):
    """Of the native dialect. ``fails``: (route, number of the call, what happens: drop or away)."""

    def __init__(self, directory, words, variant, fails=()):
        super().__init__(load_file(directory / "model.safetensors"))
        self.words, self.variant, self.fails = words, variant, list(fails)
        self.log, self.kept, self.counts, self.is_away = [], {}, {}, False

    def answer(self, handler):
        name = ROUTES.get(handler.path.rstrip("/"))
        self.counts[name] = self.counts.get(name, 0) + 1
        failing = [what for route, number, what in self.fails if (route, number) == (name, self.counts[name])]
        self.is_away |= "away" in failing
        if failing or self.is_away:
            handler.connection.close()
            return
        super().answer(handler)

    def commit(self, body):
        made = super().commit(body)
        self.log.append(("commit", self.policy_version, None))
        self.kept[self.policy_version] = {name: tensor.clone() for name, tensor in self.served.items()}
        return made

    def infer(self, body):
        made = super().infer(body)
        sizes = [Image.open(io.BytesIO(raw)).size for raw in body["images"]]
        for request, response in zip(body["requests"], made["responses"], strict=True):
            sampling = request.get("sampling", body["sampling"])
            prompt = struct.unpack(f"<{len(request['prompt_token_ids']) // 4}i", request["prompt_token_ids"])
            ids, logprobs = write(self.words, prompt, request["seed"], sampling["max_tokens"], self.variant)
            if sampling["top_k"] == 1:  # the only token left is certain
                logprobs = [0.0] * len(ids)
            else:
                self.log.append(
                    ("infer", self.policy_version, (prompt, request["seed"], sampling, request["request_id"]))
                )
            seen = self.words.expanded(prompt, [sizes[place] for place in request["images"]])
            response |= {"response_token_ids": _packed(ids, "i"), "prompt_token_ids": _packed(seen, "i")}
            response["finish_reason"] = "stop" if ids[-1] == self.words.stop else "length"
            if sampling.get("logprobs"):
                response["logprobs"] = _packed(logprobs, "f")
        return made


class ScriptedStock(StockDouble):
    """Of a stock ``vllm serve``, which takes ids, and chats with images, to which it applies the template itself."""

    def __init__(self, directory, words, variant, fails=()):
        super().__init__()
        self.words, self.variant, self.log, self.kept = words, variant, [], {}

    def finish_weight_update(self, body, query):
        made, number = super().finish_weight_update(body, query), int(body["weight_version"].rpartition("-")[2])
        self.log.append(("commit", number, None))
        self.kept[number] = {name: tensor.clone() for name, tensor in self.served.items()}
        return made

    def v1_chat_completions(self, body, _):
        sizes, chat = [], []
        for message in body["messages"]:
            parts = message["content"]
            parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
            pictures = [part["image_url"]["url"].partition(",")[2] for part in parts if part["type"] == "image_url"]
            sizes += [Image.open(io.BytesIO(base64.b64decode(raw))).size for raw in pictures]
            chat.append((message["role"], "".join(part.get("text", PICTURE) for part in parts)))
        prompt = self.words.chat(chat)
        choice, logprobs = self.choose(prompt, body)
        choice |= {"logprobs": {"content": [{"logprob": p} for p in logprobs]}} if body.get("logprobs") else {}
        return {"prompt_token_ids": self.words.expanded(prompt, sizes), "choices": [choice]}

    def v1_completions(self, body, _):
        choice, logprobs = self.choose(body["prompt"], body)
        choice |= {"prompt_token_ids": body["prompt"]}
        choice |= {"logprobs": {"token_logprobs": logprobs}} if "logprobs" in body else {}
        return {"choices": [choice]}

    def choose(self, prompt, body):
        """What is written, and its log-probabilities; the call goes into the log."""
        ids, logprobs = write(self.words, prompt, body["seed"], body["max_tokens"], self.variant)
        sampling = {name: body[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty")}
        sampling |= {"stop_token_ids": body["stop_token_ids"]} | ({"logprobs": True} if "logprobs" in body else {})
        sampling |= {"logit_bias": {int(token): bias for token, bias in body["logit_bias"].items()}}
        if body["top_k"] == 1:  # the only token left is certain
            logprobs = [0.0] * len(ids)
        else:
            self.log.append(
                ("infer", int(self.version.rpartition("-")[2]), (tuple(prompt), body["seed"], sampling, ""))
            )
        return {"token_ids": ids, "finish_reason": "stop" if ids[-1] == self.words.stop else "length"}, logprobs


def _packed(numbers, kind):
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


@contextmanager
def scripted(draw, directory, words):
    """The servers of a draw, and the keys that name them; none where it has none."""
    variant = draw["keys"]["custom.trainer_variant"]
    made = {"native": ScriptedServer, "vllm": ScriptedStock}[draw.get("dialect", "native")]
    servers = [made(directory, words, variant, one.get("fails", ())) for one in draw.get("servers", [])]
    with serving(*servers) as urls:
        section = "custom.extra.rollout_matching.vllm"
        named = [{"base_url": url, "group_port": free_port()} for url in urls]
        yield servers, {f"{section}.mode": "server", f"{section}.server.servers": named} if servers else {}
