"""Prompts are counted before a model is loaded: which are compared with the processor's, left out or refused."""

from types import SimpleNamespace

from conformance.refusals import refused
from conformance.rollout.digits import load_digits
from rollmatch.cli.prompts import fit_prompts
from rollmatch.config import effective
from rollmatch.records import Sample

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


def samples_of(*lengths, images=("a.png",)):
    return [Sample(sample_id=length, origin=f"x.jsonl:{length}", images=images) for length in lengths]


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
