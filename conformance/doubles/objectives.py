"""Configurations and as much of a template as objectives are made from."""

from conformance.doubles.tokenizer import make_vocabulary

SECTION = "custom.extra.grpo."
GRPO = (
    "custom.trainer_variant=grpo",
    f"{SECTION}rewards=[{{function: conformance.doubles.objectives:score_of}}]",
    "~.decoding.temperature=1",
)
VOCABULARY = make_vocabulary()


def score_of(answer, sample):
    """The reward that a test has written into the answer itself."""
    return float(answer)


class OfVocabulary:
    """As much of a template as an objective is made from."""

    vocabulary = VOCABULARY
    banned_ids = ()


VINEPPO = ("custom.trainer_variant=vineppo", *GRPO[1:])


class AsTemplate(OfVocabulary):
    prompt_token_ids = image_size = None
