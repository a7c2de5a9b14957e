"""Mistakes in packing, masking and scoring."""

from conformance.harness.faults.fault import Fault

LEARN = (
    Fault(
        fault_id="too-long-taken",
        what="A segment longer than a row is taken.",
        seam="learn.pack",
        old="            if segment.encoded_len > self.capacity:",
        new="            if False:",
    ),
    Fault(
        fault_id="segment-as-long-as-row-refused",
        what="A segment that fills a row exactly is refused.",
        seam="learn.pack",
        old="            if segment.encoded_len > self.capacity:",
        new="            if segment.encoded_len >= self.capacity:",
    ),
    Fault(
        fault_id="refused-after-taking",
        what="Segments are taken before they are checked, so that a refusal leaves them waiting.",
        seam="learn.pack",
        old="        self._buffer = self._checked([*self._buffer, *segments])",
        new="        self._buffer = [*self._buffer, *segments]\n        self._checked(self._buffer)",
    ),
    Fault(
        fault_id="first-fit",
        what="A row takes whatever fits first.",
        seam="learn.pack",
        old="        if length <= left and reachable[index + 1] >> (left - length) & 1:",
        new="        if length <= left:",
    ),
    Fault(
        fault_id="left-overs-dropped",
        what="Segments that did not fit are dropped.",
        seam="learn.pack",
        old="        self._buffer = [segment for index, segment in enumerate(younger) if index "
        "not in chosen] + held_back",
        new="        self._buffer = held_back",
    ),
    Fault(
        fault_id="younger-of-equals",
        what="Among equally full choices the younger segments win.",
        seam="learn.pack",
        old="        chosen = frozenset(fullest_subset([segment.encoded_len for segment in younger], capacity=room))",
        new="        turned = fullest_subset([segment.encoded_len for segment in reversed(younger)], capacity=room)\n"
        "        chosen = frozenset(len(younger) - 1 - index for index in turned)",
    ),
    Fault(
        fault_id="row-in-reverse",
        what="Segments stand in a row backwards.",
        seam="learn.pack",
        old="        return Row(segments=(oldest, *companions), capacity=self.capacity)",
        new="        return Row(segments=(oldest, *reversed(companions)), capacity=self.capacity)",
    ),
    Fault(
        fault_id="oldest-not-first",
        what="A row begins with the youngest segment.",
        seam="learn.pack",
        old="        oldest, *younger = self._buffer[:num_eligible]",
        new="        oldest, *younger = self._buffer[:num_eligible][::-1]",
    ),
    Fault(
        fault_id="buffer-unbounded",
        what="Any number of segments may wait.",
        seam="learn.pack",
        old="        if len(buffer) > self.max_buffered:",
        new="        if False:",
    ),
    Fault(
        fault_id="buffer-one-too-small",
        what="One segment less than told may wait.",
        seam="learn.pack",
        old="        if len(buffer) > self.max_buffered:",
        new="        if len(buffer) >= self.max_buffered:",
    ),
    Fault(
        fault_id="offsets-one-late",
        what="Offsets are those of the segments' ends.",
        seam="records",
        old="            starts.append(total)\n            total += length",
        new="            total += length\n            starts.append(total)",
    ),
    Fault(
        fault_id="metadata-of-the-first",
        what="Every segment of a row is described by the first one's length.",
        seam="learn.collate",
        old='            "encoded_len": segment.encoded_len,',
        new='            "encoded_len": row.segments[0].encoded_len,',
    ),
    Fault(
        fault_id="slots-not-moved",
        what="Coordinate slots of a row are not moved by the offset of their segment.",
        seam="learn.mask",
        old="        moved = (start + position for position in part.coord_positions)",
        new="        moved = iter(part.coord_positions)",
    ),
    Fault(
        fault_id="labels-not-moved",
        what="Labels of a row all stand at its beginning.",
        seam="learn.mask",
        old="        labels[start : start + len(part.labels)] = part.labels",
        new="        labels[: len(part.labels)] = part.labels",
    ),
    Fault(
        fault_id="mask-shifted-by-one",
        what="The tail begins one token early, so that the last prefix token is taught.",
        seam="learn.mask",
        old="    tail_bins = [(index, bin_of(segment.token_ids[index])) for index in "
        "range(tail_start, segment.encoded_len)]",
        new="    tail_bins = [\n        (index, bin_of(segment.token_ids[index])) for index in "
        "range(tail_start + 1, segment.encoded_len)\n    ]",
    ),
    Fault(
        fault_id="segments-see-each-other",
        what="A packed row is attended to as one sequence.",
        seam="learn.attention",
        old="        for a, b in spans_of(bounds, num_tokens=query.shape[2])",
        new="        for a, b in [(0, query.shape[2])]",
    ),
    Fault(
        fault_id="positions-run-on",
        what="Positions of a row run on over its segments.",
        seam="learn.collate",
        old='        "position_ids": _as_argument(torch.cat(positions, dim=1)[:, None]),',
        new='        "position_ids": _as_argument((torch.cat(positions, dim=1) + 3 * '
        "torch.arange(sum(row.lengths)))[:, None]),",
    ),
)
