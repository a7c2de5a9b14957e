"""``python -m conformance.judge.vectors.generate``: write ``data/`` from one seed, by the reference implementation."""

import json
import random
from pathlib import Path

from conformance.judge.vectors.inputs import INPUTS
from conformance.judge.vectors.stored import DATA, Vector, VectorCase, text_of
from rollmatch.interop.vector_answers import answer

SEED = 25


def _numbered(requirement: str, *numbers: int) -> tuple[str, ...]:
    return tuple(f"{requirement}#{number}" for number in numbers)


CLAUSES = {
    "parse": (
        *_numbered("parsing/an-answer-is-one-line-of-json", 1, 2),
        *_numbered("parsing/the-answer-format-decides-how-objects-are-written", 2, 3, 4, 5, 6),
        *_numbered("parsing/the-prefix-ends-after-the-last-well-formed-element", 1, 2, 3, 4, 5, 6),
        *_numbered("parsing/nothing-is-repaired", 1, 2, 3, 4, 5, 6),
        *_numbered("parsing/a-stop-marker-ends-the-answer", 1),
        *_numbered("parsing/an-unreadable-response-falls-back-to-an-empty-list", 1, 2, 3),
    ),
    "match": (
        *_numbered("matching/matching-is-a-cheapest-assignment-on-mask-overlap", 1, 2, 3),
        *_numbered("matching/poor-overlaps-are-gated", 1, 3, 4, 5),
        *_numbered("matching/candidates-are-the-nearest-true-objects", 1, 2),
    ),
    "assign": (
        *_numbered("matching/matching-is-a-cheapest-assignment-on-mask-overlap", 1, 2, 3),
        *_numbered("matching/poor-overlaps-are-gated", 1, 5),
        *_numbered("matching/ties-are-broken-the-same-way-every-time", 1, 2),
    ),
    "append": (
        *_numbered("parsing/the-answer-format-decides-how-objects-are-written", 5, 7),
        *_numbered("target/the-target-is-the-prefix-the-missed-objects-and-the-end", 2, 3, 4, 6),
        *_numbered("target/a-description-that-would-turn-into-special-tokens-is-refused", 1),
    ),
    "pack": (
        *_numbered("packing/a-segment-is-never-split", 1, 2),
        *_numbered("packing/a-row-is-filled-as-well-as-can-be-oldest-first", 1, 2, 3, 4, 5, 6),
        *_numbered("packing/the-waiting-list-is-bounded", 2, 5),
    ),
    "groups": _numbered("grpo-server-mode/a-group-of-completions-competes-with-itself", 1),
    "siblings": (
        *_numbered("vineppo/other-responses-may-stand-in-for-continuations", 2, 3, 4),
        *_numbered("vineppo/states-are-prefixes-of-token-ids", 1, 3),
    ),
    "chunks": (
        *_numbered("request-distribution/requests-are-cut-into-contiguous-chunks", 1, 2, 3, 4),
        *_numbered("request-distribution/late-work-moves-only-where-it-may", 3),
    ),
    "buckets": (
        *_numbered("weight-sync/full-sync-sends-every-weight-merged", 5),
        *_numbered("weight-sync/buckets-are-cut-the-same-way-every-time", 1, 2, 3, 4, 5),
    ),
    "seeds": _numbered("determinism/every-request-has-a-seed-of-its-own", 1, 2),
    "advantages": _numbered("grpo-server-mode/a-group-of-completions-competes-with-itself", 3, 4),
}
TOLERANCES = {"match": 1e-9, "assign": 1e-9, "siblings": 1e-9, "advantages": 1e-9}


def make_case(name: str) -> VectorCase:
    """Each case has a stream of its own, so that a change of one leaves the others as they are."""
    vectors = []
    for number, (shows, given) in enumerate(INPUTS[name](random.Random(f"{SEED}/{name}"))):
        output = answer(name, given)
        assert output is not None, name
        expected = json.loads(json.dumps(output))
        vectors.append(Vector(vector_id=f"{name}/{number:02}", shows=shows, given=given, expected=expected))
    tolerance = TOLERANCES.get(name, 0)
    return VectorCase(name=name, clauses=CLAUSES[name], tolerance=tolerance, vectors=tuple(vectors))


def write(folder: Path = DATA) -> None:
    """One file a case."""
    for name in INPUTS:
        (folder / f"{name}.json").write_text(text_of(make_case(name), seed=SEED), encoding="utf-8")


if __name__ == "__main__":
    write()
