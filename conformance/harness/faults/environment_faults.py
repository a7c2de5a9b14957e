"""Mistakes in episodes of several turns: what is taken for an answer, what is learnt, and how they are gone on with."""

from conformance.harness.faults.fault import Fault

WORLD, EPISODE, PLAYED = "objectives.environment", "objectives.episode", "objectives.vineppo.multi_turn"

ENVIRONMENT = (
    Fault(
        fault_id="environment-without-clone-taken",
        what="An environment needs no clone to be taken.",
        seam=WORLD,
        old='METHODS = ("reset", "clone", "step", "fingerprint")',
        new='METHODS = ("reset", "step", "fingerprint")',
    ),
    Fault(
        fault_id="options-are-not-handed-over",
        what="An environment is made without its options.",
        seam=WORLD,
        old="found(**options)",
        new="found()",
    ),
    Fault(
        fault_id="first-observation-is-the-prompt",
        what="The first observation follows the prompt in the same line.",
        seam=WORLD,
        old='    shown = "\\n".join(',
        new='    shown = " ".join(',
    ),
    Fault(
        fault_id="three-parts-are-a-step",
        what="A step that says nothing of a cut counts as one without.",
        seam=WORLD,
        old="else (None,) * 4",
        new="else (*(told or (None,) * 3), False)",
    ),
    Fault(
        fault_id="clone-unread",
        what="Nobody looks whether a clone is one.",
        seam=WORLD,
        old="    if not alike:",
        new="    if False:",
    ),
    Fault(
        fault_id="no-action-is-a-limit",
        what="An episode that ends by a text that is no action counts as cut off.",
        seam=EPISODE,
        old="self.is_over, self.is_finished, self.unparsable = True, True, error.problem",
        new="self.is_over, self.is_finished, self.unparsable = True, False, error.problem",
    ),
    Fault(
        fault_id="observations-learnt-from",
        what="Whatever stands behind the prompt is learnt from, whoever wrote it.",
        seam="learn.policy_loss",
        old="        rows += whole if policy.is_written is None else compress(whole, policy.is_written)",
        new="        rows += whole if True else compress(whole, policy.is_written)",
    ),
    Fault(
        fault_id="steps-begin-anywhere",
        what="A step may begin inside an observation.",
        seam="objectives.vineppo.split",
        old="    if trajectory.is_written(start):",
        new="    if True:",
    ),
    Fault(
        fault_id="turn-without-room",
        what="An observation is heard that leaves no room for a turn.",
        seam=EPISODE,
        old="        if len(self.token_ids) + len(ids) >= self.rules.max_response_tokens:",
        new="        if len(self.token_ids) + len(ids) > self.rules.max_response_tokens:",
    ),
    Fault(
        fault_id="one-turn-too-many",
        what="Turns are counted from zero where they end.",
        seam=EPISODE,
        old="self.turn.number + 1 >= self.rules.max_turns",
        new="self.turn.number >= self.rules.max_turns",
    ),
    Fault(
        fault_id="continuations-share-the-environment",
        what="Continuations of a state play in one and the same environment.",
        seam=EPISODE,
        old="turn.snapshot.clone(generator_of(seed))",
        new="turn.snapshot",
    ),
    Fault(
        fault_id="continuations-have-all-turns",
        what="A continuation may have as many turns as a whole episode.",
        seam=EPISODE,
        old="    episode.turn = turn\n",
        new="",
    ),
    Fault(
        fault_id="states-are-their-ids",
        what="States are equal where their ids are, wherever the environment stands.",
        seam="objectives.vineppo.trajectory",
        old="    fingerprint: Hashable = None",
        new="    fingerprint: Hashable = field(default=None, compare=False)",
    ),
    Fault(
        fault_id="reset-by-chance",
        what="Every attempt at a sample begins elsewhere.",
        seam=WORLD,
        old="made.reset(sample, generator_of(run_seed, sample.sample_id))",
        new="made.reset(sample, np.random.default_rng())",
    ),
    Fault(
        fault_id="attempts-share-their-chance",
        what="All attempts at a sample meet the same chance.",
        seam=PLAYED,
        old="generator_of(self.run_seed, sample.sample_id, rollout.request_id)",
        new="generator_of(self.run_seed, sample.sample_id)",
    ),
    Fault(
        fault_id="episodes-of-one-method",
        what="VinePPO plays by a seed of its own.",
        seam="objectives.vineppo.objective",
        old="            return self.world.play(samples, rollouts, means)",
        new="            return type(self.world)(**{**vars(self.world), 'run_seed': self.run_seed + 1}).play(\n"
        "                samples, rollouts, means)",
    ),
    Fault(
        fault_id="turns-of-any-version",
        what="A sync in the middle of an episode goes unnoticed.",
        seam=EPISODE,
        old="        if rollout.policy_version != self.policy_version:",
        new="        if False:",
    ),
    Fault(
        fault_id="window-forgotten",
        what="A checkpoint holds nothing of the window that is under way.",
        seam="trainer",
        old="                parts=going.parts if going is not None and is_under_way else (),",
        new="                parts=(),",
    ),
)
