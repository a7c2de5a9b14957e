"""Updates as trainers of TRL send them, on a real engine: a tied head that comes last, a trainer that dies, a port."""

import signal
import socket
import subprocess
import sys
import time

import pytest
import requests

from conformance.doubles.digits import load_model
from conformance.doubles.refusals import refused
from conformance.judge.ports import free_port
from rollmatch.dialects.trl.vllm_client import VLLMClient
from rollmatch.model.checkpoint import merged_weights

pytestmark = pytest.mark.engine
HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"
TRAINER = """
import sys, time
from rollmatch.dialects.trl.vllm_client import VLLMClient
client = VLLMClient(sys.argv[1], group_port=int(sys.argv[2]))
client.init_communicator("cpu")
print("joined", flush=True)
time.sleep(600)
"""


@pytest.fixture
def client(instance):
    made = VLLMClient(instance.server.url, group_port=free_port())
    made.init_communicator("cpu")
    yield made
    made.close_communicator()


@pytest.mark.wide
@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#9"])
def test_a_tied_head_may_come_last_if_it_is_the_embedding(client):
    """As with TRL's FSDP2 path, which sends a state dict."""
    weights = dict(merged_weights(load_model()))
    assert HEAD not in weights
    client.update_model_params({**weights, HEAD: weights[EMBEDDING]})
    with refused("digest-mismatch", HEAD):
        client.update_model_params({**weights, HEAD: 2 * weights[EMBEDDING]})
    client.update_model_params({HEAD: 2 * weights[EMBEDDING], **weights} | {HEAD: weights[EMBEDDING]})
    with refused("digest-mismatch", HEAD):
        client.update_model_params({HEAD: 2 * weights[EMBEDDING], **weights})
    client.update_model_params({HEAD: weights[EMBEDDING], **weights})
    with refused("tensor-missing", EMBEDDING):
        client.update_model_params({name: weight for name, weight in weights.items() if name != EMBEDDING})


@pytest.mark.wide
def test_a_trainer_that_died_leaves_its_place_to_the_next_one(instance):
    url, port = instance.server.url, free_port()
    with subprocess.Popen([sys.executable, "-c", TRAINER, url, str(port)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "joined\n"
        body = {"host": "127.0.0.1", "port": free_port(), "world_size": 3}
        second = requests.post(f"{url}/init_communicator/", json=body, timeout=60)
        assert (second.status_code, second.json()["code"]) == (
            409,
            "communicator-already-open",
        )  # it is idle, and lives
        first.send_signal(signal.SIGKILL)
        first.wait()
    client = VLLMClient(url, group_port=free_port())
    client.server.control("/init_communicator", body)
    client.server.control("/close_communicator")


def test_a_group_that_nobody_joins_gives_its_port_back_when_it_is_closed(instance):
    url, port = instance.server.url, free_port()
    body = {"host": "127.0.0.1", "port": port, "world_size": 3}
    assert requests.post(f"{url}/init_communicator/", json=body, timeout=60).status_code == 200
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    assert requests.post(f"{url}/close_communicator/", timeout=60).json()["message"] == "communicator closed"
    deadline = time.monotonic() + 5
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            break
        assert time.monotonic() < deadline, "the engine still listens"
        time.sleep(0.05)
