"""The section ``custom.extra.vineppo``: steps, and the values of the states between them."""

from typing import Literal

from rollmatch.config.section import Count, Index, PositiveShare, Section, Weight


class SearchConfig(Section):
    """The search tree of trainer_variant vineppo_mcts."""

    select: Literal["uct", "puct"] = "uct"
    """What weighs nodes that were seldom visited: their visits alone, or also how likely their step was."""
    exploration: Weight = 1.0
    """Weight of what was seldom visited."""
    widening: Weight = 1.0
    """A node gets further children while it has fewer than this times the root of its visits."""
    num_rounds: Index = 4
    """Waves of continuations per window."""
    num_per_round: Count = 8
    """Continuations of each tree per wave."""
    num_least: Count = 3
    """Returns that each value is the mean of at least, its own trajectory's left out."""


class VinePpoConfig(Section):
    """Steps and values; groups, rewards and the policy gradient are as custom.extra.grpo says."""

    num_continuations: Count = 9
    """Fresh continuations of each state, whose mean return is its value."""
    first_continuations: Count | None = None
    """Sample so many first, and the others only where these differed; null samples all at once."""
    siblings: Literal["none", "prompt", "all"] = "none"
    """Whether other responses through a state stand in for continuations: nowhere, at the prompt, everywhere."""
    steps: Literal["lines", "sentences", "tokens", "low_probability", "turns"] = "lines"
    """Where steps begin: at lines, sentences, every step_tokens, unsure tokens, or turns of an environment."""
    step_tokens: Count = 100
    """Tokens of a step where steps is tokens."""
    step_probability: PositiveShare = 0.9
    """A token below this probability is one the policy was unsure of."""
    step_every: Count = 5
    """Every so manieth of these begins a step."""
    answer_mark: str = ""
    """What begins a last line that belongs to the step before it, such as "#### "; empty for none."""
    max_steps: Count | None = None
    """Most steps of a response; neighbours are joined. null is no limit."""
    normalization: Literal["whiten", "scale", "none"] = "whiten"
    """Advantages of all tokens of all ranks: mean 0 and deviation 1, only scaled, or left alone."""
    unfinished_return: float | None = 0.0
    """Return of a response or continuation that ran into its length limit; null takes its reward."""
    search: SearchConfig = SearchConfig()
    """The search tree of trainer_variant vineppo_mcts."""
