"""Random attacks on one real server, with a key or without one, beside callers whose responses are compared.

Bodies are drawn from the server's own OpenAPI description: with many entries, or deep. Health, memory of the server's
process, turns of its event loop, the form of every error and the version of every response are judged.
"""

import http
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import requests
import torch

from conformance.doubles import hostile
from conformance.doubles.digits import MODEL, load_model, perturb
from conformance.doubles.http_server import http_server
from conformance.doubles.instance import ENGINE, free_port, running, settings_for
from conformance.doubles.request_bodies import picture
from conformance.doubles.server_fixtures import HELD_S, MOST_OF_TURNS, turns_of
from conformance.judge.calls import RawLearner, text_batch
from conformance.judge.servers.bounded import in_thread
from conformance.tools.campaign.streams import stream_over_updates
from rollmatch.model.checkpoint import merged_weights

HEALTH_S = 1.0
"""In which 99 % of the answers about health have to come."""
BOUND_S, MAX_GROWTH_MIB = 90.0, 300
LONGEST_TURN_S, MEMORY_EVERY_S = 1.0, 0.05
NUM_DOWNLOADS = 9
"""More than are fetched at a time."""
DRAIN_S = 0.5
"""Less than streams take, so that commits come while they are written."""
UPDATE_S = 10.0
"""What an update may take on a busy machine, beside ``drain_s``."""
PROMPTS = text_batch([[7, 8, 9], [5, 6], [9, 9, 9]])
MIB = 1 << 20
CLOSED = 0
"""In place of a status: the server has closed the connection."""
WIDE = {"n": 1024, "max_tokens": 10, "ignore_eos": True}
STRUCTURES = (
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"grammar": "root ::= root"},
    {"regex": "(a|b|ab)*" * 400},
    {"choice": ["x" * 4096] * 1024},
    {"regex": "(((a{1,999}){1,999}){1,999}){1,999}"},
)
TEMPLATE_VALUES = ("{{ 10 ** 10 ** 8 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}")


class AttackedServer:
    """A server, what it answers, and what is wrong with that."""

    def __init__(self, instance, chance):
        self.instance, self.server, self.url, self.chance = instance, instance.server, instance.url, chance
        self.process = psutil.Process(instance.process.pid)
        self.statuses, self.wrong, self.most_mib = Counter(), [], 0.0
        self.kept_mib = 0.0
        """Memory above that of the start, after the last attack."""
        self.update_s, self.ends = [], Counter()
        """Seconds of updates beside streams, and how these ended."""
        self.known = {}
        """(version, place of a prompt) -> its response."""
        self.learner = RawLearner(self.server, port=free_port(), num_workers=1)
        assert self.learner.open()[0] == 200
        self.policies = [weights_of(seed) for seed in (1, 2)]
        self.schemas = requests.get(f"{self.url}/openapi.json", headers=self.server.headers, timeout=60).json()
        self.start_mib = self.process.memory_info().rss / MIB
        threading.Thread(target=self._watch_memory, daemon=True).start()

    def _watch_memory(self):
        """All the time, as most attacks' memory is free again when they have their answer."""
        with suppress(psutil.NoSuchProcess):
            while True:
                self.most_mib = max(self.most_mib, self.process.memory_info().rss / MIB)
                time.sleep(MEMORY_EVERY_S)

    def post(self, route, body, **keywords):
        """An answer; what must not be one is noted."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = self.server.headers | {"content-type": "application/json"} | keywords.pop("headers", {})
        began = time.monotonic()
        try:
            reply = requests.post(self.url + route, data=raw, headers=headers, timeout=BOUND_S, **keywords)
            status, text = reply.status_code, reply.text
            if "msgpack" in reply.headers["content-type"]:
                text = json.dumps(msgspec.msgpack.decode(reply.content), default=repr)
        except requests.Timeout:
            status, text = CLOSED, ""
            self.wrong.append(f"hang: {route} {raw[:200]!r} was not answered within {BOUND_S:g} s")
        except requests.RequestException:
            status, text = CLOSED, ""
        self.note(status, text, f"{route} {raw[:200]!r} after {time.monotonic() - began:.1f} s")
        return status

    def note(self, status, text, what):
        self.statuses[status] += 1
        if status >= 500 and status != 503:
            self.wrong.append(f"status {status}: {what}: {text[:200]}")
        if status >= 400 and not {"code", "problem", "remedy"} <= set(_json(text)):
            self.wrong.append(f"UNNAMED error {status}: {what}: {text[:200]}")

    def check_responses(self):
        """Greedy responses are those that the version's weights gave before."""
        ids, versions = self.server.infer(PROMPTS, max_tokens=8, logprobs=False)
        for place, (response, version) in enumerate(zip(ids, versions, strict=True)):
            before = self.known.setdefault((version, place), response)
            if response != before:
                self.wrong.append(f"mislabelled: {response} under version {version}, before {before}")

    def sync(self, weights):
        """Status of an update; what is committed serves the responses of its weights."""
        version = self.server.version + 1
        status, body = self.learner.sync(weights, version=version, sync_id=str(version))
        self.note(status, json.dumps(body), "sync")
        return status

    def leave(self):
        """A group that is still open when Python ends ends it by a signal."""
        self.learner.group.close()


def weights_of(seed):
    """Of a policy that differs from the model directory's."""
    model = load_model()
    perturb(model, seed=seed, scale=0.05)
    return {name: tensor.clone() for name, tensor in merged_weights(model)}


def _json(text):
    with suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def drawn(schema, schemas, chance, depth=0):
    """A value of a JSON schema."""
    if "$ref" in schema:
        schema = schemas["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return drawn(chance.choice(options), schemas, chance, depth)
    if "const" in schema or "enum" in schema:
        return chance.choice(schema.get("enum") or [schema.get("const")])
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        wanted = schema.get("required", [])
        named = schema.get("properties", {})
        kept = [name for name in named if name in wanted or (depth < 2 and chance.random() < 0.6)]
        return {name: drawn(named[name], schemas, chance, depth + 1) for name in kept}
    if kind == "array":
        items = schema.get("items", {}) or (schema.get("prefixItems") or [{}])[0]
        return [drawn(items, schemas, chance, depth + 1) for _ in range(chance.randint(1, 2))]
    values = {"integer": (0, 1, 7, -1, 2**63), "number": (0.5, 1.0, 1e308), "boolean": (True, False), "null": (None,)}
    return chance.choice(values.get(kind, ("", "a", "user", "x" * 100, "data:image/png;base64,")))


def places_of(value, path=()):
    """Every list of a body."""
    if isinstance(value, list):
        yield path
    for name, below in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places_of(below, (*path, name))


def swollen(body, chance):
    """The body as JSON, with one list that has very many entries or is very deep."""
    marker = "\u2603"
    path = chance.choice([*places_of(body)] or [("requests",)])
    node = body
    for name in path[:-1]:
        node = node[name]
    first = next(iter(node.get(path[-1], ()) if isinstance(node, dict) else node[path[-1]]), {})
    entry = chance.choice(("{}", "{}", "[]", json.dumps(first)))
    node[path[-1]] = marker
    filling = f"[{','.join([entry] * (chance.choice((3, 16)) * MIB // (len(entry) + 1)))}]"
    if chance.random() < 0.2:
        depth = chance.choice((70, 1000, 10**6))
        filling = "[" * depth + "]" * depth
    return json.dumps(body).replace(json.dumps(marker), filling, 1).encode()


def counts_and_depths(attacked):
    """A route's body from its schema, with counts and depths."""
    paths = attacked.schemas["paths"]
    posts = [route for route in paths if "requestBody" in paths[route].get("post", {})]
    route = attacked.chance.choice([each for each in posts if "communicator" not in each])
    content = paths[route]["post"]["requestBody"]["content"]["application/json"]
    for _ in range(3):
        attacked.post(route, swollen(drawn(content["schema"], attacked.schemas, attacked.chance), attacked.chance))


def types(attacked):
    """The same with wrong values only."""
    paths = attacked.schemas["paths"]
    posts = [route for route in paths if "requestBody" in paths[route].get("post", {})]
    route = attacked.chance.choice([each for each in posts if "communicator" not in each and "init" not in each])
    content = paths[route]["post"]["requestBody"]["content"]["application/json"]
    for _ in range(20):
        attacked.post(route, drawn(content["schema"], attacked.schemas, attacked.chance))


def frames(attacked):
    """Bytes without end where a call is framed: heads, sizes of chunks, trailers."""
    head = b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for name, value in attacked.server.headers.items():
        head += f"{name}: {value}\r\n".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    beginning, more = attacked.chance.choice(
        (
            (chunked + b"2\r\n{}\r\n0\r\n", b"X: " + b"y" * 1000 + b"\r\n"),
            (chunked, b"1;" + b"x" * 1000 + b"\r\n{\r\n"),
            (head, b"X: " + b"y" * 1000 + b"\r\n"),
        )
    )
    sent, deadline = 0, time.monotonic() + 10
    with socket.create_connection(("127.0.0.1", attacked.instance.settings.port), timeout=10) as one, suppress(OSError):
        one.sendall(beginning)
        while time.monotonic() < deadline and sent < 512 * MIB:
            one.sendall(more * 64)
            sent += len(more) * 64
    if sent > 64 * MIB:
        attacked.wrong.append(f"frames: {sent / MIB:.0f} MiB that are no body were read")


def hosts(attacked):
    """A guarded route under names that make another path of it."""
    name = attacked.chance.choice(("x/health/#", "localhost/health/?", "[::1", "evil.example", "x@localhost"))
    request = f"GET /native/identity/ HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", attacked.instance.settings.port), timeout=10) as one:
        one.sendall(request)
        status = int((one.makefile("rb").readline().split() or [b"", b"0"])[1])
    attacked.statuses[status] += 1
    if status == 200:
        attacked.wrong.append(f"the name {name!r} opened a guarded route")


def wide(attacked):
    """One call with as many log-probabilities as may be, streamed or whole, read or left."""
    is_streamed, chance = attacked.chance.random() < 0.5, attacked.chance
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    body = WIDE | (chat if chance.random() < 0.5 else {"prompt": [7, 8], "logprobs": 20}) | {"stream": is_streamed}
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with (
        suppress(requests.RequestException),
        requests.post(
            attacked.url + route, json=body, headers=attacked.server.headers, stream=True, timeout=BOUND_S
        ) as reply,
    ):
        attacked.statuses[reply.status_code] += 1
        if chance.random() < 0.7:
            for _ in reply.iter_content(MIB):
                pass


def structures(attacked):
    """Structures that are made to cost much."""
    body = {"prompt": [7, 8], "max_tokens": 4, "structured_outputs": attacked.chance.choice(STRUCTURES)}
    attacked.post("/v1/completions", body)


def template_values(attacked):
    """Template code in values for a template, and in messages."""
    text = attacked.chance.choice(TEMPLATE_VALUES)
    fields = {"chat_template_kwargs": {"a": text, "messages": text, "add_generation_prompt": text}}
    messages = [{"role": "user", "content": text}]
    route = attacked.chance.choice(("/v1/chat/completions", "/chat/"))
    body = {"messages": [messages] if route == "/chat/" else messages, "max_tokens": 2} | fields
    attacked.post(route, body)


def not_finite(attacked):
    """Good weights, weights with NaN, good weights."""
    first, last = attacked.policies if attacked.chance.random() < 0.5 else attacked.policies[::-1]
    if attacked.sync(first) != 200:
        attacked.wrong.append("good weights were refused")
    attacked.check_responses()
    bad = {name: tensor.clone() for name, tensor in last.items()}
    attacked.chance.choice([*bad.values()]).view(-1)[0] = attacked.chance.choice((torch.nan, torch.inf, -torch.inf))
    if attacked.sync(bad) == 200:
        attacked.wrong.append("weights that are not finite were committed")
    attacked.check_responses()
    if attacked.sync(last) != 200:
        attacked.wrong.append("good weights were refused after bad ones")
    attacked.check_responses()


def streams(attacked):
    """Streams over updates that come one after another."""
    read, seconds, wrong = stream_over_updates(
        attacked.server, attacked.sync, attacked.policies, num_updates=4, chance=attacked.chance
    )
    attacked.wrong += wrong
    attacked.update_s += seconds
    attacked.ends.update(f"{stream.reader} {stream.end}" for stream in read)
    if max(seconds, default=0.0) > attacked.instance.settings.drain_s + UPDATE_S:
        attacked.wrong.append(f"starved: beside streams, updates took {[round(each, 1) for each in seconds]} s")


def images(attacked):
    """Small files of many pixels, several at a time: most are served, and none is kept."""
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(2000, 2000)}"}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    for _ in range(12):
        if attacked.post("/v1/chat/completions/", body) != http.HTTPStatus.OK:
            attacked.wrong.append("an image was refused though no other call had any")


def slow(attacked):
    """Bodies that come byte by byte, on many connections."""
    call = b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{"
    opened = []
    with suppress(OSError):
        for _ in range(200):
            opened.append(socket.create_connection(("127.0.0.1", attacked.instance.settings.port), timeout=10))
            opened[-1].sendall(call)
    attacked.check_responses()
    for each in opened:
        each.close()


def downloads(attacked):
    """Images of an allowed host that sends them byte by byte; prompts are served meanwhile."""

    def trickle(handler):
        with suppress(OSError):
            hostile.slow_head(handler, "")

    with http_server(trickle) as host:
        content = [{"type": "image_url", "image_url": {"url": f"{host.url}/a.png"}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        waiting = [in_thread(attacked.post, "/v1/chat/completions/", body) for _ in range(NUM_DOWNLOADS)]
        attacked.check_responses()
        if all(call.done() for call in waiting):
            attacked.wrong.append("downloads: prompts waited for them")
        if {call.result() for call in waiting} & {http.HTTPStatus.OK, CLOSED}:
            attacked.wrong.append("downloads: one that does not end was not refused")


def model_directories(attacked):
    """A server of a directory that names code, holds pickles, links out of it, or is cut."""
    with tempfile.TemporaryDirectory() as name:
        model, mark = shutil.copytree(MODEL, Path(name) / "model"), Path(name) / "mark"
        (weights,) = model.glob("*.safetensors")
        way = attacked.chance.choice(("code", "pickle", "link", "cut"))
        if way == "code":
            config = json.loads((model / "config.json").read_text())
            config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
            (model / "config.json").write_text(json.dumps(config))
            (model / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
        elif way == "cut":
            weights.write_bytes(weights.read_bytes()[: attacked.chance.randrange(1000)])
        else:
            weights.unlink()
        if way == "pickle":
            (model / "pytorch_model.bin").write_bytes(f"cbuiltins\nopen\n(V{mark}\nVw\ntR.".encode())
        elif way == "link":
            weights.symlink_to("/etc/passwd")
        command = [sys.executable, "-m", "rollmatch.serve.process", settings_for(model=str(model)).to_json()]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
        output = ended.stderr
        if mark.exists():
            attacked.wrong.append(f"a model directory ran code: {way}")
        if ended.returncode != 1 or "Traceback" in output or not re.search(r"^\[[a-z-]+\]", output, re.MULTILINE):
            attacked.wrong.append(
                f"UNNAMED end {ended.returncode} of a server of such a directory: {way}: {output[-500:]}"
            )


def report(attacked, looks, show):
    """Figures of a server that was attacked; returns what is wrong, in words."""
    if looks.p99() > HEALTH_S or looks.num_failed:
        attacked.wrong.append(f"health: {looks.shown()}")
    show(f"  statuses: {dict(attacked.statuses)}; health: {looks.shown()}")
    memory = f"{attacked.start_mib:.0f} MiB at the start, {attacked.most_mib:.0f} at most, {attacked.kept_mib:.0f} kept"
    show(f"  memory: {memory}")
    if attacked.update_s:
        show(f"  streams: {dict(attacked.ends)}; updates beside them took at most {max(attacked.update_s):.1f} s")
    for problem in attacked.wrong:
        show(f"  {problem}")
    show(f"  {len(attacked.wrong)} findings")
    return attacked.wrong


ATTACKS = (
    counts_and_depths, counts_and_depths, types, frames, hosts, wide, structures, template_values, not_finite, streams,
    images, slow, downloads, model_directories,
)  # fmt: skip
UPDATING = {not_finite, streams}
"""Of which one at a time is a learner's."""


KEYS = (None, "the key")


def one_learner(kinds):
    """The same without all but the first one of ``UPDATING``."""
    first = next((place for place, each in enumerate(kinds) if each in UPDATING), None)
    return [each for place, each in enumerate(kinds) if each not in UPDATING or place == first]


def attack(seed, *, num, minutes, looks, chance, key, kinds="", together=False, sought=None, fork=True, show=print):
    """``num`` attacks, two or all kinds at a time; returns their number and what is wrong, in words.

    ``sought``: kind -> words of what is known to be wrong; these kinds alone, each until its words are found. ``fork``:
    whether the server is a fork, with the modules that are loaded here.
    """
    began, struck, wanted = time.monotonic(), Counter(), sought or kinds.split(",")
    chosen = [each for each in ATTACKS if not (sought or kinds) or each.__name__ in wanted]
    fields = {"api_key": key, "engine_arguments": ENGINE, "data_parallel_size": 1, "drain_s": DRAIN_S}
    fields["allowed_media_domains"] = ("127.0.0.1",)
    with running(Path(f"/tmp/attacked-{seed}.txt"), fork=fork, **fields) as one:
        attacked = AttackedServer(one, chance)
        attacked.check_responses()
        looks.watch(one.settings.port)
        while chosen and sum(struck.values()) < num and time.monotonic() < began + 60 * minutes:
            mine = one_learner(chance.sample(chosen, len(chosen)) if together else chance.choices(chosen, k=2))
            struck.update(each.__name__ for each in mine)
            for call, each in [(in_thread(each, attacked), each) for each in mine]:
                try:
                    call.result(timeout=4 * BOUND_S)
                except Exception as error:  # noqa: BLE001  # whatever an attack ends with is a finding
                    attacked.wrong.append(f"{each.__name__} ended with {type(error).__name__}: {error}")
            if one.process.poll() is not None:
                attacked.wrong.append(f"the server ended with {one.process.poll()}: {one.output()[-500:]}")
                break
            if sought:
                found = "\n".join((*attacked.wrong, *judged(attacked)))
                chosen = [each for each in chosen if sought[each.__name__] not in found]
        looks.watch(None)
        attacked.wrong += judged(attacked)
        attacked.leave()
    show(f"attacks, seed {seed}, {'with' if key else 'without'} a key: {sum(struck.values())}, {dict(struck)}")
    return sum(struck.values()), report(attacked, looks, show)


def judged(attacked):
    """What is wrong with memory and turns after all attacks so far, in words."""
    wrong = []
    if attacked.most_mib > attacked.start_mib + MAX_GROWTH_MIB:
        wrong.append(f"memory: {attacked.most_mib - attacked.start_mib:.0f} MiB more than at the start")
    if attacked.instance.process.poll() is not None:
        return wrong
    attacked.kept_mib = attacked.process.memory_info().rss / MIB - attacked.start_mib
    if attacked.kept_mib > MAX_GROWTH_MIB:
        wrong.append(f"memory: {attacked.kept_mib:.0f} MiB were kept")
    turns = turns_of(attacked.server)
    if turns[HELD_S] < MOST_OF_TURNS * turns[math.inf] or turns[LONGEST_TURN_S] < turns[math.inf]:
        wrong.append(f"turns of the event loop by processor time: {turns}")
    return wrong
