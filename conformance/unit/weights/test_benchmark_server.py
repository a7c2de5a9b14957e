"""The benchmarks' receiving server takes a sync: what it stands in for must not outgrow it unnoticed."""

import pytest
import requests

from benchmarks.sync.receiving_server import native_sender, receiving, weights_of


@pytest.mark.wide
def test_the_receiving_server_of_the_benchmarks_takes_a_sync():
    with receiving(3, 4) as (url,), native_sender(url) as sender:
        sender.send(weights_of(3, 4), version=1)
        assert requests.get(f"{url}/health/", timeout=20).json()["policy_version"] == 1
