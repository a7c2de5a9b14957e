"""A server of JSON on a real socket, for tests of what talks to servers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def answering(answer: Callable[[str, object], tuple[int, object]], *, key: str = "") -> Iterator[str]:
    """The server's URL; ``answer`` gets the last part of a path and the body, and returns status and reply.

    ``key``: what all calls have to bring.
    """

    class FrontRoutes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: object) -> None:
            status, reply = answer(self.path.strip("/").rpartition("/")[2], body)
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                status, reply = 401, {"code": "unauthorized"}
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), FrontRoutes)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
