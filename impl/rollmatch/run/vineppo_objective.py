"""VinePPO's objective from the configuration."""

from functools import lru_cache

from rollmatch.config import RunConfig
from rollmatch.config.custom import VinePpoConfig
from rollmatch.data import Reuse
from rollmatch.model.template import Template
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.grpo.loss import PolicyRules
from rollmatch.objectives.policy_gradient import LogprobRules
from rollmatch.objectives.vineppo.objective import VinePpoObjective
from rollmatch.objectives.vineppo.search import SearchBudget, TreeValues
from rollmatch.objectives.vineppo.single_turn import RewardRules
from rollmatch.objectives.vineppo.split import AtMost, FixedTokens, Lines, LowProbability, Sentences, Splitter, Turns
from rollmatch.objectives.vineppo.tree import SearchRules
from rollmatch.objectives.vineppo.value import ContinuationValues, Valuer, ValueRules
from rollmatch.rollout.episodes import EpisodeRunner
from rollmatch.run.plugins import first_reply, limits_of, load_configured_environment, load_rewards

MOST_KEPT = 4096
"""Observations whose ids are kept: those of a small world come again and again."""


def make_vineppo(  # noqa: PLR0913  # what objectives on rewards share is made by the caller
    config: RunConfig,
    template: Template,
    *,
    reuse: Reuse,
    policy_rules: PolicyRules,
    logprob_rules: LogprobRules,
    world: EpisodeRunner | None,
) -> VinePpoObjective:
    """``trainer_variant`` vineppo or vineppo_mcts. Errors: ``RewardUnknown``."""
    rules = config.custom.extra.vineppo
    splitter = make_splitter(rules, template.vocabulary)
    return VinePpoObjective(
        reuse=reuse,
        policy_rules=policy_rules,
        logprob_rules=logprob_rules,
        vocabulary=template.vocabulary,
        rewards=RewardRules(
            rewards=load_rewards(config), vocabulary=template.vocabulary, unfinished_return=rules.unfinished_return
        ),
        splitter=splitter,
        valuer=_make_valuer(config, splitter),
        normalization=rules.normalization,
        run_seed=config.training.seed,
        prompt_of=template.prompt_token_ids,
        world=world,
        reads_logprobs=rules.steps == "low_probability" or rules.search.select == "puct",
    )


def make_world(config: RunConfig, template: Template) -> EpisodeRunner | None:
    """What ``custom.extra.environment`` names. Errors: ``EnvironmentUnknown``, ``turns-not-rendered``."""
    make, settings = load_configured_environment(config), config.custom.extra.environment
    if make is None:
        return None
    as_chat = settings.observations == "chat"
    if as_chat:
        template.reply_token_ids(first_reply(config), is_stopped=True)
    return EpisodeRunner(
        make=make,
        vocabulary=template.vocabulary,
        reply=lru_cache(MOST_KEPT)(template.reply_token_ids if as_chat else template.text_token_ids),
        max_turns=settings.max_turns,
        max_response_tokens=settings.max_response_tokens,
        run_seed=config.training.seed,
        limits=limits_of(settings),
        failed_share=settings.failed_share,
    )


def make_splitter(rules: VinePpoConfig, vocabulary: Vocabulary) -> Splitter:
    """What ``vineppo.steps`` names."""
    splitters: dict[str, Splitter] = {
        "lines": Lines(vocabulary=vocabulary, answer_mark=rules.answer_mark),
        "sentences": Sentences(vocabulary=vocabulary),
        "tokens": FixedTokens(num_tokens=rules.step_tokens),
        "low_probability": LowProbability(threshold=rules.step_probability, every=rules.step_every),
        "turns": Turns(),
    }
    splitter = splitters[rules.steps]
    return splitter if rules.max_steps is None else AtMost(splitter=splitter, num_steps=rules.max_steps)


def _make_valuer(config: RunConfig, splitter: Splitter) -> Valuer:
    rules = config.custom.extra.vineppo
    if config.custom.trainer_variant == "vineppo":
        return ContinuationValues(
            ValueRules(
                num_continuations=rules.num_continuations,
                siblings=rules.siblings,
                first_continuations=rules.first_continuations,
            )
        )
    search = rules.search
    return TreeValues(
        SearchRules(select=search.select, exploration=search.exploration, widening=search.widening),
        SearchBudget(num_rounds=search.num_rounds, num_per_round=search.num_per_round, num_least=search.num_least),
        splitter,
    )
