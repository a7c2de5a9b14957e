"""Small random models and segments with 0 to 3 images, made once."""

import pytest

from conformance.doubles.loss_cases import row_of
from conformance.doubles.models import make_packed_model
from conformance.doubles.segments import make_segment
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3


@pytest.fixture(scope="module")
def model():
    return make_packed_model()


@pytest.fixture(scope="module")
def text_model():
    return make_tiny_qwen3()


@pytest.fixture(scope="module")
def pairs():
    """0 to 3 images; boxes and a polygon of five points."""
    shapes = ((1, 4), (2, 10), (0, 4), (3, 6))
    return [make_segment(seed, num_images=i, num_slots=n) for seed, (i, n) in enumerate(shapes)]


@pytest.fixture(scope="module")
def batch(pairs):
    """The pairs as a row and its images."""
    return row_of(pairs)
