"""The section ``custom``: objective, data, prompts, and the settings of each objective."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rollmatch.config.connection import BaseUrl, RolloutServerConfig
from rollmatch.config.dataset import DatasetConfig
from rollmatch.config.rollout_matching import TEXT, RolloutMatchingConfig
from rollmatch.config.section import (
    Count,
    Index,
    Listed,
    Positive,
    PositiveShare,
    Section,
    Share,
    ShareBelowOne,
    Text,
    Weight,
)


class EnvironmentConfig(Section):
    """Responses of several turns (grpo, distill, vineppo, vineppo_mcts): a class replies to each turn and pays it."""

    name: Text | None = None
    """The environment, as module:Class; null is none: a response is one turn."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    tools: Listed[Text] = ()
    """In place of name, tools that turns call: Python functions, as module:function, and MCP servers, by URL. A turn
    without a call ends the episode; the functions of grpo.rewards judge it."""
    show_tools: Literal["template", "text"] = "template"
    """Who describes the tools to the policy: the model's chat template, or a text behind the question."""
    max_turns: Count = 16
    """Most turns of an episode. Unit: turns."""
    max_response_tokens: Count = 1024
    """Longest episode, turns and observations together; it ends when no further turn fits. Unit: tokens."""
    observations: Literal["chat", "text"] = "chat"
    """Format of an observation: a user message by the chat template, or plain text."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Worker processes of each learner rank that run its calls, several at a time, and survive a call that hangs or
    crashes; 0 calls it in the learner. Unit: processes."""
    call_timeout_s: Positive | None = None
    """Longest call of reset or step, of an environment with processes or of coroutines; an episode whose call takes
    longer fails. Unit: seconds."""
    max_observation_bytes: Count = 1 << 20
    """Longest observation in UTF-8; an episode that is shown a longer one fails. Unit: bytes."""
    failed_share: Share = 0.1
    """Largest share of a window's episodes that may fail: they are not learned from. A larger one ends the run.
    Unit: share."""

    @property
    def is_set(self) -> bool:
        """Whether responses have several turns."""
        return self.name is not None or bool(self.tools)


def _check_function(value: str) -> str:
    module, _, function = value.partition(":")
    if not module or not function.isidentifier():
        raise PydanticCustomError("reward_function", "Input should be module:function")
    return value


class RewardConfig(Section):
    """One reward function."""

    function: Annotated[Text, AfterValidator(_check_function)] = Field(examples=["builtins:len"])
    """A function, as module:function: function(answer: str, sample) -> float, a reward function of TRL
    (completions, **columns) or of verifiers (prompt, completion, answer, ...); or a rubric of verifiers."""
    weight: float = 1.0
    """Weight in the sum of rewards; 0 only shows it. Unit: reward weight."""
    name: Text | None = None
    """Name in logs; null uses the function's name."""
    timeout_s: Positive | None = None
    """Longest call of a function that is async or has processes; a completion whose call takes longer is excluded.
    Unit: seconds."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Worker processes of each learner rank for this function, which run several completions at a time and survive a
    call that hangs or crashes; 0 calls it in the learner. Unit: processes."""

    @property
    def shown_name(self) -> str:
        """Name in logs."""
        return self.name or self.function.rpartition(":")[2]


class CorrectionConfig(Section):
    """Importance weight of a token for differences between engine and learner: its probability by the learner over that
    by the engine."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio it is: the token's, the product over the response (sequence), or the geometric mean of its tokens."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Outside low and high: the nearest bound (truncate), or 0 (mask). geometric needs mask, and weighs 1 inside."""
    low: Positive | None = None
    """Smallest ratio; null is no bound. Unit: ratio."""
    high: Positive = 2.0
    """Largest ratio. Unit: ratio."""


class DynamicSamplingConfig(Section):
    """Other samples in place of groups whose rewards are all equal (grpo), which teach nothing."""

    max_rounds: Count = Field(examples=[3])
    """Most rounds of one generation phase that generate for further samples, as many as there are such groups left;
    what is left then stays. Unit: rounds."""


class GrpoConfig(Section):
    """Groups, rewards and policy gradient (grpo, vineppo, vineppo_mcts, distill). Generation: see rollout_matching."""

    num_generations: Count = 8
    """Group size: completions per prompt, whose rewards are compared. 1 needs distill without rewards.
    Unit: completions."""
    rewards: Listed[RewardConfig] = ()
    """Reward functions, summed by weight. All variants but distill need at least one, or an environment."""
    steps_per_generation: Count = 1
    """Optimizer steps served by one generation phase. Unit: optimizer steps."""
    num_iterations: Count = 1
    """Passes over the completions of one generation phase (mu in GRPO). Unit: passes."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or of the other members (leave_one_out, RLOO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of the difference: standard deviation of the group, of the batch, or none (Dr. GRPO)."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without differing rewards by groups of further samples (DAPO); null keeps them."""
    mask_truncated_completions: bool = False
    """Exclude completions that reached the length limit from the loss."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """Denominator of the loss: token (DAPO), sequence (GRPO), or constant, i.e. completions * max_new_tokens (Dr.
    GRPO)."""
    importance: Literal["token", "sequence"] = "token"
    """Probability ratio: of each token, or the geometric mean over the tokens of the response (sequence, GSPO)."""
    clip: Literal["ppo", "cispo"] = "ppo"
    """Clipping: of the gain, so that clipped tokens have no gradient (ppo), or of the weight alone (cispo)."""
    epsilon: ShareBelowOne = 0.2
    """Lower clip: the probability ratio is clipped below 1 - epsilon; cispo has none. Unit: ratio."""
    epsilon_high: Positive | None = None
    """Upper clip: the probability ratio is clipped above 1 + epsilon_high; null uses epsilon, and cispo needs a number.
    Unit: ratio."""
    ratio_cap: Positive | None = None
    """Largest ratio for negative advantages (two-sided clipping, delta in TRL); null disables it. Unit: ratio."""
    beta: Weight = 0.0
    """Weight of the KL divergence from the reference policy; 0 needs no reference. Unit: loss weight."""
    old_logprobs: Literal["recomputed", "server"] = "recomputed"
    """Denominator of the ratio: recomputed by the learner (where rollouts are used once, in the pass that learns), or
    server for those the engine sampled with."""
    correction_cap: Positive | None = 2.0
    """Cap of the importance weight that corrects for differences between engine and learner, short for correction:
    {high: ...}; null disables it, unless correction is set. Unit: ratio."""
    correction: CorrectionConfig | None = None
    """Importance weight in full, in place of correction_cap; null leaves it to that."""
    entropy_coef: Weight = 0.0
    """Weight of the policy's mean entropy, which is taken off the loss. Unit: loss weight."""
    top_entropy_share: PositiveShare = 1.0
    """Share of each micro-batch's tokens, those of the highest entropy, that have a policy gradient.
    Unit: share of the tokens."""
    eval_temperature: Weight = 0.0
    """Sampling temperature in evaluation; 0 is greedy. Unit: divisor of the logits."""

    @model_validator(mode="after")
    def _drop_the_default_cap(self) -> Self:
        """A correction takes the place of a cap that nobody set."""
        if self.correction is None or "correction_cap" in self.model_fields_set:
            return self
        return self.model_copy(update={"correction_cap": None})

    @property
    def compares(self) -> bool:
        """Whether a reward counts; those with weight 0 are only shown."""
        return any(reward.weight != 0 for reward in self.rewards)

    @property
    def corrects(self) -> CorrectionConfig | None:
        """The correction in full, whichever key says it; None: none."""
        if self.correction is None and self.correction_cap is not None:
            return CorrectionConfig(high=self.correction_cap)
        return self.correction


class TeacherConfig(Section):
    """One teacher: a server, a model, or the policy itself."""

    base_url: BaseUrl | None = None
    """URL prefix of a stock vllm serve or of rollmatch serve, such as http://127.0.0.1:8000, with max_logprobs of at
    least top_k. Needs decoding.temperature 1; of images, vLLM 0.28 or newer, from 0.30 on with --enable-scale-out."""
    timeout_s: Positive = 240.0
    """Longest call of base_url; it is repeated for as long, too, while the server is busy or away. Unit: seconds."""
    model: Text | None = None
    """Directory of a saved Hugging Face model, or its id on the hub; it is loaded beside the policy, frozen. Its
    tokenizer must have the policy's vocabulary."""
    self: bool = False
    """The policy itself teaches, with its weights as they are, unless average is set; needs prompt."""
    average: PositiveShare | None = None
    """self teaches with an exponential average of its weights, which keeps this share at each optimizer step; 1 keeps
    the weights before training, null takes the present ones. Unit: share per optimizer step."""
    prompt: Text | None = None
    """What the teacher is asked in place of the last user message. {question} stands for the text of that message, and
    {name} for the field name of the sample's metadata; {{ and }} are braces. null asks what the policy was asked."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Metadata of the samples that it teaches, such as {task: math}. A sample has the first teacher whose fields are
    the sample's; with {} it has any."""
    weight: Positive = 1.0
    """Weight of its loss; rewards have their own. Unit: loss weight."""


class DistillConfig(Section):
    """Teachers of trainer_variant: distill. Completions, rewards and policy gradient are configured in
    custom.extra.grpo."""

    teachers: Listed[TeacherConfig] = ()
    """Who says how likely each token of a completion should have been. distill needs at least one."""
    loss: Literal["sampled", "divergence"] = "sampled"
    """sampled: the log-probability by the teacher minus that by the policy is the advantage of each token in the policy
    gradient. divergence: a divergence between both distributions at each token."""
    beta: Share | None = None
    """Which divergence: 0 is KL(teacher, policy), 1 is KL(policy, teacher), between them the generalised
    Jensen-Shannon divergence, whose mixture has this share of the teacher. divergence needs it. Unit: share."""
    top_k: Count | None = None
    """The teacher's most probable tokens that the divergence distinguishes; all others count as one. divergence needs
    it. Unit: tokens."""
    lmbda: Share = 1.0
    """Probability that a generation phase generates; each of the others learns from the data set's own answers, as in
    GKD. Below 1 it needs answers, loss: divergence, and no rewards that count. Unit: probability."""
    answers: Text | None = None
    """The data set's own answer, where lmbda is below 1: {name} stands for the field name of the sample's metadata,
    {question} for the last user message; {{ and }} are braces."""
    environment_weight: Weight = 0.0
    """Weight of what an environment pays, beside the weights of teachers; 0 only shows it. Unit: weight."""


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


class SwiftConfig(Section):
    """Settings that only ms-swift's commands need."""

    model_type: Text | None = None
    """ms-swift's name of the architecture, such as qwen3_vl; null lets ms-swift detect it."""
    template: Text | None = None
    """ms-swift's name of the chat template, such as qwen3_vl; null lets ms-swift detect it."""
    rollout_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of swift rollout, by name without dashes. Options that another section sets are rejected."""
    rlhf_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of swift rlhf, by name without dashes. Options that another section sets are rejected."""


SYSTEM_PROMPT = (
    "You list what you see. Answer with exactly one JSON object on one line, and nothing before or after it."
)
USER_PROMPT = (
    'List every object in the image as {"objects": [...]}. Each object has "desc", a short description, and either '
    '"bbox_2d", its box as [x1, y1, x2, y2], or "poly", its outline as [x1, y1, x2, y2, x3, y3, ...]. '
    "Every coordinate is a coordinate token from 0 to 999, in double quotes."
)
QWEN_PROMPT = "Locate every object in the image. Report bbox coordinates in JSON format."
PROMPTS_OF_FORMAT = {
    "integers": {"user": USER_PROMPT.replace("a coordinate token from 0 to 999, in double quotes", "from 0 to 999")},
    "qwen3_vl": {"system": "", "user": QWEN_PROMPT},
    "qwen2_5_vl": {"system": "", "user": QWEN_PROMPT},
    TEXT: {"system": ""},
}
"""Prompts of the answer formats whose defaults are others."""


class PromptsConfig(Section):
    """The prompt of every sample that does not have its own. The defaults shown are those of answer_format:
    coord_tokens."""

    system: str = SYSTEM_PROMPT
    """System message; empty omits it. Variants with rewards have none unless it is set, and then samples with their own
    question have it, too."""
    user: Text = USER_PROMPT
    """Text after the images in the user message."""


class ExtraConfig(Section):
    """Settings of generation and of the trainer variants."""

    rollout_matching: RolloutMatchingConfig = RolloutMatchingConfig()
    """Generation of every trainer_variant; matching and losses of rollout_matching_sft."""
    grpo: GrpoConfig = GrpoConfig()
    """Groups, rewards and policy gradient of grpo, vineppo, vineppo_mcts and distill."""
    vineppo: VinePpoConfig = VinePpoConfig()
    """Steps and values of vineppo and vineppo_mcts."""
    distill: DistillConfig = DistillConfig()
    """Teachers of distill."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Responses of several turns."""
    rollout_server: RolloutServerConfig = RolloutServerConfig()
    """What rollmatch serve starts."""
    swift: SwiftConfig = SwiftConfig()
    """Settings that only ms-swift's commands need."""


class CustomConfig(Section):
    """Objective, data and prompts."""

    trainer_variant: Literal["sft", "rollout_matching_sft", "grpo", "vineppo", "vineppo_mcts", "distill"] = Field(
        examples=["rollout_matching_sft"]
    )
    """The objective: plain SFT on the true answers (objects, stage 1; any text with answer_format: text),
    rollout-matching SFT, GRPO, VinePPO, VinePPO with tree search, or distillation on the policy's own completions. sft
    generates for evaluations only, and needs no rollout server: in vllm.mode server it evaluates by hf."""
    train_jsonl: Text | None = Field(default=None, examples=["data/train.jsonl"])
    """Training samples, one JSON object per line. Required, unless there is a dataset."""
    val_jsonl: Text | None = Field(default=None, examples=["data/val.jsonl"])
    """Held-out samples for evaluations, one JSON object per line; null: the run is not evaluated."""
    dataset: DatasetConfig | None = None
    """A Hugging Face data set in place of both files."""
    image_root: Text | None = None
    """Directory of relative image paths; null uses the directory of each JSONL file (of a dataset: the working
    directory)."""
    object_ordering: Literal["as_given", "sorted"] = "as_given"
    """Order of a sample's objects in the target: as in the file, or sorted by top edge, then left edge."""
    prompts: PromptsConfig = PromptsConfig()
    """The prompt of every sample that does not have its own."""
    extra: ExtraConfig = ExtraConfig()
    """Settings of generation and of the trainer variants."""

    @model_validator(mode="after")
    def _ask_for_the_format(self) -> Self:
        """Prompts that are not set request the configured answer format; with rewards, no format is wanted."""
        texts = PROMPTS_OF_FORMAT.get(self.extra.rollout_matching.answer_format, {})
        if self.learns_from_completions:
            texts = texts | {"system": ""}
        unset = {name: text for name, text in texts.items() if name not in self.prompts.model_fields_set}
        return self.model_copy(update={"prompts": self.prompts.model_copy(update=unset)}) if unset else self

    @model_validator(mode="after")
    def _sample_by_default(self) -> Self:
        """A gradient that compares completions needs several: they are sampled unless a temperature is set."""
        rollout = self.extra.rollout_matching
        is_set = "temperature" in rollout.decoding.model_fields_set or rollout.decode_mode == "beam"
        if is_set or not self.learns_from_completions:
            return self
        decoding = rollout.decoding.model_copy(update={"temperature": 1.0})
        extra = self.extra.model_copy(update={"rollout_matching": rollout.model_copy(update={"decoding": decoding})})
        return self.model_copy(update={"extra": extra})

    @property
    def learns_from_completions(self) -> bool:
        """Whether the policy's completions are learnt from as they are: judged by rewards or by teachers."""
        return self.trainer_variant not in ("sft", "rollout_matching_sft")

    @property
    def teaches_text(self) -> bool:
        """Whether samples are chats that hold their answer."""
        return self.trainer_variant == "sft" and self.extra.rollout_matching.answer_format == TEXT

    @property
    def detects(self) -> bool:
        """Whether answers list objects with their places."""
        return not (self.learns_from_completions or self.teaches_text)

    @property
    def learns_from_rollouts(self) -> bool:
        """Whether the policy generates what it learns from."""
        return self.trainer_variant != "sft"

    @property
    def is_evaluated(self) -> bool:
        """Whether there are held-out samples."""
        return (self.val_jsonl if self.dataset is None else self.dataset.val) is not None

    @property
    def chat_system(self) -> str | None:
        """System message of samples with their own question; None where the variant accepts no such samples."""
        return None if self.detects else self.prompts.system
