from contextlib import ExitStack

import pytest

from rollmatch.dialects.session import ClientSettings, RolloutServer


@pytest.fixture
def open_sender():
    """(fronts of doubles, servers -> sender) -> a sender to them; ends both."""
    with ExitStack() as stack:

        def begin(fronts, make):
            servers = [RolloutServer(url, ClientSettings(timeout_s=5)) for url in stack.enter_context(fronts)]
            for server in servers:
                server.connect()
            sender = make(servers)
            stack.callback(sender.close)
            return sender

        yield begin
