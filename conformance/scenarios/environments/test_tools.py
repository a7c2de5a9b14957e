"""Tools that turns call: Python functions, and those of a real MCP server over loopback."""

import gzip
import json
import sys
from contextlib import suppress
from dataclasses import replace

import pytest

from conformance.doubles.configs import GRPO, config_with
from conformance.doubles.http_server import http_server, send
from conformance.doubles.ladders import TurnSide, climbing, grouped, searching, world
from conformance.doubles.locks import VOCABULARY, sample_of
from conformance.doubles.records import make_reply
from conformance.doubles.refusals import refused
from conformance.doubles.started import started
from conformance.doubles.tool_functions import call, multiply, right
from conformance.judge.ports import free_port
from conformance.tools.tokenizers import fetch_tokenizer
from rollmatch.environments.environment import begin, generator_of, take_step
from rollmatch.environments.limits import EnvironmentLimits, EpisodeFailed
from rollmatch.environments.loading import load_tool_environment
from rollmatch.environments.tools import load_tools
from rollmatch.model.template import Template
from rollmatch.objectives.grpo.reward import Reward
from rollmatch.objectives.vineppo.single_turn import RewardRules
from rollmatch.rollout.backend import Decoding
from rollmatch.run.plugins import with_first_observations

FUNCTIONS = "conformance.doubles.tool_functions"
LIMITS = EnvironmentLimits()


def begun(*names, limits=LIMITS):
    return begin(load_tool_environment(names, limits=limits), sample_of(), run_seed=1)[0]


def reply_to(action, *names, limits=LIMITS):
    return take_step(begun(*names, limits=limits), action, key="x:1", limits=limits).observation


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of an MCP server of the official package."""
    port, log = free_port(), tmp_path_factory.mktemp("mcp") / "log"
    with started([sys.executable, "-m", FUNCTIONS, str(port)], log) as running:
        running.wait_until(lambda: "running on" in running.output())
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.mark.scenario(
    "environments/a-turn-calls-a-function-and-a-tool-of-a-server",
    clauses=["environments/tools-are-functions-and-mcp-servers#1,2,3"],
)
def test_calls_of_a_turn_are_executed_in_order(server):
    made = begun(f"{FUNCTIONS}:multiply", server)
    before = made.clone(generator_of(1))
    turn = f"I compute. {call('multiply', a=6, b=7)} and {call('add', a=1, b=2)}"
    observation, *ends, seconds = take_step(made, turn, key="x:1")
    assert observation == "<tool_response>\n42\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert ends == [0.0, False, False]
    assert [name for name, _ in seconds] == ["multiply", "add"]
    assert made.fingerprint() != before.fingerprint()
    assert take_step(made, "It is 45.", key="x:1")[:4] == ("", 0.0, True, False)
    assert load_tools((server,))["add"].schema["function"]["parameters"]["required"] == ["a", "b"]


def test_places_where_a_tool_replied_otherwise_are_different(tmp_path):
    """Continuations of one state have heard the same."""
    made, path = begun(f"{FUNCTIONS}:read"), tmp_path / "a.txt"
    twin = made.clone(generator_of(1))
    for text, each in (("one", made), ("two", twin)):
        path.write_text(text)
        assert text in take_step(each, call("read", path=str(path)), key="x:1").observation
    assert made.fingerprint() != twin.fingerprint()


@pytest.mark.scenario(clauses=["environments/tools-are-functions-and-mcp-servers#4,5"])
def test_what_a_tool_raises_is_read_by_the_policy(server):
    names = [f"{FUNCTIONS}:{name}" for name in ("multiply", "shout", "divide")] + [server]
    for action, said in {
        call("divide", a=1, b=0): "ZeroDivisionError",
        call("multiply", a="six", b=7): "a: Input should be a valid integer",
        call("multiply", a=6): "b: Missing required argument",
        call("add", a="x", b=1): "valid integer",
        call("fail"): "fail",
        call("subtract"): "there is no tool subtract; there are multiply, shout, divide, add, fail",
        call(f"{FUNCTIONS}:read", path="/etc/hostname"): f"there is no tool {FUNCTIONS}:read; there are",
        call("multiply.__globals__"): "there is no tool multiply.__globals__; there are",
        call(server): f"there is no tool {server}; there are",
        call("multiply", a=6, b=7, sample=1): "sample: Unexpected keyword argument",
        "<tool_call>multiply 6 7": "a call is a JSON object with name and arguments, not multiply 6 7",
        '<tool_call>{"name": "multiply", "arguments": [6]}</tool_call>': "arguments are a JSON object",
        call("shout", text="ja, é"): '{"said": "JA, É"}',
    }.items():
        assert said in reply_to(action, *names)


@pytest.mark.scenario(clauses=["environments/tools-are-functions-and-mcp-servers#4"])
def test_what_the_machine_fails_with_costs_the_episode(tmp_path):
    with pytest.raises(EpisodeFailed, match=r"x:1.*FileNotFoundError"):
        reply_to(call("read", path=str(tmp_path / "none")), f"{FUNCTIONS}:read")
    (tmp_path / "some").write_text("here")
    assert "here" in reply_to(call("read", path=str(tmp_path / "some")), f"{FUNCTIONS}:read")


def test_a_tool_that_writes_too_much_in_the_learner_costs_its_episode(tmp_path):
    limits, path = EnvironmentLimits(max_observation_bytes=200), tmp_path / "a.txt"
    path.write_text("\u00e9" * 100)
    with pytest.raises(EpisodeFailed, match="more than 200 bytes"):
        reply_to(call("read", path=str(path)), f"{FUNCTIONS}:read", limits=limits)
    path.write_text("e" * 100)
    assert "eee" in reply_to(call("read", path=str(path)), f"{FUNCTIONS}:read", limits=limits)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("name", ["leave", "leave_early"])
def test_a_tool_that_exits_costs_its_episode_and_no_other(name, processes):
    """In the learner, the event loop of all tools ended with it, and the next call waited for ever."""
    limits = EnvironmentLimits(timeout_s=20.0, processes=processes)
    with pytest.raises(EpisodeFailed, match=r"x:1.*SystemExit: 3"):
        reply_to(call(name, code=3), f"{FUNCTIONS}:{name}", limits=limits)
    assert "42" in reply_to(call("multiply", a=6, b=7), f"{FUNCTIONS}:multiply", limits=limits)


def test_a_server_that_is_gone_costs_the_episode(tmp_path):
    port = free_port()
    with started([sys.executable, "-m", FUNCTIONS, str(port)], tmp_path / "log") as running:
        running.wait_until(lambda: "running on" in running.output())
        made = begun(url := f"http://127.0.0.1:{port}/mcp")
        assert "3" in take_step(made, call("add", a=1, b=2), key="x:1").observation
    with pytest.raises(EpisodeFailed, match=rf"x:1.*ConnectionError: {url}"):
        take_step(made, call("add", a=1, b=2), key="x:1")


def without_end(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * (1 << 20))


def packed(handler):
    handler.send_response(200)
    for name, value in {"Content-Type": "application/json", "Content-Encoding": "gzip"}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(gzip.compress(b"{}"))


@pytest.mark.parametrize(
    ("reply", "said"), [(without_end, "a reply of more than 16,777,216 bytes"), (packed, "a packed reply")]
)
def test_a_reply_of_a_tool_server_is_bounded_while_it_arrives(reply, said):
    """It would fill the learner's memory before its length is compared with ``max_observation_bytes``."""

    def answer(handler):
        call_of_ours = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length", 0))) or b"{}")
        known = {
            "initialize": {
                "protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                "serverInfo": {"name": "x", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "add", "description": "Add.", "inputSchema": {"type": "object"}}]},
        }  # fmt: skip
        method, number = call_of_ours.get("method"), {"jsonrpc": "2.0", "id": call_of_ours.get("id")}
        if method == "tools/call":
            with suppress(OSError):
                reply(handler)
        elif method in known:
            send(handler, 200, number | {"result": known[method]})
        else:
            send(handler, 200 if "id" in call_of_ours else 202, number | {"error": {"code": -32601, "message": ""}})

    with http_server(answer) as server:
        made = begun(f"{server.url}/mcp")
        with pytest.raises(EpisodeFailed, match=rf"x:1.*ConnectionError: {server.url}/mcp: ReadError: {said}"):
            take_step(made, call("add", a=1, b=2), key="x:1")


@pytest.mark.scenario(clauses=["environments/a-call-that-fails-costs-its-episode#2"])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_tool_that_takes_too_long_is_given_up(processes):
    limits = EnvironmentLimits(timeout_s=1.0, processes=processes)
    made = begun(f"{FUNCTIONS}:wait", limits=limits)
    with pytest.raises(EpisodeFailed, match="environment-timeout"):
        take_step(made.clone(generator_of(1)), call("wait", seconds=3), key="x:1")
    assert "waited" in take_step(made, call("wait", seconds=0), key="x:1").observation


@pytest.mark.scenario(clauses=["environments/tools-are-functions-and-mcp-servers#6,7,8"])
@pytest.mark.parametrize(
    ("names", "code", "place"),
    [
        (("math",), "tool-unknown", 0),
        ((f"{FUNCTIONS}:multiply", f"{FUNCTIONS}:no_such"), "tool-unknown", 1),
        ((f"{FUNCTIONS}:undescribed",), "tool-undescribed", 0),
        ((f"{FUNCTIONS}:multiply",) * 2, "tool-named-twice", 1),
        (("http://127.0.0.1:9/mcp",), "tool-server-unreachable", 0),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused(names, code, place):
    with refused(code, f"custom.extra.environment.tools.{place}"):
        load_tools(names)


@pytest.mark.scenario(
    "environments/a-template-without-tools", clauses=["environments/tools-are-functions-and-mcp-servers#10"]
)
def test_a_template_that_does_not_show_tools_is_refused():
    tools = [load_tools((f"{FUNCTIONS}:multiply",))["multiply"].schema]
    for name, problem in (("smollm2", "leaves out the tool multiply"), ("llama3_1", "writes a call as")):
        with refused("tools-not-rendered", "custom.extra.environment.tools", problem=problem, remedy="text"):
            Template(fetch_tokenizer(name), system="", user="", any_chat=True).check_tools(tools)
    qwen = Template(fetch_tokenizer("qwen3"), system="", user="", any_chat=True)
    qwen.check_tools(tools)
    reply = "<tool_response>\n42\n</tool_response>"
    assert qwen.reply_token_ids(reply, True), "its thoughts stay before replies of tools"
    qwen.tokenizer.chat_template = str(qwen.tokenizer.chat_template).replace("tool | tojson", "tool.function.name")
    with refused("tools-not-rendered", problem="leaves out a_factor of the tool multiply"):
        function = {**tools[0]["function"], "parameters": {"properties": {"a_factor": {"type": "integer"}}}}
        qwen.check_tools([{"type": "function", "function": function}])


class Calling(TurnSide):
    """Calls ``multiply`` in its first turn, and writes the answer that the reply holds in its second one."""

    def write(self, request, decoding):
        text = call("multiply", a=6, b=7) if not request.prefix_token_ids else "42"
        ids = VOCABULARY.encode(text)
        return make_reply(request, ids, version=self.version, finish_reason="stop")


def calling():
    return Calling(decoding=Decoding(max_new_tokens=80, temperature=1.0))


def in_tools(**fields):
    make = load_tool_environment((f"{FUNCTIONS}:multiply",), limits=LIMITS)
    return world(make, max_response_tokens=300, **fields)


@pytest.mark.scenario(clauses=["environments/tools-are-functions-and-mcp-servers#3"])
@pytest.mark.parametrize("make", [grouped, climbing, searching])
def test_reward_functions_judge_the_last_turn(make):
    samples = [replace(sample_of(0), metadata={"answer": 42}), replace(sample_of(1), metadata={"answer": 41})]
    rewards, side = (Reward.of(right, name="right"),), calling()
    made = replace(make(), world=in_tools())
    if make is not grouped:
        rewards = RewardRules(rewards=rewards, vocabulary=VOCABULARY, unfinished_return=None)
    made = replace(made, rewards=rewards)
    targets = made.make_segments(samples, side.answer(samples, in_world=made.world), side.context())
    assert made.summarize(targets.reports)["reward"] == pytest.approx(0.5)
    if make is grouped:
        assert made.summarize(targets.reports)["reward/right"] == pytest.approx(0.5)
    else:
        values = [one.values for one in targets.reports if hasattr(one, "values")]
        assert values == [pytest.approx((1.0, 1.0))] * 2 + [pytest.approx((0.0, 0.0))] * 2
    assert made.evaluate(samples, side.answer(samples, num=1, in_world=made.world), side.context()).metrics[
        "reward"
    ] == pytest.approx(0.5)
    assert multiply(6, 7) == 42


@pytest.mark.scenario(clauses=["environments/tools-are-functions-and-mcp-servers#11"])
@pytest.mark.parametrize("shown", ["text", "template"])
def test_samples_show_the_tools(shown):
    tools = f"custom.extra.environment.tools=[{FUNCTIONS}:multiply]"
    config = config_with(*GRPO, "global_max_length=2048", tools, f"custom.extra.environment.show_tools={shown}")
    plain, led = sample_of(), replace(sample_of(1), messages=(("system", "Be brief."), ("user", "?")))
    first, second = with_first_observations(config, [plain, led])
    if shown == "text":
        assert first.tools == second.tools == ()
        assert [role for role, _ in first.messages] == [role for role, _ in second.messages] == ["system", "user"]
        assert second.messages[0][1] == f"Be brief.\n\n{first.messages[0][1]}"
        assert '"name": "multiply"' in first.messages[0][1]
    else:
        assert (first.messages, second.messages) == (plain.messages, led.messages)
        assert [one.tools[0]["function"]["name"] for one in (first, second)] == ["multiply"] * 2
