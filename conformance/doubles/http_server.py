"""HTTP servers of doubles: a thread each on a free port of this machine."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from rollmatch.config.connection import base_url_of

MSGPACK = "application/msgpack"


@contextmanager
def http_server(answer, *, protocol="HTTP/1.0", host="127.0.0.1", port=0):
    """Yield a running server with its ``url``; ``answer(handler)`` reads each request and sends the reply."""

    class Answering(BaseHTTPRequestHandler):
        protocol_version = protocol
        do_GET = do_POST = do_PUT = lambda self: answer(self)

        def log_message(self, *_):
            pass

    class Listening(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        request_queue_size = 128  # with 5, some of many calls at the same time are reset

    server = Listening((host, port), Answering)
    server.url = base_url_of(host, server.server_port)
    server.daemon_threads, server.handle_error = True, lambda *_: None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def is_packed(handler):
    return handler.headers.get("Content-Type") == MSGPACK


def read_body(handler):
    """The decoded JSON or msgpack body; None without one."""
    raw = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    return (msgspec.msgpack.decode if is_packed(handler) else json.loads)(raw) if raw else None


def send(handler, status, body):
    """Reply in the encoding of the request; a text as it is."""
    packed = is_packed(handler)
    raw = body.encode() if isinstance(body, str) else (msgspec.msgpack if packed else msgspec.json).encode(body)
    handler.send_response(status)
    handler.send_header("Content-Type", MSGPACK if packed else "application/json")
    handler.send_header("Content-Length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw)


@contextmanager
def answering(answer, *, key=""):
    """Yield the URL of a server; ``answer`` gets the last part of a path and the body, and returns status and reply.

    ``key``: what all calls have to bring.
    """

    def reply(handler):
        status, body = answer(handler.path.strip("/").rpartition("/")[2], read_body(handler))
        if key and handler.headers.get("Authorization") != f"Bearer {key}":
            status, body = 401, {"code": "unauthorized"}
        send(handler, status, body)

    with http_server(reply) as server:
        yield server.url
