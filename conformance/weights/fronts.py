"""Doubles of servers behind real HTTP."""

import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer


@contextmanager
def running(*answering):
    """URLs of one server for each class of handlers."""
    fronts = [ThreadingHTTPServer(("127.0.0.1", 0), each) for each in answering]
    for front in fronts:
        front.daemon_threads = True
        threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield [f"http://127.0.0.1:{front.server_port}" for front in fronts]
    finally:
        for front in fronts:
            front.shutdown()
            front.server_close()
