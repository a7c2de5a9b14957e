"""The five arguments of VinePPO's guide, and the server it starts without a YAML."""

import argparse
import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from starlette.testclient import TestClient

from conformance.doubles.digits import MODEL, ROOT
from conformance.doubles.http_server import answering
from conformance.doubles.instance import free_port
from conformance.doubles.refusals import refused
from conformance.doubles.stand_in import make_stand_in
from rollmatch.cli import main, server_arguments
from rollmatch.config import load_config
from rollmatch.config.servers import pair_servers
from rollmatch.dialects.native.group import resolve
from rollmatch.dialects.prompt import Prompt, SamplingRules
from rollmatch.dialects.trl.vllm_client import VLLMClient
from rollmatch.launch import rollout_server, vllm_serve
from rollmatch.launch.server_arguments import overrides_of
from rollmatch.ranks import Ranks
from rollmatch.run.connect import connect_servers
from rollmatch.serve import process as server_process
from rollmatch.server.settings import check_exposure

FIVE = "--use_vllm_server --vllm_host localhost --vllm_server_port 8000 --vllm_group_port 22222"


def parsed(words):
    parser = argparse.ArgumentParser()
    server_arguments.add_arguments(parser)
    return overrides_of(parser.parse_args(words.split()))


def configured(words):
    return load_config(str(ROOT / "fixtures/digits/digits.yaml"), parsed(words))


def test_the_next_command_of_a_process_does_not_inherit_them(capsys):
    command = ["train", str(ROOT / "fixtures/digits/digits.yaml"), "--dry-run"]
    outputs = []
    for words in ([], ["--use_vllm_server", "--vllm_server_port", "8000"], []):
        assert main.main([*command, *words]) == 0
        outputs.append(capsys.readouterr().out)
    before, served, after = outputs
    assert ":8000" in served
    assert before == after


@pytest.mark.scenario(clauses=["vineppo/vineppo-trainers-use-a-rollout-server-by-five-arguments#3"])
def test_the_group_port_is_trl_s_unless_set():
    (address,) = pair_servers(configured("--use_vllm_server").custom.extra.rollout_matching.vllm.server)
    assert (address.base_url, address.group_port) == ("http://127.0.0.1:8000", 51216)
    assert VLLMClient.__init__.__defaults__ == (None, "127.0.0.1", 8000, 51216, 60.0)


def test_an_address_without_the_switch_is_refused():
    with refused("server-not-used", "--vllm_server_port"):
        parsed("--vllm_server_port 8000")
    assert parsed("--use_vllm_server --vllm_server_port 8000")
    assert parsed("") == []
    address = "custom.extra.rollout_matching.vllm.server.base_url=http://[::1]:8000"
    assert address in parsed("--use_vllm_server --vllm_host ::1")


def test_the_arguments_reach_every_process_unless_the_yaml_contradicts_them(capsys):
    path = str(ROOT / "fixtures/digits/digits.yaml")
    backend = ["--set", "custom.extra.rollout_matching.rollout_backend=hf", "--set", "training.packing=false"]
    assert main.main(["train", path, *backend, "--use_vllm_server", "--dry-run"]) == 1
    assert "[server-not-used] custom.extra.rollout_matching.rollout_backend: is hf" in capsys.readouterr().err
    assert main.main(["train", path, *FIVE.split(), "--gpus", "0,1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "vllm.server.group_port=22222" in shown
    assert "vllm.mode=server" in shown
    assert main.main(["vllm-serve", "--model", str(MODEL), "--dry-run"]) == 0
    assert "rollmatch.serve.process" in capsys.readouterr().out


PROMPT = Prompt(request_id="a", prompt_token_ids=(1, 2), messages=(), images=(), seed=1)
RULES = SamplingRules(
    max_tokens=2, temperature=1.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, stop_token_ids=(), banned_token_ids=(),
    logprobs=False,
)  # fmt: skip
ROUTES = ("/health/", "/generate/", "/init_communicator/", "/update_named_param/")


@pytest.fixture
def slow_server():
    """Connects at once and generates for longer than one may wait to connect; ``waited``: seconds of each call."""
    settings = SimpleNamespace(delay_s=5.0, status=200, waited=[], bodies=[])

    def answer(name, body):
        if body is None:
            return 200, {"paths": {path: {} for path in ROUTES}} if name == "openapi.json" else {"status": "ok"}
        time.sleep(settings.delay_s)
        settings.waited.append(settings.delay_s)
        settings.bodies.append(body)
        num_prompts = len(body.get("prompts") or body["messages"])
        replies = {"prompt_ids": [[1, 2]] * num_prompts, "completion_ids": [[5, 6]] * num_prompts * body["n"]}
        return settings.status, replies if settings.status == 200 else {"detail": "out of memory"}

    with answering(answer) as url:
        yield settings, int(url.rpartition(":")[2])


@pytest.mark.scenario(
    "vineppo/the-five-arguments-reach-the-client",
    clauses=["vineppo/vineppo-trainers-use-a-rollout-server-by-five-arguments#2,4"],
)
def test_the_five_arguments_reach_the_client(slow_server):
    _, port = slow_server
    words = FIVE.replace("8000", str(port))
    backend = connect_servers(configured(f"{words} --vllm_connection_timeout 30"), None, ranks=Ranks())
    (server,), (rendezvous,) = backend.servers, backend.sender.rendezvous
    assert (server.base_url, server.settings.timeout_s, server.settings.infer_timeout_s) == (
        f"http://localhost:{port}", 30.0, None
    )  # fmt: skip
    assert (rendezvous.host, rendezvous.port, rendezvous.join_timeout_s) == (resolve("localhost"), 22222, 30.0)
    backend.close()


@pytest.mark.scenario(
    "vineppo/a-slow-answer-is-not-a-lost-connection",
    clauses=["vineppo/vineppo-trainers-use-a-rollout-server-by-five-arguments#5"],
)
def test_a_slow_answer_is_not_a_lost_connection(slow_server):
    """Through the run's own arguments, and the server as its processes ask it."""
    server, port = slow_server
    config = configured(f"--use_vllm_server --vllm_server_port {port} --vllm_connection_timeout 1")
    (asked,) = connect_servers(config, None, ranks=Ranks()).servers
    assert asked.settings.timeout_s == 1.0
    (reply,) = asked.infer([PROMPT], RULES)
    assert (reply.response_token_ids, server.waited) == ((5, 6), [5.0])


def test_an_error_of_the_server_is_an_error_and_no_empty_completion(slow_server):
    settings, port = slow_server
    settings.delay_s, settings.status = 0.0, 500
    client = VLLMClient(server_port=port, connection_timeout=1.0)
    with refused("server-refused", problem="500") as caught:
        client.generate(["a"])
    assert "out of memory" in caught.value.problem
    settings.status = 200
    assert client.generate(["a"])["completion_ids"] == [[5, 6]]


def test_completions_and_chats_are_sampled_by_the_same_defaults(slow_server):
    server, port = slow_server
    server.delay_s = 0.0
    client = VLLMClient(server_port=port, connection_timeout=1.0)
    client.generate(["a"])
    client.chat([[{"role": "user", "content": "a"}]])
    sampling = {"n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    sampling |= {"max_tokens": 16, "logprobs": 0, "generation_kwargs": {}}
    assert [{name: body[name] for name in sampling} for body in server.bodies] == [sampling] * 2


def test_a_server_with_a_key_gets_that_of_the_environment(slow_server, monkeypatch):
    monkeypatch.setenv("ROLLMATCH_API_KEY", "k")
    assert VLLMClient(server_port=slow_server[1], connection_timeout=1.0).server.settings.api_key == "k"


def test_a_server_that_is_not_there_is_refused_within_the_connection_timeout():
    began = time.monotonic()
    with refused("server-unreachable"):
        VLLMClient(server_port=free_port(), connection_timeout=0.5)
    assert time.monotonic() - began < 10


def test_weights_without_a_communicator_are_refused(slow_server):
    _, port = slow_server
    client = VLLMClient(server_port=port, connection_timeout=1.0)
    with refused("communicator-not-open", client.base_url):
        client.update_model_params({"a": None})


def serve_options(words):
    return main.make_parser().parse_args(["vllm-serve", "--model", str(MODEL), *words.split()])


@pytest.mark.scenario(
    "vineppo/two-gpus-with-tensor-parallelism", clauses=["vineppo/the-server-can-be-started-by-the-guide-s-arguments#1"]
)
def test_two_gpus_with_tensor_parallelism(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    words = "--port 8123 --tensor_parallel_size 2 --data_parallel_size 1 --max_model_len 8192"
    options = serve_options(f"{words} --gpu_memory_utilization 0.8 --enable_prefix_caching True --host 0.0.0.0")
    settings = vllm_serve.make_settings(options, on_gpu=True)
    assert settings.engine_arguments == {"gpu_memory_utilization": 0.8, "enable_prefix_caching": True}
    assert (settings.model, settings.host, settings.port, settings.max_model_len) == (str(MODEL), "0.0.0.0", 8123, 8192)
    _, app = make_stand_in(
        tensor_parallel_size=settings.tensor_parallel_size, data_parallel_size=settings.data_parallel_size
    )
    assert TestClient(app).get("/get_world_size/").json() == {"world_size": 2}
    command = vllm_serve.make_command(settings, on_gpu=True)
    started = json.loads(command.words[-1])
    assert (started["tensor_parallel_size"], started["gpus"]) == (2, ["0", "1"])


@pytest.mark.scenario(
    "vineppo/the-default-address-is-loopback", clauses=["vineppo/the-server-can-be-started-by-the-guide-s-arguments#2"]
)
def test_the_default_address_is_loopback(monkeypatch):
    """From the command line to the process's own sockets, at the moment at which it would serve."""
    found = []

    def serve(settings, listener, shutdown):
        listener.listen()
        listed = psutil.Process().net_connections("inet")
        found.extend(each.laddr for each in listed if each.status == "LISTEN" and each.laddr.port == settings.port)
        listener.close()

    monkeypatch.setitem(sys.modules, "rollmatch.serve.serving", SimpleNamespace(serve=serve))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "kept")
    settings = vllm_serve.make_settings(serve_options(f"--port {free_port()}"), on_gpu=False)
    assert server_process.run(vllm_serve.make_command(settings, on_gpu=False).words[-1]) == 0
    assert found == [("127.0.0.1", settings.port)]


def test_the_engine_of_a_server_gets_what_the_configuration_says():
    section = "custom.extra.rollout_matching.vllm"
    given = {"enforce_eager": True, "max_num_seqs": 7, "max_num_batched_tokens": 4096}
    words = [f"{section}.{name}={value}" for name, value in given.items()]
    words += [f"{section}.kv_cache_memory_mib=96", "training.seed=5"]
    words += ["custom.extra.rollout_server.vllm_gpu_memory_utilization=0.55"]
    config = load_config(str(ROOT / "fixtures/digits/digits.yaml"), words)
    found = rollout_server.make_settings(config, port=8000, replicas=1, on_gpu=True).engine_arguments
    expected = given | {"kv_cache_memory_bytes": 96 * 2**20, "seed": 5, "gpu_memory_utilization": 0.55}
    assert found.items() >= expected.items()


@pytest.mark.parametrize("key", ["k", ""])
def test_a_server_guards_itself_by_the_key_of_the_environment(monkeypatch, key):
    monkeypatch.setenv("ROLLMATCH_API_KEY", key)
    by_arguments = vllm_serve.make_settings(serve_options(""), on_gpu=False)
    by_yaml = rollout_server.make_settings(configured(""), port=8000, replicas=1, on_gpu=False)
    assert by_arguments.api_key == by_yaml.api_key == (key or None)


def test_an_open_server_is_one_that_its_arguments_allow(monkeypatch):
    monkeypatch.delenv("ROLLMATCH_API_KEY", raising=False)
    section = "custom.extra.rollout_server"
    words = [f"{section}.{pair}" for pair in ("host=0.0.0.0", "allow_no_key=true", "allowed_hosts=[node7]")]
    config = load_config(str(ROOT / "fixtures/digits/digits.yaml"), words)
    options = serve_options("--host 0.0.0.0 --allow-no-key --allowed-hosts node7")
    for settings in (
        vllm_serve.make_settings(options, on_gpu=False),
        rollout_server.make_settings(config, port=8000, replicas=1, on_gpu=False),
    ):
        check_exposure(settings)
        assert settings.allowed_hosts == ("node7",)
        with refused("open-without-key", "host"):
            check_exposure(replace(settings, allow_no_key=False))


def test_what_the_server_s_own_arguments_default_to(monkeypatch):
    for name in ("VLLM_CPU_KVCACHE_SPACE_MIB", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    settings = vllm_serve.make_settings(serve_options(""), on_gpu=False)
    assert (settings.max_model_len, settings.host, settings.port, settings.world_size) == (4096, "127.0.0.1", 8000, 1)
    on_cpu = {"kv_cache_memory_bytes": 512 * 2**20, "enforce_eager": True}
    assert settings.engine_arguments == {"gpu_memory_utilization": 0.9} | on_cpu
    two = vllm_serve.make_settings(serve_options("--data-parallel-size 2"), on_gpu=True)
    assert json.loads(vllm_serve.make_command(two, on_gpu=True).words[-1])["gpus"] == ["0", "1"]
    assert serve_options("--tensor-parallel-size 3 --enable-prefix-caching false").enable_prefix_caching is False
    with pytest.raises(SystemExit):
        serve_options("--enable_prefix_caching maybe")


@pytest.mark.parametrize(("described", "length"), [({"text_config": {}}, 4096), ({"max_position_embeddings": 99}, 99)])
def test_a_server_s_longest_sequence_is_its_model_s(tmp_path, described, length):
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert vllm_serve.own_length(str(tmp_path)) == length


def test_a_model_that_is_no_directory_is_refused(tmp_path):
    options = serve_options("")
    options.model = str(tmp_path / "none")
    with refused("model-directory-missing", "--model"):
        vllm_serve.make_settings(options, on_gpu=False)
