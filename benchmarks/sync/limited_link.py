"""Full and adapter syncs over a link of 10 Gbit/s, in turn, on CPUs: our sender, our server, our receiver, gloo.

    python -m benchmarks.sync.limited_link --results benchmarks/results

Learner and server are processes in network namespaces of their own, joined by a veth pair whose ends are limited by
``tc`` (tbf). The server holds the weights that it loads, in place of vLLM; all else is what a run uses: plan, buckets,
merges on both sides, digests of every tensor compared, commit. Each process has one core. Needs root and Linux.
"""

import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.gpu.report import Report, parser_of
from benchmarks.sync.merging_server import ROOT, make_directory
from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.hosts import enter
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.model.checkpoint import merged_weights
from rollmatch.model.policy import load_policy
from rollmatch.weights.digest import digests_of
from rollmatch.weights.named_weights import named_weights
from rollmatch.weights.plan import OutgoingWeights

TARGETS = {
    "every linear layer": r".*layers.*_proj",
    "q_proj and v_proj": r".*(q_proj|v_proj)",
}
LEARNER, SERVER, HTTP_PORT, GROUP_PORT, SINK_PORT = "10.78.0.1", "10.78.0.2", 8000, 51216, 51300
TIMEOUT_S, RATE, BURST, LATENCY, MTU = 120.0, "10gbit", "4mb", "20ms", 9000
PIECE_BYTES, LINK_BYTES = 2**22, 2**30


def main():
    options = parse()
    report = Report(
        options.results / "limited_link.json", bars={f"{name}: full / {name}: adapter": 4 for name in TARGETS}
    )
    report.note(rate=RATE, mtu=MTU, rank=options.rank, use_dora=options.dora)
    with tempfile.TemporaryDirectory() as folder, limited_link() as (learner, server):
        num_bytes = make_directory(Path(folder), options.layers)
        report.note(num_bytes=num_bytes)
        enter(learner)
        threading.Thread(target=sink, args=(server,), daemon=True).start()
        with server_in(server, folder) as url:
            sender = make_sender(url)
            for _ in range(options.rounds):
                report.sample("link, 1 GiB by TCP", send_bytes)
            for name, pattern in TARGETS.items():
                measure(report, sender, policy_of(folder, pattern, options), name, options.rounds)
            sender.close()
    report.end()


def measure(report, sender, policy, name, rounds):
    """Each way in turn; the first round sets things up and is no sample.

    After a full sync, the server reads the weights without adapter from its files again: in a run of adapter syncs it
    does not, so the one after that is the sample.
    """
    weights = named_weights(policy)
    adapter = weights.adapter()
    adapter_bytes = sum(tensor.nbytes for _, tensor in adapter.tensors)
    merged, plain = list(adapter.merged), list(merged_weights(policy))
    report.note(**{f"{name}: adapter_bytes": adapter_bytes, f"{name}: merged_bytes": sum(t.nbytes for t in merged)})
    made = OutgoingWeights(specs=tuple(weights.specs()), weights=weights)
    ways = {
        "full": lambda: sender.send(made, version=next(VERSIONS)),
        "full, all merged first": lambda: sender.send(list(weights), version=next(VERSIONS)),
        "full, merged before": lambda: sender.send(plain, version=next(VERSIONS)),
        "adapter after full": lambda: sender.send_adapter(weights.adapter(), version=next(VERSIONS)),
        "adapter": lambda: sender.send_adapter(weights.adapter(), version=next(VERSIONS)),
        "learner's merge": lambda: [None for _ in adapter.merged],
        "digests of merged weights": lambda: digests_of(merged),
    }
    peaks = {}
    for number in range(rounds + 1):
        for way, call in ways.items():
            if way.startswith("full"):
                call()  # the server's memory is that of the kind of sync before
            before = forget_peak()
            report.sample(f"{name}: {way}" if number else f"{name}: {way}, first", call)
            peaks.setdefault(way, resident_bytes("VmHWM") - before)
    report.note(**{f"{name}: {way}, peak of extra bytes": num_bytes for way, num_bytes in peaks.items()})
    medians = {way: statistics.median(report.samples[f"{name}: {way}"]) for way in ways}
    for way in ("full", "full, all merged first", "full, merged before"):
        report.note(**{f"{name}: {way} / adapter": medians[way] / medians["adapter"]})


def forget_peak():
    """The bytes that are resident now, from which the next peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()


def resident_bytes(field="VmRSS"):
    """Of this process, now or (``VmHWM``) at most since ``forget_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


VERSIONS = itertools.count(1)


def policy_of(folder, pattern, options):
    tuner = TunerConfig(train_type="lora", use_dora=options.dora, lora_rank=options.rank, target_regex=pattern)
    policy = load_policy(ModelConfig(model=folder, torch_dtype="bfloat16"), tuner)
    return perturb_adapters(policy, by=0.01)


def make_sender(url):
    server = RolloutServer(url, ClientSettings(timeout_s=TIMEOUT_S))
    server.connect()
    rendezvous = Rendezvous(
        host=SERVER, port=GROUP_PORT, client="learner", timeout_s=TIMEOUT_S, join_timeout_s=TIMEOUT_S
    )
    return NativeSender([server], rendezvous, stage=False)


@contextmanager
def server_in(namespace, folder):
    words = ["ip", "netns", "exec", namespace, sys.executable, "-m", "benchmarks.sync.merging_server"]
    process = subprocess.Popen([*words, SERVER, str(HTTP_PORT), str(folder)], cwd=ROOT)
    url = f"http://{SERVER}:{HTTP_PORT}"
    try:
        RolloutServer(url, ClientSettings(timeout_s=TIMEOUT_S)).wait_until_healthy(TIMEOUT_S)
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def limited_link():
    """The names of two network namespaces, joined by a link of ``RATE`` in both directions."""
    names = [f"rollmatch-{os.getpid()}-{letter}" for letter in "ab"]
    devices = [f"rm{os.getpid()}{letter}" for letter in "ab"]
    with ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "delete", name)
        run("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for name, device, address in zip(names, devices, (LEARNER, SERVER), strict=True):
            run("ip", "link", "set", device, "netns", name)
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "address", "add", f"{address}/24", "dev", device)
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "link", "set", device, "up", "mtu", str(MTU))
            limit = ("rate", RATE, "burst", BURST, "latency", LATENCY)
            run(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield names


def run(*words):
    subprocess.run(words, check=True, capture_output=True)


def sink(namespace):
    """Take what is sent to the server's side and answer each connection with one byte at its end."""
    enter(namespace)
    memory = bytearray(PIECE_BYTES)
    with socket.create_server((SERVER, SINK_PORT)) as listener:
        while True:
            with listener.accept()[0] as connection:
                while connection.recv_into(memory):
                    pass
                connection.sendall(b"x")


def send_bytes():
    piece = bytes(PIECE_BYTES)
    with socket.create_connection((SERVER, SINK_PORT)) as connection:
        for _ in range(LINK_BYTES // PIECE_BYTES):
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1)


def parse():
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dora", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces and the server go, too
    main()
