"""Rollouts by a vLLM engine inside the learner's process, on the learner's own devices; a door to vllm.

The engine holds its own copy of the weights; ``push`` loads the learner's into it in memory and empties the caches
that depend on them. ``push_adapter`` loads the base weights once, and from then on the adapter alone. With tensor
parallelism the ranks of a group share one engine: each runs the whole group's requests and keeps its own part.
"""

import atexit
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from rollmatch.dialects.swift.sender import named_parts, peft_config
from rollmatch.errors import FAILURES, RolloutError, SyncError, kind_and_text
from rollmatch.model.images import once_per_images
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding, RolloutBackend, check_answers, make_rollout
from rollmatch.rollout.engine_turns import EngineTurns
from rollmatch.server import scheduler
from rollmatch.startup import loading
from rollmatch.weights.named_weights import Adapter
from rollmatch.weights.worker.loading import keep_weights_loadable
from rollmatch.weights.worker.partial_prompts import draw_for_whole_prompts

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

LOGPROBS_AS_SAMPLED = {"logprobs_mode": "processed_logprobs", "scheduler_cls": scheduler.SCHEDULER}
"""Log-probabilities under the distribution that was sampled from: after temperature, bans, top-p and top-k."""


MEMORY = "/dev/shm"
"""vLLM loads adapters from files; on Linux, these are memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine is started with. Made by ``cli`` from the configuration."""

    model: str
    dtype: str
    max_model_len: int
    tensor_parallel_size: int = 1
    sleeps: bool = False
    """Whether the engine's memory is the learner's while it works."""
    lora_rank: int | None = None
    """Largest rank of the adapters that the engine is to apply; None: it applies none."""
    engine_arguments: dict[str, object] = field(default_factory=dict)
    """Further vLLM engine arguments, by vLLM's names."""


class VllmColocateBackend(RolloutBackend):
    """A vLLM engine in this process."""

    takes_adapters = True

    def __init__(self, settings: EngineSettings, template: Template, ranks: Ranks) -> None:
        self.settings = settings
        self.template = template
        self.policy_version = 0
        self._tensor_group = _open_tensor_group(ranks, settings.tensor_parallel_size)
        self._is_alone = not dist.is_initialized()
        self._engine = _open_engine(settings, ranks)
        self._asleep: list[str] = []
        """What of the engine's memory is the learner's at present."""
        self._adapter: LoRARequest | None = None
        """The adapter that every response is written with; the engine's weights are then the base's."""

    def push(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Load the learner's weights in place, then forget everything computed with the old ones."""
        self._remove_adapter()
        self._load(weights)
        self._note_taken(version)

    def push_adapter(self, adapter: Adapter, *, version: int) -> None:
        """Load the adapter, which the engine applies to the base weights; these are loaded before the first one.

        Errors: ``adapter-not-loaded``, ``AdapterNotSendable``.
        """
        from vllm.lora.request import LoRARequest

        config = peft_config(adapter)
        self._wake("weights")  # room for adapters sleeps with them
        if self._adapter is None:
            self._load(adapter.base)
        self._remove_adapter()
        with TemporaryDirectory(prefix="rollmatch-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            tensors = {name: tensor.contiguous() for name, tensor in named_parts(adapter)}
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            request = LoRARequest(f"policy-{version}", version, folder)
            try:
                is_loaded = self._engine.llm_engine.add_lora(request)
            except FAILURES as error:  # vLLM names no type of its own
                raise _not_loaded(kind_and_text(error)) from error
        if not is_loaded:
            raise _not_loaded("vLLM gives no reason")
        self._adapter = request
        self._note_taken(version)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._wake("weights")  # the cache comes last: loading may need what it takes
        passing = iter(weights)
        try:
            if self.settings.engine_arguments.get("quantization"):
                self._engine.collective_rpc(_reload, args=(passing,))
            else:
                self._engine.apply_model(lambda model: _load(model, passing))
        finally:
            for _ in passing:  # other ranks wait in the same gathers
                pass

    def _remove_adapter(self) -> None:
        if self._adapter is not None:
            self._wake("weights")
            self._engine.llm_engine.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

    def _note_taken(self, version: int) -> None:
        for part in tuple(self._asleep):
            self._wake(part)
        self._engine.reset_prefix_cache()
        # Not part of LLM: without it, stale vision embeddings answer for images seen before.
        self._engine.llm_engine.reset_encoder_cache()
        self.policy_version = version

    def generate(self, requests: Sequence[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        """As the contract. Errors also: ``prompt-too-long``."""
        self._check_ready()
        mine, everyone = self._gather(list(requests))
        rollouts = self._run(everyone, decoding)[mine]
        check_answers(requests, rollouts)
        return rollouts

    def open_turns(self, num_episodes: int, decoding: Decoding) -> EngineTurns | None:
        """As the contract: each turn joins the batch at once. None where ranks share the engine, which have to run its
        steps together. Errors: ``rollout-before-sync``.
        """
        if self._tensor_group is not None:
            return None
        self._check_ready()
        return EngineTurns(_SteppedVllm(self, decoding))

    def _check_ready(self) -> None:
        if self.policy_version == 0:
            raise RolloutError(
                "the engine has not been given the learner's weights", code="rollout-before-sync", key="policy_version"
            )
        for part in tuple(self._asleep):
            self._wake(part)

    def rest(self) -> None:
        """As the contract, where ``sleeps`` is set: weights go to the host's memory, the attention cache goes."""
        if self.settings.sleeps and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = ["weights", "kv_cache"]

    def close(self) -> None:
        """Stop the engine, and leave the process group if it opened one for itself alone."""
        del self._engine
        if self._is_alone and dist.is_initialized():
            dist.destroy_process_group()

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            torch.cuda.empty_cache()  # what the learner has freed, torch still holds
            self._engine.wake_up(tags=[part])
            self._asleep.remove(part)

    def _gather(self, requests: list[RolloutRequest]) -> tuple[slice, list[RolloutRequest]]:
        """All requests of the tensor parallel group, and where this rank's stand among them."""
        if self._tensor_group is None:
            return slice(0, len(requests)), requests
        parts: list[list[RolloutRequest]] = [[]] * self.settings.tensor_parallel_size
        dist.all_gather_object(parts, requests, group=self._tensor_group)
        first = sum(len(part) for part in parts[: dist.get_rank(self._tensor_group)])
        return slice(first, first + len(requests)), [request for part in parts for request in part]

    def _run(self, requests: list[RolloutRequest], decoding: Decoding) -> list[Rollout]:
        images_of = once_per_images(self.template.load_images)
        prompts = [self._make_prompt(request, images_of(request.sample), decoding) for request in requests]
        sampling = [self._make_sampling(request, decoding) for request in requests]
        options: dict[str, Any] = {"use_tqdm": False, "lora_request": self._adapter}
        outputs = self._engine.generate(prompts, sampling, **options) if prompts else []
        return [self._make_rollout(r, output) for r, output in zip(requests, outputs, strict=True)]

    def _enqueue(self, request: RolloutRequest, images: list[Image.Image], decoding: Decoding) -> str:
        """Let a request join the engine's batch; returns the name that its output will have."""
        prompt, sampling = self._make_prompt(request, images, decoding), self._make_sampling(request, decoding)
        name: str = self._engine.enqueue([prompt], [sampling], use_tqdm=False, lora_request=self._adapter)[0]
        return name.partition("-")[0]  # vLLM appends letters of its own

    def _make_prompt(self, request: RolloutRequest, images: list[Image.Image], decoding: Decoding) -> dict[str, object]:
        self._check_room(request, images, decoding)
        prompt: dict[str, object] = {"prompt_token_ids": list(request.token_ids)}
        if images:
            prompt["multi_modal_data"] = {"image": images}
        return prompt

    def _check_room(self, request: RolloutRequest, images: Sequence[Image.Image], decoding: Decoding) -> None:
        """vLLM would cut a response short in silence; a placeholder grows to as many tokens as its image has."""
        prompt_len = len(request.token_ids) + self.template.num_added_tokens(images)
        needed = prompt_len + request.limit(decoding.max_new_tokens)
        if needed > self.settings.max_model_len:
            raise RolloutError(
                f"{request.sample.origin} needs {needed} tokens, the engine holds {self.settings.max_model_len}",
                code="prompt-too-long",
                key="custom.extra.rollout_matching.vllm.max_model_len",
                remedy="Raise max_model_len or lower max_new_tokens.",
            )

    def _make_sampling(self, request: RolloutRequest, decoding: Decoding) -> "SamplingParams":
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=request.limit(decoding.max_new_tokens),
            **decoding.values(),
            seed=request.seed,
            stop_token_ids=sorted(self.template.vocabulary.stop_ids),
            logit_bias=dict.fromkeys(self.template.banned_ids, -100.0),
            detokenize=False,
            **scheduler.wanted(logprobs=decoding.logprobs),
        )

    def _make_rollout(self, request: RolloutRequest, output: "RequestOutput") -> Rollout:
        answer = output.outputs[0]
        token_ids, values = list(answer.token_ids), scheduler.values_of(output, answer)
        logprobs = None if values is None else np.frombuffer(values, dtype="<f4").tolist()
        stop_ids, version = self.template.vocabulary.stop_ids, self.policy_version
        prompt = output.prompt_token_ids or ()
        return make_rollout(request, prompt, token_ids, logprobs, stop_ids=stop_ids, version=version)


class _SteppedVllm:
    """Satisfies ``SteppedEngine``."""

    def __init__(self, backend: VllmColocateBackend, decoding: Decoding) -> None:
        self.backend, self.decoding = backend, decoding
        self._images_of = once_per_images(backend.template.load_images)
        self._requests: dict[str, RolloutRequest] = {}

    def add(self, request: RolloutRequest) -> str:
        """As the protocol; by vLLM's number of the request. Errors: ``prompt-too-long``."""
        name = self.backend._enqueue(request, self._images_of(request.sample), self.decoding)
        self._requests[name] = request
        return name

    def step(self) -> dict[str, Rollout]:
        """As the protocol."""
        outputs = self.backend._engine.llm_engine.step()
        ended = {output.request_id: output for output in outputs if output.finished}
        return {n: self.backend._make_rollout(self._requests.pop(n), output) for n, output in ended.items()}

    def abort(self, names: Sequence[str]) -> None:
        """As the protocol."""
        self.backend._engine.llm_engine.abort_request(list(names))


def _load(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    with _without_adapter_layers(model):
        model.load_weights(weights)  # type: ignore[operator]


def _reload(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """In the worker of an engine that quantizes: its memory has no room for what is sent."""
    with _without_adapter_layers(worker.model_runner.get_model()):
        worker.model_runner.reload_weights(weights_iterator=weights)


@contextmanager
def _without_adapter_layers(model: torch.nn.Module) -> Iterator[None]:
    """The model with plain layers in place of those that apply adapters: names of weights are then the usual ones."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent._modules.items()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in wrapped:
        parent._modules[name] = layer.base_layer
    try:
        yield
    finally:
        for parent, name, layer in wrapped:
            parent._modules[name] = layer


def _not_loaded(problem: str) -> SyncError:
    remedy = "Set sync.mode to full."
    return SyncError(f"the engine loads no adapter: {problem}", code="adapter-not-loaded", key="tuner", remedy=remedy)


def _lora_arguments(rank: int) -> dict[str, object]:
    """Room for one adapter of this rank. vLLM takes some ranks only."""
    from vllm.config.lora import MaxLoRARanks

    fitting = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not fitting:
        problem = f"{rank} is more than vLLM's {max(get_args(MaxLoRARanks))}"
        raise _not_loaded(problem)
    return {"enable_lora": True, "max_lora_rank": min(fitting), "max_loras": 1}


def _open_tensor_group(ranks: Ranks, size: int) -> dist.ProcessGroup | None:
    """This rank's group of ``size`` consecutive ranks; every rank takes part in making all groups."""
    if size == 1:
        return None
    members = [list(range(first, first + size)) for first in range(0, ranks.learner_world_size, size)]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(members)[0]  # type: ignore[no-untyped-call]
    return group


def _open_engine(settings: EngineSettings, ranks: Ranks) -> "LLM":
    """Start vLLM in this process: ``uni`` alone, torchrun's own ranks otherwise."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)  # some lines come before vLLM reads the variable itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about vLLM's own use of torch
        warnings.filterwarnings("ignore", message="TensorFloat32")  # float32 is chosen to be exact
        with loading():
            from vllm import LLM

            keep_weights_loadable()
            draw_for_whole_prompts()
        if torch.cuda.is_available():
            from rollmatch.weights.worker.logprob_kernel import install

            install()
        else:
            _name_shared_memory()
        lora = {} if settings.lora_rank is None else _lora_arguments(settings.lora_rank)
        return LLM(
            model=settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            tensor_parallel_size=settings.tensor_parallel_size,
            distributed_executor_backend="uni" if ranks.learner_world_size == 1 else "external_launcher",
            use_tqdm_on_load=False,
            enable_sleep_mode=settings.sleeps,
            **(LOGPROBS_AS_SAMPLED | lora | settings.engine_arguments),
        )


def _name_shared_memory() -> None:
    """Give the ranks of one launcher a shared memory of their own on a CPU.

    vLLM 0.32 names it alike in every run of an external launcher: two runs at a time are in each other's way, and one
    that was killed leaves its memory behind, so that no later one starts.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name_of = _CPUSHMDistributed.make_group_name

    def with_launcher(communicator: _CPUSHMDistributed) -> str:
        name = f"rollmatch-{os.getppid()}-{name_of(communicator).replace('/', '')}"
        # The library itself forgets it where Python ends in full, which ``startup.leave`` does not wait for.
        atexit.register(Path("/dev/shm", f"{name}_{communicator.rank}").unlink, missing_ok=True)
        return name

    _CPUSHMDistributed.make_group_name = staticmethod(with_launcher)
