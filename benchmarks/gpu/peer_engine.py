"""An engine without HTTP in a process of its own, driven through a pipe; its worker knows every way of weights."""

import multiprocessing
import os
import traceback
from contextlib import suppress
from types import SimpleNamespace

import torch

from rollmatch.weights.worker.extension import WorkerExtension

END_S = 20.0
WORKER = "benchmarks.gpu.peer_engine.PeerWorker"


class PeerWorker(WorkerExtension):
    """Ours, and what the peers need."""

    def peer_floor(self, num_bytes, num_pieces):
        """Receive so many bytes and do nothing with them."""
        group = self.rollmatch_receiver.group
        if getattr(self, "peer_memory", None) is None:
            self.peer_memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        for _ in range(num_pieces):
            group.broadcast_group([self.peer_memory])
        group.wait(group.mark())

    def peer_forget(self):
        self.peer_memory = None
        torch.cuda.empty_cache()

    def peer_load_one(self, name, shape):
        """One tensor, through vLLM's loader."""
        group = self.rollmatch_receiver.group
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        group.follow()
        group.broadcast_group([tensor])
        group.wait(group.mark())
        self._rollmatch_model().load_weights([(name, tensor)])
        group.finish()

    def peer_held(self):
        """Something of every parameter, to be compared."""
        weights = self._rollmatch_model().named_parameters()
        return {name: int(weight.view(torch.int16).long().sum()) for name, weight in weights}


def take_gpu(index):
    """Of those that this process was given, before anything looks at them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[index] if given else str(index)


def run_engine(directory, gpu, pipe, arguments):
    """Of a child: answer what comes through the pipe."""
    take_gpu(gpu)
    from vllm import LLM

    llm = LLM(
        directory,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        worker_extension_cls=WORKER,
        **arguments,
    )
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        method, *arguments = message
        try:
            if method.startswith("llm."):
                answer = getattr(llm, method[4:])(*arguments)
            else:
                answer = llm.collective_rpc(method, args=tuple(arguments))
        except Exception as error:  # noqa: BLE001 - sent to the other side
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
        pipe.send(answer)


class Engines:
    """All of them, on GPUs 0 to n - 1; every call goes to all at the same time."""

    def __init__(self, directory, num_engines, arguments, *, target=run_engine):
        """``arguments``: vLLM's further ones; ``target`` runs in each child."""
        context = multiprocessing.get_context("spawn")
        self.engines = []
        for gpu in range(num_engines):
            pipe, theirs = context.Pipe()
            process = context.Process(target=target, args=(directory, gpu, theirs, arguments), daemon=False)
            process.start()
            self.engines.append(SimpleNamespace(pipe=pipe, process=process))

    def begin(self, method, *arguments):
        for engine in self.engines:
            engine.pipe.send((method, *arguments))

    def begin_one(self, index, method, *arguments):
        self.engines[index].pipe.send((method, *arguments))

    def answers(self, *, within_s=60.0):
        """Of all, in order; raises what an engine sent as an error."""
        answers = []
        for engine in self.engines:
            if not engine.pipe.poll(within_s):
                raise TimeoutError(f"an engine did not answer within {within_s} s")
            answers.append(engine.pipe.recv())
        for answer in answers:
            first = answer[0] if isinstance(answer, list) and answer else answer
            if isinstance(first, dict) and ("error" in first or "failure" in first):
                raise RuntimeError(str(first))
        return answers

    def call(self, method, *arguments, within_s=60.0):
        self.begin(method, *arguments)
        return self.answers(within_s=within_s)

    def end(self):
        """By their own exits, so that no process of vLLM's is left behind on a GPU."""
        for engine in self.engines:
            with suppress(BrokenPipeError):
                engine.pipe.send(None)
        for engine in self.engines:
            engine.process.join(END_S)
            engine.process.kill()
