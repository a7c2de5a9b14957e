"""Mistakes of rollouts that are made while the learner learns."""

from conformance.harness.faults.fault import Fault

OVERLAP = (
    Fault(
        fault_id="any-overlap",
        what="A mode of overlap that nobody knows is taken.",
        seam="config.rollout_matching",
        old='    overlap: Literal["off", "stream", "ahead"] = "off"',
        new='    overlap: str = "off"',
    ),
    Fault(
        fault_id="any-staleness",
        what="A staleness of zero is taken.",
        seam="config.rollout_matching",
        old="    max_staleness: Count = 1",
        new="    max_staleness: int = 1",
    ),
    Fault(
        fault_id="sync-beside-calls",
        what="Weights move while calls are under way.",
        seam="rollout.prefetch",
        old="            self._wait(lambda: not self._in_flight)",
        new="            self._wait(lambda: True)",
    ),
    Fault(
        fault_id="guard-around-the-wait",
        what="A caller counts as under way while it waits for the end of a sync.",
        seam="rollout.prefetch",
        old="""            self.monitor.wait(lambda: self._ends or self._may_begin(server))
""",
        new="""            self._in_flight[Lot(-1, server, 0, 0)] = 0.0
            self.monitor.wait(lambda: self._ends or self._may_begin(server))
            self._in_flight.pop(Lot(-1, server, 0, 0), None)
""",
    ),
    Fault(
        fault_id="early-parts-share-a-divisor",
        what="All parts of an early micro-batch are divided by the weight of text.",
        seam="rollout.early",
        old="                    share = total.mul_(scale / divisor)",
        new="                    share = total.mul_(scale / divisors[0])",
    ),
    Fault(
        fault_id="kept-parts-share-a-divisor",
        what="All parts of an early micro-batch whose graph was kept are divided by the weight of text.",
        seam="rollout.early",
        old="[part * (scale / divisor) for part, divisor in",
        new="[part * (scale / divisors[0]) for part, divisor in",
    ),
    Fault(
        fault_id="every-graph-is-kept",
        what="Early micro-batches stay in memory, however many may.",
        seam="streaming",
        old="        while self._early.num_kept >= self.ring.graphs_kept:",
        new="        while False:",
    ),
    Fault(
        fault_id="streams-once-all-is-there",
        what="A streamed step is learnt from once its last rollout is there.",
        seam="streaming",
        old="        if self.prefetch.is_complete(self.report.step):",
        new="        if True:",
    ),
    Fault(
        fault_id="stale-by-one-more",
        what="A rollout one step too old is learnt from.",
        seam="rollout.ahead",
        old="if sent_at >= step - self.max_staleness)",
        new="if sent_at >= step - self.max_staleness - 1)",
    ),
    Fault(
        fault_id="each-sync-makes-older",
        what="An evaluation's sync, or one to a server that was started again, makes rollouts a step older.",
        seam="rollout.ahead",
        old="if sent_at >= step - self.max_staleness)",
        new="if version >= max(step_of) - self.max_staleness)",
    ),
    Fault(
        fault_id="age-in-syncs",
        what="The log tells how many syncs ago a rollout was written.",
        seam="rollout.ahead",
        old="Counter(step - step_of[rollout.policy_version] for",
        new="Counter(max(step_of) - rollout.policy_version for",
    ),
    Fault(
        fault_id="too-old-is-left-out",
        what="A rollout that is too old is learnt from all the same.",
        seam="rollout.prefetch",
        old="            old = window.drop_older(min_version)",
        new="            old = []",
    ),
    Fault(
        fault_id="open-from-the-start",
        what="Calls begin before the first sync.",
        seam="rollout.prefetch",
        old="        self._held, self._closed = True, False",
        new="        self._held, self._closed = False, False",
    ),
    Fault(
        fault_id="asked-before-the-sync",
        what="Windows are asked for before the step's sync.",
        seam="ring",
        old="""        self.sync(report, weights)
        with report.phase("rollout"):
            collected = self.ahead.collect(wanted, self.make_requests, step_of=self.fence.step_of)
""",
        new="""        step_of, self.ahead.prefetch._held = dict.fromkeys(range(99), report.step), False
        with report.phase("rollout"):
            collected = self.ahead.collect(wanted, self.make_requests, step_of=step_of)
        self.sync(report, weights)
""",
    ),
    Fault(
        fault_id="caller-swallows",
        what="A caller's error ends its thread and nothing else.",
        seam="rollout.prefetch",
        old="            self._failure = self._failure or error",
        new="            pass",
    ),
    Fault(
        fault_id="windows-unbounded",
        what="Any number of windows may wait.",
        seam="rollout.prefetch",
        old="            if len(self.windows) >= self.rules.max_windows:",
        new="            if len(self.windows) >= 1000 * self.rules.max_windows:",
    ),
    Fault(
        fault_id="bytes-unbounded",
        what="Any number of bytes may wait.",
        seam="rollout.prefetch",
        old="        return is_next or sum(",
        new="        return True or sum(",
    ),
    Fault(
        fault_id="overlap-ahead-by-default",
        what="Who says nothing learns from old rollouts.",
        seam="config.rollout_matching",
        old='    overlap: Literal["off", "stream", "ahead"] = "off"\n',
        new='    overlap: Literal["off", "stream", "ahead"] = "ahead"\n',
    ),
    Fault(
        fault_id="ranks-drop-alone",
        what="Each rank follows its own count of what is too old.",
        seam="ring",
        old="        again = self.ranks.gather(collected.num_asked_again)",
        new="        again = [collected.num_asked_again]",
    ),
)
