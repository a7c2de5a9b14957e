"""Rollout servers of drawn runs: they write by a script, record every call, and hold the weights of every sync."""

import base64
import io
import struct
import time
from contextlib import contextmanager
from functools import partial

import torch
from PIL import Image
from safetensors.torch import load_file

from conformance.doubles.http_server import read_body, send
from conformance.doubles.native_double import ROUTES, NativeDouble, serving
from conformance.doubles.stock_server import StockDouble
from conformance.doubles.teacher_server import TeacherDouble
from conformance.doubles.teacher_server import serving as serving_teacher
from conformance.judge.ports import free_port
from conformance.judge.servers.broken.updates import QueuedGroup
from conformance.oracle.policy import PICTURE
from conformance.oracle.script import write


@contextmanager
def teaching(draw, directory):
    """URL of a server that teaches by the model before training; empty where none is drawn."""
    entries = draw["keys"].get("custom.extra.distill.teachers", [])
    if not any("base_url" in one for one in entries):
        yield ""
        return
    with serving_teacher(TeacherDouble(directory)) as url:
        yield url


class ScriptedServer(NativeDouble):
    """Of the native dialect. ``fails``: (route, number of the call, what happens: drop or away)."""

    slow_s = 0.0
    """How long a response takes, so that a sync may come within."""

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
        time.sleep(self.slow_s)
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
            if len(ids) > 1 and self.policy_version > response["policy_version"]:  # a sync came, and ids stay the same
                response["policy_versions"] = [[response["policy_version"], 1], [self.policy_version, len(ids) - 1]]
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
        prompt = self.words.chat(chat, body.get("chat_template_kwargs", {}).get("mark", ""))
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


class ScriptedChunked:
    """Of the dialects of swift and trl: a thread receives what was announced, each sync makes a version.

    Neither takes a seed per request: responses of a call have the call's seed and those behind it.
    """

    def __init__(self, directory, words, variant, fails=()):
        self.words, self.variant, self.log, self.kept = words, variant, [], {}
        self.version, self.served, self.staged = 0, {}, {}
        self.group = QueuedGroup(self)

    def answer(self, handler):
        name, body = handler.path.strip("/"), read_body(handler)
        paths = {"paths": {f"/{route}/": {} for route in self.routes}}
        made = paths if name == "openapi.json" else getattr(self, name, lambda _: {"status": "ok"})(body)
        send(handler, 200, made or {})

    def get_world_size(self, _):
        return {"world_size": 1}

    def init_communicator(self, body):
        self.group.init(body["host"], body["port"], body["world_size"])

    def close_communicator(self, _):
        self.group.close()

    def update_named_param(self, body):
        self.group.announce([body["name"]], self.empty([body]), None)

    def update_flattened_params(self, body):
        tensors = self.empty(body["metadatas"])
        flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        self.group.announce([one["name"] for one in body["metadatas"]], tensors, flat)

    def reset_prefix_cache(self, _):
        """The end of a sync."""
        return {"success": self.group.finish()}

    @staticmethod
    def empty(described):
        return [torch.empty(one["shape"], dtype=getattr(torch, one["dtype"][6:])) for one in described]

    def broken(self, _):
        return False

    def stage(self, tensors):
        self.staged |= tensors

    def drop(self):
        self.staged = {}

    def finish(self):
        """Serve what was staged, as another version."""
        if self.staged:
            self.served, self.staged, self.version = self.served | self.staged, {}, self.version + 1
            self.log.append(("commit", self.version, None))
            self.kept[self.version] = self.served
        return True

    def respond(self, prompt, seed, values, stop_ids, *, logprobs):
        """What is written, and its log-probabilities; the request goes into the log."""
        ids, found = write(self.words, prompt, seed, values["max_tokens"], self.variant)
        names = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty")
        sampling = {name: values[name] for name in names} | {"stop_token_ids": stop_ids}
        sampling |= {"logprobs": True} if logprobs else {}
        if values["top_k"] == 1:  # the only token left is certain
            return ids, [0.0] * len(ids)
        self.log.append(("infer", self.version, (tuple(prompt), seed, sampling, "")))
        return ids, found


class ScriptedTrl(ScriptedChunked):
    """``trl vllm-serve``: ids, and so many completions of each prompt."""

    routes = ("health", "get_world_size", "generate", "init_communicator", "update_named_param")
    routes += ("close_communicator", "reset_prefix_cache")

    def generate(self, body):
        own, n, wanted = body["generation_kwargs"], body["n"], body["logprobs"] is not None
        respond = partial(self.respond, values=body, stop_ids=own["stop_token_ids"], logprobs=wanted)
        prompts = [prompt for prompt in body["prompts"] for _ in range(n)]
        made = [respond(prompt, own["seed"] + place) for place, prompt in enumerate(prompts)]
        pictures = [[Image.open(io.BytesIO(base64.b64decode(raw))).size for raw in own or ()] for own in body["images"]]
        seen = [self.words.expanded(*pair) for pair in zip(body["prompts"], pictures, strict=True)]
        logprobs = [[[value] for value in values] for _, values in made] if wanted else None
        return {"prompt_ids": seen, "completion_ids": [ids for ids, _ in made], "logprobs": logprobs}


class ScriptedSwift(ScriptedChunked):
    """``swift rollout``: chats, to which it applies the template itself, and stop tokens as texts."""

    routes = ("health", "get_world_size", "infer", "init_communicator", "update_flattened_params")
    routes += ("close_communicator", "process_weights_after_loading", "reset_prefix_cache")

    def infer(self, body):
        config = body["request_config"]
        stop_ids = [self.words.added[text] for text in config["stop"]]
        respond = partial(self.respond, values=config, stop_ids=stop_ids, logprobs=config.get("logprobs", False))
        made = []
        for place, request in enumerate(body["infer_requests"]):
            chat = [(m["role"], m["content"].replace("<image>", PICTURE)) for m in request["messages"]]
            pictures = [raw.partition(",")[2] for raw in request["images"]]
            sizes, prompt = (
                [Image.open(io.BytesIO(base64.b64decode(raw))).size for raw in pictures],
                self.words.chat(chat, ""),
            )
            ids, logprobs = respond(prompt, config["seed"] + place)
            choice = {"token_ids": ids, "finish_reason": "stop" if ids[-1] == self.words.stop else "length"}
            choice |= {"logprobs": {"content": [{"logprob": p} for p in logprobs]}} if config.get("logprobs") else {}
            made.append({"prompt_token_ids": self.words.expanded(prompt, sizes), "choices": [choice]})
        return made


SERVERS = {"native": ScriptedServer, "vllm": ScriptedStock, "trl": ScriptedTrl, "swift": ScriptedSwift}


def _packed(numbers, kind):
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


@contextmanager
def scripted(draw, directory, words):
    """The servers of a draw, and the keys that name them; none where it has none."""
    variant = draw["keys"]["custom.trainer_variant"]
    servers = [
        SERVERS[draw.get("dialect", "native")](directory, words, variant, one.get("fails", ()))
        for one in draw.get("servers", [])
    ]
    for server in servers:
        server.slow_s = draw.get("slow_s", 0.0)
    with serving(*servers) as urls:
        section = "custom.extra.rollout_matching.vllm"
        named = [{"base_url": url, "group_port": free_port()} for url in urls]
        yield servers, {f"{section}.mode": "server", f"{section}.server.servers": named} if servers else {}
