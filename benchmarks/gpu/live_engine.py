"""An ``AsyncLLM`` in a process of its own that writes many responses at once, and when each of their tokens came."""

import asyncio
import itertools
import random
import statistics
import time
import traceback
from dataclasses import dataclass

from benchmarks.gpu.peer_engine import WORKER, take_gpu

RUN_IN_S, ANSWER_S = 0.5, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Streams that are written at the same time; long enough to outlive a round."""

    num_streams: int
    prompt_len: int
    response_len: int
    last_id: int


class Streams:
    """All of them; times are of this host's monotonic clock, which other processes share."""

    def __init__(self, engine, load):
        self.engine, self.load, self.counter = engine, load, itertools.count()
        self.prompts, self.times, self.num_tokens, self.tasks = [], [], [], []

    async def begin(self, seed):
        """New prompts; returns when all are being written."""
        draw = random.Random(seed)
        ids = range(1, self.load.last_id)
        self.prompts = [draw.choices(ids, k=self.load.prompt_len) for _ in range(self.load.num_streams)]
        self.times = [[] for _ in self.prompts]
        await self.start()
        await self.wait_past(time.perf_counter())
        await asyncio.sleep(RUN_IN_S)

    async def start(self):
        """Every prompt from its first token."""
        self.num_tokens = [0] * len(self.prompts)
        self.tasks = [asyncio.create_task(self._write(place)) for place in range(len(self.prompts))]

    async def stop(self):
        """End all requests and forget what they computed; the number of tokens that are lost."""
        lost = sum(self.num_tokens)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        while not await self.engine.reset_prefix_cache():
            await asyncio.sleep(0.001)
        return lost

    async def gaps(self, since):
        """Seconds between tokens of one stream: each stream's longest since then, and the median before."""
        await self.wait_past(time.perf_counter())
        await asyncio.sleep(RUN_IN_S)
        pairs = [list(itertools.pairwise(times)) for times in self.times]
        usual = [end - begin for times in pairs for begin, end in times if end < since]
        longest = [max(end - begin for begin, end in times if end >= since) for times in pairs]
        return {"longest_s": max(longest), "median_longest_s": statistics.median(longest), "usual_s": _median(usual)}

    async def wait_past(self, point):
        """Until every stream has brought a token after this moment."""
        while not all(times and times[-1] > point for times in self.times):
            for task in self.tasks:
                if task.done():
                    raise RuntimeError(f"a stream ended: {task.exception()}")
            await asyncio.sleep(0.002)

    async def _write(self, place):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rules = SamplingParams(
            temperature=1.0,
            max_tokens=self.load.response_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": self.prompts[place]}
        async for output in self.engine.generate(prompt, rules, f"{next(self.counter)}"):
            self.times[place].append(time.perf_counter())
            self.num_tokens[place] += len(output.outputs[0].token_ids)


class Live:
    """What can be asked of the engine: ``live.NAME`` is a method of its streams or of this; workers get the rest."""

    def __init__(self, engine, load):
        self.engine, self.streams = engine, Streams(engine, load)

    async def answer(self, method, *arguments):
        kind, _, name = method.rpartition(".")
        if kind == "live":
            return await getattr(self if hasattr(self, name) else self.streams, name)(*arguments)
        if kind == "llm":  # of vLLM's weight transfer
            return await self.engine.collective_rpc(name, kwargs=arguments[0] if arguments else {})
        return await self.engine.collective_rpc(method, args=tuple(arguments))

    async def pause(self, by_core=True):
        """Freeze what is being written; what was computed for it stays.

        ``by_core`` leaves out the 20 ms that ``pause_generation`` sleeps so that callers see last tokens first.
        """
        pause = self.engine.engine_core.pause_scheduler_async if by_core else self.engine.pause_generation
        await pause(mode="keep", clear_cache=False)

    async def resume(self):
        await self.engine.resume_generation()


def run_live_engine(directory, gpu, pipe, arguments):
    """Of a child: answer what comes through the pipe, while tokens come."""
    take_gpu(gpu)
    asyncio.run(_serve(directory, pipe, dict(arguments)))


async def _serve(directory, pipe, arguments):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    load = arguments.pop("load")
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=directory, skip_tokenizer_init=True, load_format="dummy", worker_extension_cls=WORKER, **arguments
        )
    )
    live = Live(engine, load)
    pipe.send("ready")
    while (message := await asyncio.to_thread(pipe.recv)) is not None:
        try:
            answer = await asyncio.wait_for(live.answer(*message), ANSWER_S)
        except Exception as error:  # noqa: BLE001 - sent to the other side
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
        pipe.send(answer)
    engine.shutdown()


def _median(values):
    return statistics.median(values) if values else 0.0
