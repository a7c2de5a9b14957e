"""Mistakes in completing a response and in what is learnt of it."""

from conformance.harness.faults.fault import Fault

SUPERVISION = (
    Fault(
        fault_id="tail-coordinates-as-text",
        what="Coordinates of the tail are learnt as text.",
        seam="learn.mask",
        old="weights = _text_weights(segment, (index for index, coord_bin in tail_bins if coord_bin is None), rules)",
        new="weights = _text_weights(segment, (index for index, _ in tail_bins), rules)",
    ),
    Fault(
        fault_id="prefix-slots-untaught",
        what="Slots of matched objects learn what the model wrote instead of what is true.",
        seam="learn.mask",
        old="        coord_bins=(*segment.coord_bins, *(coord_bin for _, coord_bin in tail_slots)),",
        new="        coord_bins=(\n            *(bin_of(segment.token_ids[p]) or 0 for p in segment.coord_positions),\n"
        "            *(coord_bin for _, coord_bin in tail_slots),\n        ),",
    ),
    Fault(
        fault_id="slots-anywhere",
        what="Slots outside the target are taken.",
        seam="learn.mask",
        old="        if outside:",
        new="        if False:",
    ),
    Fault(
        fault_id="prefix-text-taught",
        what="The model's own words are labels.",
        seam="learn.mask",
        old="    tail_start = segment.prompt_len + segment.prefix_len\n    tail_bins",
        new="    tail_start = segment.prompt_len\n    tail_bins",
    ),
    Fault(
        fault_id="stop-token-unlearnt",
        what="The stop token is not learnt: responses never end.",
        seam="learn.mask",
        old="for index in range(tail_start, segment.encoded_len)]",
        new="for index in range(tail_start, segment.encoded_len - 1)]",
    ),
    Fault(
        fault_id="description-weight-ignored",
        what="Descriptions are always learnt in full.",
        seam="learn.mask",
        old="        weights[index] = rules.desc_ce_weight if index in desc else 1.0",
        new="        weights[index] = 1.0",
    ),
    Fault(
        fault_id="closing-unlearnt",
        what="The weight of descriptions counts for the whole tail.",
        seam="learn.mask",
        old="        weights[index] = rules.desc_ce_weight if index in desc else 1.0",
        new="        weights[index] = rules.desc_ce_weight",
    ),
    Fault(
        fault_id="w1-unweighted",
        what="The distance of distributions counts once, whatever its weight.",
        seam="learn.loss",
        old="    slots = rules.soft_ce_weight * soft_ce + rules.w1_weight * w1",
        new="    slots = rules.soft_ce_weight * soft_ce + w1",
    ),
    Fault(
        fault_id="gate-left-out",
        what="Probability that leaves the coordinates costs nothing.",
        seam="learn.loss",
        old="        slots = slots + rules.gate_weight * gate",
        new="        slots = slots + 0 * gate",
    ),
    Fault(
        fault_id="polygon-keeps-its-bins",
        what="A polygon is taught its own bins.",
        seam="objectives.rollout_matching.transport",
        old="    if predicted.geometry is Geometry.BBOX and truth.geometry is Geometry.BBOX:\n    "
        "    return truth.bins",
        new="    if predicted.geometry is Geometry.BBOX and truth.geometry is Geometry.BBOX:\n    "
        "    return truth.bins\n"
        "    if predicted.geometry is Geometry.POLY:\n        return predicted.bins",
    ),
    Fault(
        fault_id="text-loss-per-row",
        what="Text losses are divided by the row's own weight.",
        seam="learn.loss",
        old="    ce = ce_sum / (totals.text_weight or 1.0)",
        new="    ce = ce_sum / (float(targets.weights.sum()) or 1.0)",
    ),
    Fault(
        fault_id="slot-loss-per-row",
        what="Coordinate losses are divided by the row's own slots.",
        seam="learn.loss",
        old="    coord, coord_prefix, gate = sums / (totals.num_slots or 1)",
        new="    coord, coord_prefix, gate = sums / (len(targets.bins) or 1)",
    ),
    Fault(
        fault_id="nothing-divided-by-nothing",
        what="A step without labels has a loss that is no number.",
        seam="learn.loss",
        old="    ce = ce_sum / (totals.text_weight or 1.0)",
        new="    ce = ce_sum / torch.tensor(totals.text_weight)",
    ),
    Fault(
        fault_id="stop-token-left-out",
        what="The target ends without its stop token.",
        seam="objectives.rollout_matching.append",
        old="        token_ids=(*token_ids, vocabulary.stop_id),",
        new="        token_ids=(*token_ids, token_ids[-1]),",
    ),
    Fault(
        fault_id="missed-not-appended",
        what="The last missed object is not appended.",
        seam="objectives.rollout_matching.target",
        old="        missed = [sample.objects[index] for index in matching.false_negatives]",
        new="        missed = [sample.objects[index] for index in matching.false_negatives[:-1]]",
    ),
    Fault(
        fault_id="target-encoded-anew",
        what="The model's own words are tokenised anew.",
        seam="objectives.rollout_matching.target",
        old="            token_ids=(*rollout.prompt_token_ids, *parsed.prefix_token_ids, *tail.token_ids),",
        new="            token_ids=(\n                *rollout.prompt_token_ids,\n"
        "                *(self.vocabulary._byte_ids[b] for b in self.vocabulary.decode(parsed.prefix_token_ids)),\n"
        "                *tail.token_ids,\n            ),",
    ),
    Fault(
        fault_id="list-left-open",
        what="The appended text closes the object but not the list.",
        seam="objectives.rollout_matching.append",
        old='CLOSING = "]}"',
        new='CLOSING = "}"',
    ),
    Fault(
        fault_id="comma-always",
        what="A comma stands before every first appended object.",
        seam="objectives.rollout_matching.append",
        old='    comma = ", " if missed and parsed.num_elements else ""',
        new='    comma = ", " if missed else ""',
    ),
    Fault(
        fault_id="special-descriptions-taken",
        what="A description that spells the stop token becomes it.",
        seam="objectives.rollout_matching.append",
        old="            if token_id in vocabulary.control_ids or vocabulary.bin_of(token_id) is not None:",
        new="            if False:",
    ),
    Fault(
        fault_id="changed-descriptions-taken",
        what="A description that the tokenizer rewrites is taught as rewritten.",
        seam="objectives.rollout_matching.append",
        old="        if vocabulary.decode(token_ids) != quoted.encode():",
        new="        if False:",
    ),
)
