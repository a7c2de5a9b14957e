"""Two generate calls at once on a real server of one replica beside the same two in a row."""

import itertools
from pathlib import Path

import pytest

from conformance.doubles.digits import load_digits, scenes
from conformance.doubles.instance import ENGINE, running
from conformance.judge.calls import data_url, in_thread

NUM_IMAGES, MAX_TOKENS = 8, 128
BAR = 2 / 1.5
"""Together they take less than 1.5 x one, which is half of two in a row."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Neither cache helps: scenes come again here, a training run's do not."""
    arguments = ENGINE | {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    log = tmp_path_factory.mktemp("server") / "log"
    with running(log, data_parallel_size=1, engine_arguments=arguments) as started:
        yield started.server


@pytest.fixture(scope="module")
def bodies():
    """Without end: calls of the same size, each with the next scenes."""
    prompts = load_digits().custom.prompts
    messages = [
        {"role": "system", "content": prompts.system},
        {"role": "user", "content": f"<image>{prompts.user}"},
    ]
    config = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "return_details": True}
    images = [data_url(Path(scene.images[0])) for scene in scenes()]
    batches = [images[first : first + NUM_IMAGES] for first in range(0, len(images) - NUM_IMAGES + 1, NUM_IMAGES)]
    return itertools.cycle(
        {"infer_requests": [{"messages": messages, "images": [image]} for image in batch], "request_config": config}
        for batch in batches
    )


@pytest.fixture
def ask(server, bodies):
    """Posts the next call and sees that it was answered in full."""

    def post():
        status, entries = server.post("/infer/", next(bodies))
        assert status == 200, entries
        assert len(entries) == NUM_IMAGES

    post()
    return post


def test_two_calls_at_once_beside_two_in_a_row(side_by_side, ask):
    def at_once():
        for call in [in_thread(ask), in_thread(ask)]:
            call.result()

    def in_a_row():
        ask()
        ask()

    side_by_side(at_once, in_a_row, bar=BAR, rounds=4)
