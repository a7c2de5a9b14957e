"""Mistakes of GRPO that asks ahead, and of work that moves to another server."""

from conformance.harness.faults.fault import Fault

RULES, PREFETCH = "config.overlap_rules", "rollout.prefetch"

LATE = (
    Fault(
        fault_id="ahead-with-other-seeds",
        what="What is asked for ahead has seeds of the step that asks for it.",
        seam="rollout.ahead",
        old="make_requests(window.samples, window.step)",
        new="make_requests(window.samples, wanted[0].step)",
    ),
    Fault(
        fault_id="one-window-less-ahead",
        what="The next window is asked for when it is due.",
        seam="trainer",
        old="        for _ in range(lead):",
        new="        for _ in range(lead - 1):",
    ),
    Fault(
        fault_id="evaluation-beside-calls",
        what="An evaluation's sync comes between the calls of a window.",
        seam="ring",
        old="            self.ahead.wait_for_next()\n",
        new="            pass\n",
    ),
    Fault(
        fault_id="windows-of-any-length",
        what="Completions of long windows may be older than the staleness allows.",
        seam=RULES,
        old='    if rules.overlap == "ahead" and length > 1 and num_windows_ahead(config) < 1:',
        new="    if False:",
    ),
    Fault(
        fault_id="staleness-uncorrected-taken",
        what="Old completions are learnt from as if the policy had just written them.",
        seam=RULES,
        old='    if rules.correction_cap is None and rules.old_logprobs == "recomputed":',
        new="    if False:",
    ),
    Fault(
        fault_id="packed-completions-ahead",
        what="Completions that were asked for ahead may wait for a row.",
        seam=RULES,
        old='    if rules.overlap == "ahead" and config.custom.learns_from_rewards:',
        new="    if False:",
    ),
    Fault(
        fault_id="vineppo-ahead-taken",
        what="VinePPO asks for responses ahead.",
        seam=RULES,
        old='    if variant != "grpo":',
        new="    if False:",
    ),
    Fault(
        fault_id="grpo-streams",
        what="GRPO learns from completions before those of their group are there.",
        seam=RULES,
        old='    elif told == "stream":',
        new="    elif False:",
    ),
    Fault(
        fault_id="late-work-by-default",
        what="Shares are cut in pieces unless told otherwise.",
        seam="config.rollout_matching",
        old="    pieces_per_server: Count = 1",
        new="    pieces_per_server: Count = 4",
    ),
    Fault(
        fault_id="late-work-always-moves",
        what="What waits moves to an idle server though it may not.",
        seam=PREFETCH,
        old="moves=self.rules.pieces_per_server > 1",
        new="moves=True",
    ),
    Fault(
        fault_id="late-work-never-moves",
        what="Pieces stay with a slow server.",
        seam=PREFETCH,
        old="moves=self.rules.pieces_per_server > 1",
        new="moves=False",
    ),
    Fault(
        fault_id="the-first-piece-moves",
        what="A server takes what another one is about to begin.",
        seam="rollout.late_work",
        old="for queue in queues), key=_num_requests)[-1]",
        new="for queue in queues), key=_num_requests)[0]",
    ),
    Fault(
        fault_id="pieces-in-one",
        what="Shares are never cut in pieces.",
        seam="rollout.lot",
        old="evenly = [chunk.start - (-chunk.num_requests * place // pieces) for place in range(pieces + 1)]",
        new="evenly = [chunk.start, chunk.stop]",
    ),
    Fault(
        fault_id="pieces-without-overlap",
        what="Pieces are taken where nothing is ever cut.",
        seam=RULES,
        old='    if rules.pieces_per_server > 1 and rules.overlap == "off":',
        new="    if False:",
    ),
)
