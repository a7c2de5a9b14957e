"""What a section of distillation must hold, and teachers that cannot teach."""

import json

import pytest

from conformance.doubles.configs import config_with, refusal_of
from conformance.doubles.digits import ROOT
from conformance.doubles.distilled import MODEL, checked, samples

DISTILL, GRPO = "custom.extra.distill.", "custom.extra.grpo."
VARIANT = ("custom.trainer_variant=distill", "~.decoding.temperature=1")
RIGHT = (*VARIANT, f"{DISTILL}teachers=[{{model: a}}]")
DIVERGENCE = (*RIGHT, f"{DISTILL}loss=divergence", f"{DISTILL}beta=1", f"{DISTILL}top_k=8")
REWARDED = (*RIGHT, f"{GRPO}rewards=[{{function: builtins:len}}]")


def teachers(entries):
    return (*VARIANT, f"{DISTILL}teachers=[{entries}]")


@pytest.mark.scenario(
    clauses=["distillation/a-teacher-that-cannot-teach-is-refused-before-a-model-is-loaded#1,3,4,5,9"]
)
@pytest.mark.parametrize(
    ("bad", "code", "key", "good"),
    [
        (VARIANT, "teachers-missing", "teachers", RIGHT),
        (("~.decoding.temperature=1", RIGHT[-1]), "teachers-not-asked", "teachers", RIGHT),
        (teachers("{weight: 2}"), "teacher-ambiguous", "teachers.0", teachers("{model: a, weight: 2}")),
        (teachers("{model: a, self: true, prompt: b}"), "teacher-ambiguous", "teachers.0", RIGHT),
        (
            teachers("{self: true}"),
            "teacher-is-the-policy",
            "teachers.0.prompt",
            teachers('{self: true, prompt: "{question} {answer}"}'),
        ),
        (
            teachers("{model: a}, {model: b}"),
            "teacher-never-asked",
            "teachers.0.when",
            teachers("{model: a, when: {task: c}}, {model: b}"),
        ),
        (DIVERGENCE[:-1], "divergence-unset", "top_k", DIVERGENCE),
        ((*DIVERGENCE[:-2], DIVERGENCE[-1]), "divergence-unset", "beta", DIVERGENCE),
        ((*RIGHT, f"{DISTILL}beta=1"), "divergence-unused", "beta", RIGHT),
        ((*RIGHT, f"{DISTILL}top_k=8"), "divergence-unused", "top_k", RIGHT),
        ((*DIVERGENCE, f"{DISTILL}beta=1.1"), "out-of-range", "beta", (*DIVERGENCE, f"{DISTILL}beta=0")),
        (teachers("{model: a, weight: 0}"), "out-of-range", "teachers.0.weight", teachers("{model: a, weight: 0.1}")),
    ],
)
def test_a_wrong_section_is_refused_and_a_right_one_taken(bad, code, key, good):
    assert refusal_of(*bad) == (code, DISTILL + key)
    assert config_with(*good).custom.trainer_variant == "distill"


@pytest.mark.scenario(
    clauses=[
        "distillation/a-teacher-that-cannot-teach-is-refused-before-a-model-is-loaded#10",
        "grpo-server-mode/the-options-of-the-policy-gradient-are-checked#1,11",
    ]
)
@pytest.mark.parametrize(
    ("bad", "code", "key", "good"),
    [
        ((*DIVERGENCE, f"{GRPO}epsilon=0.1"), "policy-gradient-unused", "epsilon", (*RIGHT, f"{GRPO}epsilon=0.1")),
        (
            (*DIVERGENCE, f"{GRPO}old_logprobs=server"),
            "policy-gradient-unused",
            "old_logprobs",
            (*DIVERGENCE, REWARDED[-1], f"{GRPO}old_logprobs=server"),
        ),
        ((*REWARDED, f"{GRPO}num_generations=1"), "group-too-small", "num_generations", REWARDED),
        (
            (*REWARDED, f"{GRPO}num_generations=1"),
            "group-too-small",
            "num_generations",
            (*RIGHT, f"{GRPO}num_generations=1"),
        ),
        (
            (*REWARDED, f"{GRPO}num_generations=1"),
            "group-too-small",
            "num_generations",
            (*RIGHT, f"{GRPO}rewards=[{{function: builtins:len, weight: 0}}]", f"{GRPO}num_generations=1"),
        ),
        ((*RIGHT, f"{GRPO}importance=sequence"), "importance-undefined", "importance", RIGHT),
    ],
)
def test_options_of_the_policy_gradient_are_refused_where_there_is_none(bad, code, key, good):
    assert refusal_of(*bad) == (code, GRPO + key)
    assert config_with(*good).custom.trainer_variant == "distill"


def named(entries):
    return f"{DISTILL}teachers=[{entries}]"


@pytest.mark.scenario(
    "distillation/another-tokenizer",
    clauses=["distillation/a-teacher-that-cannot-teach-is-refused-before-a-model-is-loaded#2"],
)
def test_a_teacher_with_another_vocabulary_is_refused_with_sizes_and_the_first_id_that_differs():
    digits = ROOT / "fixtures/models/digits"
    sizes, vocabularies = [], []
    for directory in (digits, MODEL):
        described = json.loads((directory / "tokenizer.json").read_text())
        added = {entry["content"]: entry["id"] for entry in described["added_tokens"]}
        vocabularies.append(described["model"]["vocab"] | added)
        sizes.append(len(vocabularies[-1]))
    theirs, ours = ({token_id: token for token, token_id in one.items()} for one in vocabularies)
    first = next(token_id for token_id in range(9999) if theirs.get(token_id) != ours.get(token_id))
    (error,) = checked(named(f"{{model: {digits}}}"))
    assert (error.code, error.key) == ("teacher-vocabulary", f"{DISTILL}teachers.0.model")
    assert f"{sizes[0]} tokens" in error.problem
    assert str(sizes[1]) in error.problem
    assert error.problem.endswith(f"at id {first}")
    assert checked(named(f"{{model: {MODEL}}}")) == []


@pytest.mark.scenario(clauses=["distillation/a-teacher-that-cannot-teach-is-refused-before-a-model-is-loaded#6,7,8"])
@pytest.mark.parametrize(
    ("bad", "code", "good"),
    [
        (
            f'{{model: {MODEL}, prompt: "{{sum.real}}"}}',
            "teacher-prompt-malformed",
            f'{{model: {MODEL}, prompt: "{{sum}}"}}',
        ),
        (f'{{model: {MODEL}, prompt: "a {{"}}', "teacher-prompt-malformed", f'{{model: {MODEL}, prompt: "a {{{{"}}'),
        (f"{{model: {MODEL}, prompt: {'long ' * 260}}}", "teacher-too-short", f"{{model: {MODEL}, prompt: long}}"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_refused(bad, code, good):
    (error,) = checked(named(bad))
    assert error.code == code
    assert error.key.startswith(f"{DISTILL}teachers.0")
    assert error.remedy
    assert checked(named(good)) == []


@pytest.mark.scenario(clauses=["distillation/a-teacher-that-cannot-teach-is-refused-before-a-model-is-loaded#7"])
@pytest.mark.parametrize(
    ("bad", "code", "good"),
    [
        (f"{{model: {MODEL}, when: {{sum: 146}}}}", "teacher-missing", f"{{model: {MODEL}}}"),
        (f'{{model: {MODEL}, prompt: "{{total}}"}}', "teacher-prompt-field", f'{{model: {MODEL}, prompt: "{{sum}}"}}'),
    ],
)
def test_samples_that_no_teacher_can_teach_are_named(bad, code, good):
    problems = checked(named(bad))
    unlike = [sample for sample in samples() if sample.metadata["sum"] != 146 or code == "teacher-prompt-field"]
    assert {error.code for error in problems} == {code}
    assert unlike[0].origin in {error.key for error in problems}
    assert checked(named(good)) == []


def test_a_top_k_beyond_the_vocabulary_is_refused():
    many = (named(f"{{model: {MODEL}}}"), f"{DISTILL}loss=divergence", f"{DISTILL}beta=0")
    (error,) = checked(*many, f"{DISTILL}top_k=300")
    assert (error.code, error.key) == ("top-k-too-large", f"{DISTILL}top_k")
    assert checked(*many, f"{DISTILL}top_k=100") == []
