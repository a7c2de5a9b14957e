"""Every answer format, one of a user's own included, and the vocabularies that spell it."""

from hypothesis import strategies as st

from conformance.doubles.records import make_rollout
from conformance.doubles.tokenizer import make_fusing_vocabulary, make_vocabulary
from rollmatch.objectives.rollout_matching.answer_format import (
    COORD_TOKENS,
    INTEGERS,
    QWEN2_5_VL,
    QWEN3_VL,
    AnswerFormat,
)

VOCABULARY, FUSING = make_vocabulary(), make_fusing_vocabulary()
PIXELS = QWEN2_5_VL.fitted(1288, 1024)


class Wordy(AnswerFormat):
    """A format of the user's own: another opening, other words."""

    def __init__(self):
        super().__init__(opening="Seen: [", opening_marks=("Seen:", "["), closing="].", closing_marks=("]", "."))
        object.__setattr__(self, "desc_key", "what")


FORMATS = [COORD_TOKENS, INTEGERS, QWEN3_VL, PIXELS, Wordy()]
vocabularies = st.sampled_from([VOCABULARY, FUSING])


def rollout_of(response):
    return make_rollout(tuple(response), prompt_token_ids=(1, 2))
