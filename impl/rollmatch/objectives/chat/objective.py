"""SFT on chats: labels are the assistant's turns, each with its stop token; everything else is context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rollmatch.model.template import AnsweredChat
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.answers import NUM_SHOWN, describe_answers
from rollmatch.objectives.protocol import Evaluated, ObjectiveContext, TrainingTargets
from rollmatch.objectives.rollout_matching.objective import LabelledTokens, validation_loss
from rollmatch.objectives.rollout_matching.supervision import IGNORED
from rollmatch.records import Rollout, Sample, Segment


@dataclass(frozen=True, kw_only=True)
class ChatObjective(LabelledTokens):
    """``trainer_variant: sft`` with ``answer_format: text``."""

    chat_of: Callable[[Sample], AnsweredChat]
    is_cut: Callable[[Sample], bool]
    """Whether a sample's prompt lost its beginning."""
    vocabulary: Vocabulary
    term_names: ClassVar[tuple[str, ...]] = ("loss_ce",)

    def make_segments(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext
    ) -> TrainingTargets:
        """One segment per sample. Errors: those of ``Template.answered_chat``."""
        return TrainingTargets(segments=tuple((segment,) for segment in self._segments(samples, rollouts)))

    def summarize(self, reports: Sequence[object]) -> dict[str, float]:
        """Nothing: there are no rollouts."""
        return {}

    def evaluate(self, samples: Sequence[Sample], rollouts: Sequence[Rollout], context: ObjectiveContext) -> Evaluated:
        """``loss`` of the true answers, and how many generated ones equal them, ``exact``."""
        loss, parts = validation_loss(self._segments(samples, rollouts), context)
        truths = [self._truth_of(sample) for sample in samples]
        answers = [self.vocabulary.text(rollout.response_token_ids) for rollout in rollouts]
        exact = [float(answer.strip() == truth) for answer, truth in zip(answers, truths, strict=True)]
        cut = [float(rollout.stop_id is None) for rollout in rollouts]
        count = len(samples)
        metrics = {"loss": loss, "exact": sum(exact) / count, "truncated_rate": sum(cut) / count}
        record = describe_answers(samples, answers[:NUM_SHOWN], {"exact": exact}, expected=truths)
        named = {"loss": parts, "exact": [(one, 1.0) for one in exact], "truncated_rate": [(one, 1.0) for one in cut]}
        return Evaluated(metrics=metrics | {"num_scenes": float(count)}, record=record, parts=named)

    def _truth_of(self, sample: Sample) -> str:
        chat = self.chat_of(sample)
        first, end = chat.turns[-1]
        return self.vocabulary.text(chat.token_ids[first:end]).strip()

    def _segments(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> list[Segment]:
        return [self._segment(*each) for each in zip(samples, rollouts, strict=True)]

    def _segment(self, sample: Sample, rollout: Rollout) -> Segment:
        """The chat; behind a prompt that was cut, its last turn alone."""
        chat = self.chat_of(sample)
        token_ids, turns, (last, _) = chat.token_ids, chat.turns, chat.turns[-1]
        if self.is_cut(sample):
            token_ids = (*rollout.prompt_token_ids, *token_ids[last:])
            turns = ((len(rollout.prompt_token_ids), len(token_ids)),)
        taught = {position for start, end in turns for position in range(start, end)}
        between = tuple(position for position in range(turns[0][0], len(token_ids)) if position not in taught)
        return Segment(
            sample=sample,
            policy_version=rollout.policy_version,
            token_ids=token_ids,
            prompt_len=turns[0][0],
            prefix_len=0,
            corrected_positions=between,
            corrected_labels=(IGNORED,) * len(between),
        )
