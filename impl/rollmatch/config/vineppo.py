"""The section ``custom.extra.vineppo``: steps, and the values of the states between them."""

from typing import Literal

from rollmatch.config.section import Count, Index, PositiveShare, Section, Weight


class SearchConfig(Section):
    """Search tree of trainer_variant: vineppo_mcts."""

    select: Literal["uct", "puct"] = "uct"
    """Exploration bonus of a node: from its visits (uct), or also from the policy's probability of its step (puct)."""
    exploration: Weight = 1.0
    """Weight of the exploration bonus. Unit: value per bonus."""
    widening: Weight = 1.0
    """A node gets a new child while it has fewer than widening * sqrt(visits). Unit: coefficient."""
    num_rounds: Index = 4
    """Search rounds per generation phase. Unit: rounds."""
    num_per_round: Count = 8
    """Continuations per tree and round. Unit: continuations."""
    num_least: Count = 3
    """Minimum number of returns averaged into a value, the response's own excluded. Unit: returns."""


class VinePpoConfig(Section):
    """Steps and values. Groups, rewards and policy gradient are configured in custom.extra.grpo."""

    num_continuations: Count = 9
    """K: Monte Carlo continuations per state; their mean return is its value. Unit: continuations."""
    first_continuations: Count | None = None
    """Sample this many first, and the rest only where their returns differ; null samples all at once. Unit:
    continuations."""
    siblings: Literal["none", "prompt", "all"] = "none"
    """Use other responses that pass through a state as continuations: never, at the prompt only, or everywhere."""
    steps: Literal["lines", "sentences", "tokens", "low_probability", "turns"] = "lines"
    """How a response is split into steps: at lines, sentences, every step_tokens tokens, low-probability tokens, or
    turns of an environment."""
    step_tokens: Count = 100
    """Length of a step with steps: tokens. Unit: tokens."""
    step_probability: PositiveShare = 0.9
    """steps: low_probability counts tokens below this probability. Unit: probability."""
    step_every: Count = 5
    """steps: low_probability starts a step at every n-th such token. Unit: tokens."""
    answer_mark: str = ""
    """A last line that starts with this mark, such as "#### ", belongs to the step before it; empty: no rule."""
    max_steps: Count | None = None
    """Most steps of a response; adjacent steps are merged; null is no limit. Unit: steps of a response."""
    normalization: Literal["whiten", "scale", "none"] = "whiten"
    """Advantages over all tokens of all ranks: whiten (mean 0, deviation 1), scale (deviation 1) or none."""
    unfinished_return: float | None = 0.0
    """Return of a response that reached the length limit; null uses its reward. Unit: reward."""
    search: SearchConfig = SearchConfig()
    """Search tree of trainer_variant: vineppo_mcts."""
