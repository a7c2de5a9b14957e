"""A vLLM engine made of transformers: it generates for real, and remembers what vLLM would remember.

Loaded weights count only for what is in no cache: a prompt that was answered before is answered by the weights of that
time until the prefix cache is reset, and an image that was seen before until the encoder cache is. Stop tokens are not
trimmed, as no engine trims them.
"""

import copy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from rollmatch.rollout import vllm_colocate
from rollmatch.rollout.vllm_colocate import EngineSettings, VllmColocateBackend


class RememberingEngine:
    """What ``VllmColocateBackend`` asks of vLLM's ``LLM``."""

    def __init__(self, model: torch.nn.Module, template: Any) -> None:
        self.model = copy.deepcopy(model).eval()
        self.template = template
        self.llm_engine = self
        self.runs: list[int] = []
        """Number of prompts of each call."""
        self._by_prompt: dict[Any, torch.nn.Module] = {}
        self._by_image: dict[bytes, torch.nn.Module] = {}

    def apply_model(self, function: Any) -> list[Any]:
        self.model = copy.deepcopy(self.model)
        return [function(self)]

    def modules(self) -> Any:
        return self.model.modules()

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def reset_prefix_cache(self) -> None:
        self._by_prompt.clear()

    def reset_encoder_cache(self) -> None:
        self._by_image.clear()

    def generate(
        self, prompts: list[Any], sampling: list[Any], *, use_tqdm: bool, lora_request: object = None
    ) -> list[Any]:
        self.runs.append(len(prompts))
        return [self._answer(*pair) for pair in zip(prompts, sampling, strict=True)]

    def _answer(self, prompt: Any, sampling: Any) -> Any:
        images = prompt.get("multi_modal_data", {}).get("image", [])
        features = self.template.images.process(images)
        expanded = self.template.expand(prompt["prompt_token_ids"], features)
        picture = b"".join(image.tobytes() for image in images)
        model = self._by_prompt.get((expanded, picture)) or self._by_image.get(picture) or self.model
        self._by_prompt[expanded, picture] = self._by_image[picture] = model
        ids = torch.tensor([expanded])
        with torch.no_grad():
            output = (
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    mm_token_type_ids=(ids == self.template.image_id).long(),
                    **features.tensors,
                    generation_config=GenerationConfig(
                        max_new_tokens=sampling.max_tokens,
                        do_sample=sampling.temperature > 0,
                        suppress_tokens=list(sampling.logit_bias),
                        eos_token_id=sampling.stop_token_ids,
                        pad_token_id=self.template.pad_id,
                        return_dict_in_generate=True,
                    ),
                )
                .sequences[0, len(expanded) :]
                .tolist()
            )
        reason = "stop" if output[-1] in sampling.stop_token_ids else "length"
        answer = SimpleNamespace(token_ids=output, finish_reason=reason, logprobs=None)
        return SimpleNamespace(prompt_token_ids=list(expanded), outputs=[answer])


def install(model: Any, template: Any, monkeypatch: Any) -> None:
    """From now on, whoever opens a colocated engine gets such a one."""
    stub, layers = ModuleType("vllm"), ModuleType("vllm.lora.layers")
    stub.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    layers.BaseLayerWithLoRA = type("BaseLayerWithLoRA", (), {})  # type: ignore[attr-defined]
    for module in (stub, ModuleType("vllm.lora"), layers):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def open_engine(settings: EngineSettings, ranks: Any) -> RememberingEngine:
        engine = RememberingEngine(model, template)
        engine.arguments = settings.engine_arguments  # type: ignore[attr-defined]
        return engine

    monkeypatch.setattr(vllm_colocate, "_open_engine", open_engine)


def make_remembering_backend(model: Any, template: Any, ranks: Any, monkeypatch: Any) -> VllmColocateBackend:
    """The backend as it is, in front of such an engine."""
    install(model, template, monkeypatch)
    settings = EngineSettings(model="digits", dtype="float32", max_model_len=768)
    return VllmColocateBackend(settings, template, ranks)
