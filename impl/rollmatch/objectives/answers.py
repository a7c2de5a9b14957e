"""Answers of an evaluation as they are written down: what was asked, what was expected, what came."""

import json
from collections.abc import Mapping, Sequence

from rollmatch.records import Sample

NUM_SHOWN = 64
"""Answers of an evaluation that are written down."""
EXPECTED = ("answer", "solution", "ground_truth", "target", "label")
"""Names in metadata by which data sets call the true answer."""
LONGEST = 4000
"""Characters of a text that is written down."""


def describe_answers(
    samples: Sequence[Sample],
    answers: Sequence[str],
    worths: Mapping[str, Sequence[float | None]],
    *,
    expected: Sequence[str] | None = None,
) -> dict[str, object]:
    """The record of an evaluation: as many samples as there are ``answers``; ``worths`` by name, of each answer."""
    truths = [expected_of(sample) for sample in samples] if expected is None else expected
    return {
        "scenes": [],
        "answers": [
            {
                "sample_id": sample.sample_id,
                "question": question_of(sample),
                "expected": truth[:LONGEST],
                "response_text": answer,
                **{name: values[place] for name, values in worths.items()},
            }
            for place, (sample, truth, answer) in enumerate(zip(samples, truths, answers, strict=False))
        ],
    }


def question_of(sample: Sample) -> str:
    """The last message of its prompt; empty where the configured prompt is used.

    >>> question_of(Sample(sample_id=0, origin="x:1", images=(), messages=(("system", "Add."), ("user", "2 + 2?"))))
    '2 + 2?'
    """
    return sample.messages[-1][1][:LONGEST] if sample.messages else ""


def expected_of(sample: Sample) -> str:
    """The true answer, where the metadata has one by a usual name; else all of the metadata.

    >>> sample = Sample(sample_id=0, origin="x:1", images=(), metadata={"answer": "4", "level": 3})
    >>> expected_of(sample)
    '4'
    """
    named = next((sample.metadata[name] for name in EXPECTED if name in sample.metadata), sample.metadata)
    return named if isinstance(named, str) else json.dumps(named, ensure_ascii=False, default=str) if named else ""
