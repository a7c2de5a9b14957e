"""What is tried for each cell of the table of models: a method per column, which raises where the cell is not yes."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.architectures import ARCHITECTURES
from conformance.doubles.checkpoints import make_checkpoint
from conformance.doubles.frozen_parts import check_a_frozen_part, check_freezing_nothing, load
from conformance.doubles.records import make_request
from conformance.doubles.tokenizer_checks import check_joint, check_text, check_tools
from conformance.tools.real_models import REAL_MODELS, make_real_model
from conformance.tools.tokenizers import fetch_tokenizer
from rollmatch.errors import RollmatchError
from rollmatch.learn.attention import check_packable, use_packed_attention
from rollmatch.learn.batch import make_model_inputs, make_padded_inputs
from rollmatch.model.checkpoint import merged_weights
from rollmatch.model.parts import Part, parts_of
from rollmatch.model.template import Template
from rollmatch.ranks import Ranks
from rollmatch.records import Rollout, Row, Sample, Segment
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend
from rollmatch.weights.named_weights import named_weights

GREEDY = Decoding(max_new_tokens=6, logprobs=True)
MORE_WORDS = {"gemma3": tuple("\n" * count for count in (1, 2, 3, 4))}
"""Added tokens that vLLM's processor asks for, as published tokenizers have them."""
ASKED = Sample(sample_id=0, origin="x:1", images=(), messages=(("user", "?"),))


def outcome_of(trial):
    """yes, the code of a refusal, or failed with the reason."""
    try:
        trial()
    except RollmatchError as error:
        return f"refused: {error.code}"
    except Exception as error:  # noqa: BLE001 - a failed cell says so, and the others are still tried
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return "yes"


def try_columns(name: str, columns: Sequence[str]) -> None:
    """Print column -> outcome as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(name, Path(folder))
        print(json.dumps({column: outcome_of(getattr(trials, column)) for column in columns}))  # noqa: T201


class Trials:
    """One method per column; each raises where its cell is not yes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.is_real = name in REAL_MODELS
        self.attention = REAL_MODELS[name].attention if self.is_real else None
        architecture = REAL_MODELS[name].architecture if self.is_real else name
        self.has_images = bool(ARCHITECTURES[architecture].processor)

    @cached_property
    def directory(self) -> Path:
        """The model's, with weights."""
        directory = self.folder / "model"
        if self.is_real:
            return make_real_model(self.name, directory)
        make_checkpoint(self.name, directory, words=MORE_WORDS.get(self.name, ()))
        return directory

    def load(self, **tuner: Any) -> Any:
        """A policy as configured, in evaluation mode."""
        return load(str(self.directory), attention=self.attention or "sdpa", **tuner).eval()

    @cached_property
    def template(self) -> Template:
        return Template(self.directory, system="Look.", user="What is it?", any_chat=True)

    @cached_property
    def chat(self) -> Template:
        """The template of the tokenizer alone."""
        return Template(fetch_tokenizer(REAL_MODELS[self.name].tokenizer), system="", user="", any_chat=True)

    @cached_property
    def samples(self) -> list[Sample]:
        """Two; with an image each where the model takes them."""
        made = []
        for index, size in enumerate(((90, 50), (64, 64))):
            path = self.folder / f"{index}.png"
            Image.effect_noise(size, 40).convert("RGB").save(path)
            images = (str(path),) if self.has_images else ()
            made.append(Sample(sample_id=index, origin=f"x:{index + 1}", images=images, width=size[0], height=size[1]))
        return made

    @cached_property
    def engine(self) -> Any:
        """vLLM in this process."""
        from conformance.doubles.colocated_engine import open_engine

        limits = {"image": 1} if self.has_images else {}
        return open_engine(Ranks(), model=self.directory, template=self.template, limit_mm_per_prompt=limits)

    @cached_property
    def rollouts(self) -> tuple[list[Rollout], list[Rollout]]:
        """Of transformers and of vLLM, by weights that are not those of the files."""
        self._check_start()
        model = self.load()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
        requests = [
            make_request(index, sample=sample, prompt_token_ids=self.template.prompt_token_ids(sample))
            for index, sample in enumerate(self.samples)
        ]
        self.engine.push(named_weights(model), version=1)
        theirs = self.engine.generate(requests, GREEDY)
        ours = HfBackend(model, self.template, batch_size=1).generate(requests, GREEDY)
        self.from_files = HfBackend(self.load(), self.template, batch_size=1).generate(requests, GREEDY)
        return ours, theirs

    def loads(self) -> None:
        sent, held = dict(merged_weights(self.load())), load_file(self.directory / "model.safetensors")
        assert {k: w.shape for k, w in sent.items()} == {k: w.shape for k, w in held.items()}
        assert all(torch.equal(weight, held[name].to(weight.dtype)) for name, weight in sent.items())
        assert self.template.prompt_token_ids(ASKED)
        self._check_start()

    def prompt(self) -> None:
        ours, theirs = self.rollouts
        assert [r.prompt_token_ids for r in ours] == [r.prompt_token_ids for r in theirs]

    def greedy(self) -> None:
        ours, theirs = self.rollouts
        assert [r.response_token_ids for r in ours] == [r.response_token_ids for r in theirs], "other tokens"
        far = max(
            abs(one - other)
            for a, b in zip(ours, theirs, strict=True)
            for one, other in zip(a.response_logprobs or (9.0,), b.response_logprobs or (0.0,), strict=True)
        )
        assert far < 1e-3, f"log-probabilities differ by {far}"

    def full(self) -> None:
        self.greedy()
        _, theirs = self.rollouts
        assert [r.response_logprobs for r in theirs] != [r.response_logprobs for r in self.from_files]

    def adapter(self) -> None:
        from rollmatch.weights.worker.merging import merge_named

        found = named_weights(perturb_adapters(self.load(train_type="lora"))).adapter()
        base, tensors = load_file(self.directory / "model.safetensors"), dict(found.tensors)
        for merge, ours in zip(found.merges, found.merged, strict=True):
            assert torch.equal(merge_named(merge, base[merge.name].to(ours.dtype), tensors), ours)

    def freeze(self) -> None:
        check = check_a_frozen_part if self.has_images else check_freezing_nothing
        for part in Part if self.has_images else (Part.VISION, Part.PROJECTOR):
            check(str(self.directory), part, attention=self.attention or "sdpa")

    @torch.no_grad()
    def packed(self) -> None:
        model = self.load()
        segments = [self._segment(sample) for sample in (*self.samples, replace(self.samples[0], images=()))]
        images = [self.template.image_features(segment.sample) for segment in segments]
        check_packable(model)
        use_packed_attention(model)
        row = Row(segments=tuple(segments), capacity=4096)
        packed = model(**make_model_inputs(row, images=images, model=model)).logits[0]
        padded = model(**make_padded_inputs(segments, images=images, model=model, pad_id=self.template.pad_id)).logits
        for place, (start, segment) in enumerate(zip(row.offsets, segments, strict=True)):
            ours, theirs = packed[start : start + segment.encoded_len], padded[place, : segment.encoded_len]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)

    def grpo(self) -> None:
        rewards = "custom.extra.grpo.rewards=[{function: conformance.doubles.rewards:spelling}]"
        self._step(
            "custom.trainer_variant=grpo",
            "custom.extra.grpo.num_generations=2",
            "custom.extra.rollout_matching.decoding.temperature=1",
            rewards,
        )

    def matching(self) -> None:
        self._step()

    def stop(self) -> None:
        """Weights that write one word and an end of turn; each end in its turn."""
        vocabulary, prompt = self.template.vocabulary, self.template.prompt_token_ids(ASKED)
        word = next(token_id for token_id in vocabulary.encode_bytes(b"a ok") if token_id != prompt[-1])
        request = make_request(0, sample=ASKED, prompt_token_ids=prompt)
        for place, end in enumerate(sorted(vocabulary.stop_ids)):
            model = speak(self.load(), (prompt[-1], word, end))
            self.engine.push(named_weights(model), version=place + 2)
            for backend in (HfBackend(model, self.template, batch_size=1), self.engine):
                (rollout,) = backend.generate([request], GREEDY)
                assert rollout.response_token_ids == (word,), f"{rollout.response_token_ids} before {end}"
                assert (rollout.stop_id, rollout.finish_reason) == (end, "stop")
                assert all(abs(each) < 0.01 for each in rollout.response_logprobs or (9.0,))

    def text(self) -> None:
        check_text(self.chat.vocabulary, self.chat.tokenizer)

    def joint(self) -> None:
        for form in ("integers", "qwen3_vl"):
            check_joint(self.chat.vocabulary, form)

    def tools(self) -> None:
        check_tools(self.chat)

    def _segment(self, sample: Sample) -> Segment:
        prompt = self.template.expand(self.template.prompt_token_ids(sample), self.template.image_features(sample))
        ids = (*prompt, *self.template.vocabulary.encode("ab"), self.template.vocabulary.stop_id)
        return Segment(sample=sample, policy_version=1, token_ids=ids, prompt_len=len(prompt), prefix_len=0)

    def _check_start(self) -> None:
        """What a run checks before it starts."""
        if self.has_images:
            self.template.check_expansion(self.samples[0])

    def _step(self, *overrides: str) -> None:
        """One optimizer step, after which every part has weights that changed."""
        self._check_start()
        from conformance.doubles.digits import scenes, unseen
        from conformance.doubles.small_run import make_trainer

        samples = scenes("train")[:2] if self.has_images else unseen(scenes("train")[:2])
        size = ("training.per_device_train_batch_size=2", "global_max_length=1500", "training.packing=false")
        matching = "custom.extra.rollout_matching"
        brief = (f"{matching}.max_new_tokens=16", "training.learning_rate=0.1")
        if self.is_real:
            brief += (f"{matching}.answer_format=integers", f"{matching}.target_sigma=2")
        model = [f"model.model={self.directory}"]
        model += [f"model.attn_impl={self.attention}"] if self.attention else []
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        trainer = make_trainer(folder, *model, *size, *brief, *overrides, samples=samples, eval_samples=samples[:1])
        before = {key: weight.detach().clone() for key, weight in trainer.model.named_parameters()}
        trainer.train()
        parts = dict(parts_of(trainer.model))
        after = dict(trainer.model.named_parameters())
        assert all(weight.isfinite().all() for weight in after.values()), "not finite"
        changed = {parts[key] for key, weight in before.items() if not torch.equal(weight, after[key])}
        assert changed == set(parts.values()), f"only {changed} changed"


@torch.no_grad()
def speak(model: Any, chain: Sequence[int]) -> Any:
    """Behind each of three tokens comes the next one, whatever the architecture: its layers add nothing.

    A head that is tied to the embedding may not prefer the third token at once, which the second direction is for.
    """
    first, second = torch.eye(model.get_input_embeddings().weight.shape[1])[:2]
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        table.zero_()
        for token_id, row in zip(chain, (first, 3 * first + second, 20 * second), strict=True):
            table[token_id] = row
    return model
