"""How engines are started side by side or one after the other, and how a server ends that has lost one."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from rollmatch.serve import process as server_process
from rollmatch.serve import serving
from rollmatch.server.settings import ServerSettings


@pytest.fixture
def engines(monkeypatch):
    """Engines that note when they start and what they generate; ``children``: processes that are there."""
    noted = SimpleNamespace(running=0, most=0, started=[], generated=[], children=[])

    class NotedReplica:
        def __init__(self, settings, *, index):
            noted.started.append(index)
            noted.running += 1
            noted.most = max(noted.most, noted.running)
            noted.children.append(index)
            if settings.gpus:
                noted.all_there.wait(30)
            noted.running -= 1
            self.index = index

        def params_of(self, request, *, seed):
            return request.sampling.max_tokens, seed

        async def generate(self, prompt, params, call_id):
            noted.generated.append((self.index, prompt.token_ids, *params, call_id))

    monkeypatch.setattr(serving, "VllmReplica", NotedReplica)
    monkeypatch.setattr(serving, "active_children", lambda: list(noted.children))
    return noted


def settings_with(number, *, gpus=()):
    return ServerSettings(model="m", dtype="auto", max_model_len=8, port=1, data_parallel_size=number, gpus=gpus)


@pytest.mark.parametrize("number", [1, 3])
def test_without_gpus_one_engine_starts_when_the_one_before_is_up(engines, capsys, number):
    replicas = asyncio.run(serving.start_replicas(settings_with(number)))
    assert [replica.index for replica in replicas] == engines.started == list(range(number))
    assert engines.most == 1
    assert sorted(engines.generated) == [(index, [0], 1, None, "warm-up") for index in range(number)]
    first, *lines = capsys.readouterr().err.splitlines()
    few = "1 engine" if number == 1 else "3 engines"
    assert first == f"rollout server: starting {few} of m; on GPUs this takes minutes"
    shown = [f"rollout server: engine {index + 1} of {number} is up after 0 s" for index in range(number)]
    assert lines == shown


def test_on_gpus_the_next_engine_starts_when_the_process_of_the_one_before_is_there(engines):
    engines.all_there = threading.Barrier(3)
    replicas = asyncio.run(serving.start_replicas(settings_with(3, gpus=("0", "1", "2"))))
    assert [replica.index for replica in replicas] == engines.started == [0, 1, 2]
    assert engines.most == 3


def test_an_engine_that_fails_takes_the_others_with_it(engines, monkeypatch):
    def fail(settings, *, index):
        raise RuntimeError("no memory")

    killed = []
    monkeypatch.setattr(serving, "VllmReplica", fail)
    monkeypatch.setattr(serving, "kill_children", lambda: killed.append("all"))
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(serving.start_replicas(settings_with(2)))
    assert killed == ["all"]


@pytest.mark.parametrize(
    ("described", "size"),
    [({"vocab_size": 7, "text_config": {"vocab_size": 9}}, 7), ({"text_config": {"vocab_size": 9}}, 9)],
)
def test_the_vocabulary_has_the_rows_that_the_model_names(tmp_path, described, size):
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert serving.vocabulary_size(str(tmp_path)) == size


def test_a_server_that_cannot_listen_as_configured_says_why_and_ends_with_1(capsys):
    settings = ServerSettings(model="m", dtype="auto", max_model_len=8, port=1, host="0.0.0.0")
    assert server_process.run(settings.to_json()) == 1
    assert "[open-without-key] host: everybody who reaches 0.0.0.0 could use it" in capsys.readouterr().err
