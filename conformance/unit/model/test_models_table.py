"""The table of architectures: it is whole, current and honest, and what is tried for each of its cells."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.architectures import ARCHITECTURES
from conformance.doubles.checkpoints import make_checkpoint
from conformance.doubles.frozen_parts import check_a_frozen_part, check_freezing_nothing, load
from conformance.doubles.records import make_request
from conformance.tools.models_table import COLUMNS, PACKAGES, PAGE, RESULTS, in_process, render
from rollmatch.errors import ConfigError, LearnError
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

AGAIN = "python -m conformance.tools.models_table"
GREEDY = Decoding(max_new_tokens=6, logprobs=True)
MORE_WORDS = {"gemma3": tuple("\n" * count for count in (1, 2, 3, 4))}
"""Added tokens that vLLM's processor asks for, as published tokenizers have them."""


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_its_rows_and_columns_are_known(results):
    assert results["rows"].keys() <= ARCHITECTURES.keys(), f"try again: {AGAIN}"
    assert all(row.keys() <= COLUMNS.keys() for row in results["rows"].values())
    assert all(known.model in PAGE.read_text() for known in ARCHITECTURES.values())


def test_it_was_tried_with_the_installed_packages(results):
    assert results["versions"] == {name: version(name) for name in PACKAGES}, f"try again: {AGAIN}"


def test_the_page_is_made_from_the_results(results):
    assert PAGE.read_text() == render(results)


@pytest.mark.engine
def test_experts_of_an_engine_take_the_weights_of_a_sync():
    assert in_process("qwen3_moe", ["full"]) == {"full": "yes"}


def outcome_of(trial):
    """yes, the code of a refusal before start, or failed with the reason."""
    try:
        trial()
    except (ConfigError, LearnError) as error:
        return f"refused: {error.code}"
    except Exception as error:  # noqa: BLE001 - a failed cell says so, and the others are still tried
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return "yes"


def test_a_trial_that_raises_anything_else_is_no_refusal():
    def refuse():
        raise ConfigError("no", code="not-so")

    def crash():
        raise AttributeError("merge_size")

    assert outcome_of(lambda: None) == "yes"
    assert outcome_of(refuse) == "refused: not-so"
    assert outcome_of(crash) == "failed: AttributeError: merge_size"


def try_columns(name: str, columns: Sequence[str]) -> None:
    """Print column -> outcome as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(name, Path(folder))
        print(json.dumps({column: outcome_of(getattr(trials, column)) for column in columns}))  # noqa: T201


class Trials:
    """One method per column; each raises where its cell is not yes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.has_images = bool(ARCHITECTURES[name].processor)
        self.directory = folder / "model"
        make_checkpoint(name, self.directory, words=MORE_WORDS.get(name, ()))

    def load(self, **tuner: Any) -> Any:
        """A policy as configured, in evaluation mode."""
        return load(str(self.directory), **tuner).eval()

    @cached_property
    def template(self) -> Template:
        return Template(self.directory, system="Look.", user="What is it?", any_chat=True)

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
    def rollouts(self) -> tuple[list[Rollout], list[Rollout]]:
        """Of transformers and of vLLM, by weights that are not those of the files."""
        from conformance.doubles.colocated_engine import open_engine

        self._check_start()
        model = self.load()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
        limits = {"image": 1} if self.has_images else {}
        engine = open_engine(Ranks(), model=self.directory, template=self.template, limit_mm_per_prompt=limits)
        requests = [
            make_request(index, sample=sample, prompt_token_ids=self.template.prompt_token_ids(sample))
            for index, sample in enumerate(self.samples)
        ]
        engine.push(named_weights(model), version=1)
        theirs = engine.generate(requests, GREEDY)
        ours = HfBackend(model, self.template, batch_size=1).generate(requests, GREEDY)
        self.from_files = HfBackend(self.load(), self.template, batch_size=1).generate(requests, GREEDY)
        return ours, theirs

    def loads(self) -> None:
        sent, held = dict(merged_weights(self.load())), load_file(self.directory / "model.safetensors")
        assert {k: w.shape for k, w in sent.items()} == {k: w.shape for k, w in held.items()}
        assert all(torch.equal(weight, held[name]) for name, weight in sent.items())
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
            assert torch.equal(merge_named(merge, base[merge.name], tensors), ours)

    def freeze(self) -> None:
        check = check_a_frozen_part if self.has_images else check_freezing_nothing
        for part in Part if self.has_images else (Part.VISION, Part.PROJECTOR):
            check(str(self.directory), part)

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
        rewards = "custom.extra.grpo.rewards=[{function: conformance.doubles.rewards:digit_sum}]"
        self._step(
            "custom.trainer_variant=grpo",
            "custom.extra.grpo.num_generations=2",
            "custom.extra.rollout_matching.decoding.temperature=1",
            rewards,
        )

    def matching(self) -> None:
        self._step()

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
        brief = ("custom.extra.rollout_matching.max_new_tokens=16", "training.learning_rate=0.1")
        model = f"model.model={self.directory}"
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        trainer = make_trainer(folder, model, *size, *brief, *overrides, samples=samples, eval_samples=samples[:1])
        before = {key: weight.detach().clone() for key, weight in trainer.model.named_parameters()}
        trainer.train()
        parts = dict(parts_of(trainer.model))
        after = dict(trainer.model.named_parameters())
        assert all(weight.isfinite().all() for weight in after.values()), "not finite"
        changed = {parts[key] for key, weight in before.items() if not torch.equal(weight, after[key])}
        assert changed == set(parts.values()), f"only {changed} changed"
