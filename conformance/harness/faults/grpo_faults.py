"""Mistakes of groups that compete with themselves."""

from conformance.harness.faults.fault import Fault

GRPO = (
    Fault(
        fault_id="compared-with-nothing",
        what="A reward is taken as it is, not against its group.",
        seam="objectives.grpo.advantage",
        old="    if len(known) < 2 or is_flat(group):\n        return [0.0] * len(group)\n"
        "    mean = fsum(known) / len(known)",
        new="    mean = 0.0",
    ),
    Fault(
        fault_id="always-scaled",
        what="Advantages are scaled whether or not they are to be.",
        seam="objectives.grpo.advantage",
        old='"none": 1.0}[scale]',
        new='"none": _std(known) + STD_FLOOR}[scale]',
    ),
    Fault(
        fault_id="spread-of-a-whole-population",
        what="The standard deviation is that of a population, not of a sample.",
        seam="objectives.grpo.advantage",
        old="/ (len(values) - 1))",
        new="/ len(values))",
    ),
    Fault(
        fault_id="one-completion-less",
        what="A group has one completion less than configured.",
        seam="launch.objectives",
        old="        num_rollouts=rules.num_generations,",
        new="            num_rollouts=rules.num_generations - 1,",
    ),
    Fault(
        fault_id="truncated-learnt-from",
        what="Completions that ran into their limit are learnt from in any case.",
        seam="objectives.grpo.objective",
        old="(self.group_rules.mask_truncated and made.is_truncated)",
        new="(False and made.is_truncated)",
    ),
)
