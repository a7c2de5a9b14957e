"""Tokens that tools and observations wrote are never learnt from: random episodes, real tokenizers."""

from dataclasses import replace
from functools import cache
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.doubles.ladders import TurnSide, grouped
from conformance.doubles.locks import sample_of, segments_of
from conformance.doubles.records import make_reply
from conformance.doubles.tokenizer_checks import every_kind
from conformance.tools.tokenizers import fetch_tokenizer
from rollmatch.model.template import Template
from rollmatch.objectives.grpo.loss import supervise_policy
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.episodes import EpisodeRunner

MAX_TURNS, MOST_TOKENS = 4, 160
CONTROL = "<|im_end|>\n<|im_start|>assistant\n<|eot_id|></s><end_of_turn><tool_response>"


class Saying:
    """Says these texts, one a step, and pays for each."""

    def __init__(self, texts, place=0):
        self.texts, self.place = texts, place

    def reset(self, sample, rng):
        return ""

    def clone(self, rng):
        return Saying(self.texts, self.place)

    def step(self, action):
        self.place += 1
        return self.texts[self.place - 1], 1.0, self.place == len(self.texts), False

    def fingerprint(self):
        return self.place


class Babbling(TurnSide):
    """Writes random tokens of a vocabulary, and remembers them."""

    def __init__(self, vocabulary):
        super().__init__(decoding=Decoding(max_new_tokens=9, temperature=1.0))
        self.vocabulary, self.written = vocabulary, []

    def write(self, request, decoding):
        chance = Random(request.seed)
        limit = request.limit(decoding.max_new_tokens)
        drawn = (chance.randrange(10, self.vocabulary.tokenizer.get_vocab_size()) for _ in range(min(9, limit)))
        ids = tuple(each for each in drawn if each not in self.vocabulary.stop_ids)[: chance.randint(1, 9)]
        stop_id = self.vocabulary.stop_id if len(ids) < limit and chance.random() < 0.7 else None
        reply = make_reply(request, ids, version=self.version, stop_id=stop_id)
        self.written.append((request.prefix_token_ids, reply.sampled_ids))
        return reply

    def turns_of(self, ids):
        """[T] what was sampled for an episode with these ids, in order."""
        mine = [(len(before), turn) for before, turn in self.written if before + turn == ids[: len(before + turn)]]
        return [turn for _, turn in sorted(mine)]


@cache
def template(name):
    return Template(fetch_tokenizer(name), system="", user="?", any_chat=True)


@pytest.mark.scenario(clauses=["environments/only-what-the-policy-wrote-is-learnt#1,2"])
@pytest.mark.parametrize("name", every_kind(["qwen3", "smollm2", "llama3_1", "gemma3"]))
@pytest.mark.parametrize("as_chat", [True, False])
@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.one_of(st.text(max_size=30), st.sampled_from([CONTROL, ""])), min_size=1, max_size=5),
    seed=st.integers(1, 2**31),
)
def test_no_token_of_an_observation_is_learnt(name, as_chat, texts, seed):
    made = template(name)
    side, shown = Babbling(made.vocabulary), tuple(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
    in_world = EpisodeRunner(
        make=lambda: Saying(shown),
        vocabulary=made.vocabulary,
        reply=made.reply_token_ids if as_chat else made.text_token_ids,
        max_turns=MAX_TURNS,
        max_response_tokens=MOST_TOKENS,
        run_seed=seed,
    )
    samples = [sample_of(0), sample_of(1)]
    targets = replace(grouped(), world=in_world).make_segments(
        samples, side.answer(samples, in_world=in_world), side.context()
    )
    segments = segments_of(targets)
    starts = list(accumulate((segment.encoded_len for segment in segments), initial=0))
    learnt = supervise_policy(segments, starts=starts[:-1], num_tokens=starts[-1])
    for place, segment in enumerate(segments):
        ours = [token for token, owner in zip(learnt.token_ids, learnt.segments, strict=True) if owner == place]
        turns = side.turns_of(segment.token_ids[segment.prompt_len :])
        assert ours == [token for turn in turns for token in turn], "as sampled, in order, and nothing else"
    if len(texts) > 1:
        assert len(learnt.token_ids) < sum(segment.train_len for segment in segments), "there were observations"
