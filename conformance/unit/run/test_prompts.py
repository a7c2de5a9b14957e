"""Prompts are counted before a model is loaded: which are compared with the processor's, left out or refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from conformance.doubles.digits import load_digits
from conformance.doubles.refusals import refused
from rollmatch.config import effective
from rollmatch.data import BadSamples
from rollmatch.model.template import PromptUncuttable
from rollmatch.records import Sample
from rollmatch.run.assemble import make_template
from rollmatch.run.prompts import fit_prompts

LIMIT = effective.max_prompt_len(load_digits())


class CountedTemplate:
    """Prompts have the length that is their sample's id; no prompt can be cut."""

    options = SimpleNamespace(max_prompt_len=None)

    def __init__(self):
        self.compared = []

    def prompt_length(self, sample):
        return sample.sample_id

    def check_expansion(self, sample):
        self.compared.append(sample.sample_id)


class CuttingTemplate(CountedTemplate):
    """Prompts of an even length can be cut."""

    options = SimpleNamespace(max_prompt_len=LIMIT)

    def prompt_token_ids(self, sample):
        if sample.sample_id % 2:
            raise PromptUncuttable("no text to cut")


def samples_of(*lengths, images=("a.png",)):
    return [Sample(sample_id=length, origin=f"x.jsonl:{length}", images=images) for length in lengths]


def test_prompts_that_can_be_cut_count_as_long_as_the_limit():
    odd = LIMIT + 2 - LIMIT % 2 - 1
    samples = samples_of(3, odd, odd + 1, odd + 3)
    fit = fit_prompts(load_digits("overlong=truncate_left"), CuttingTemplate(), samples)
    assert fit.lengths == (3, *(min(length, LIMIT) for length in (odd, odd + 1, odd + 3) if length % 2 == 0))
    assert (fit.num_skipped, fit.num_cut, fit.longest) == (1, 2, odd + 3)


def test_the_first_of_the_longest_is_named():
    first, second = samples_of(9, 9)
    second = replace(second, origin="x.jsonl:second")
    assert fit_prompts(load_digits(), CountedTemplate(), [*samples_of(3), first, second]).origin == first.origin


def test_the_first_and_the_longest_prompt_with_images_are_compared_with_the_processor_s():
    template = CountedTemplate()
    fit = fit_prompts(load_digits(), template, [*samples_of(30, images=()), *samples_of(7, 5, 9, 8)])
    assert template.compared == [7, 9]
    assert (fit.longest, fit.origin, fit.lengths) == (30, "x.jsonl:30", (30, 7, 5, 9, 8))
    assert fit.figures() == {"longest": 30, "limit": LIMIT, "num_skipped": 0, "num_truncated": 0}
    fit_prompts(load_digits(), template := CountedTemplate(), samples_of(4))
    assert template.compared == [4]
    fit_prompts(load_digits(), template := CountedTemplate(), samples_of(4, images=()))
    assert template.compared == []


def test_the_longest_prompt_fits_and_a_token_more_is_skipped_or_refused():
    samples = samples_of(LIMIT + 1, LIMIT, 3, LIMIT + 2)
    fit = fit_prompts(load_digits("overlong=skip"), CountedTemplate(), samples)
    assert [sample.sample_id for sample in fit.samples] == [LIMIT, 3]
    assert (fit.longest, fit.origin, fit.num_skipped, fit.num_cut) == (LIMIT + 2, f"x.jsonl:{LIMIT + 2}", 2, 0)
    with refused("prompt-too-long", problem=f"2 of 4 prompts have more than {LIMIT} tokens", remedy="Raise it by 2,"):
        fit_prompts(load_digits("overlong=error"), CountedTemplate(), samples)
    with refused("prompt-too-long", problem="all 1 prompts have more"):
        fit_prompts(load_digits("overlong=skip"), CountedTemplate(), samples[:1])


def test_all_samples_whose_prompts_cannot_be_made_are_named(tmp_path):
    config = load_digits()
    Image.new("RGB", (2048, 9)).save(tmp_path / "flat.png")
    flat = [
        Sample(sample_id=place, origin=f"x.jsonl:{place}", images=(str(tmp_path / "flat.png"),)) for place in (2, 5)
    ]
    with pytest.raises(BadSamples) as caught:
        fit_prompts(config, make_template(config), [*samples_of(7, images=()), *flat])
    assert [(error.code, error.key) for error in caught.value.errors] == [
        ("image-not-processed", "x.jsonl:2"),
        ("image-not-processed", "x.jsonl:5"),
    ]
