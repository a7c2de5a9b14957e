"""Replies of servers that would harm who called them. Each gets a handler and the URL of another server."""

import gzip
import time

NESTED = 100_000


def endless(handler, elsewhere):
    begin(handler)
    while True:
        handler.wfile.write(b"1" * (1 << 16))


def slow(handler, elsewhere):
    begin(handler)
    while True:
        handler.wfile.write(b"1")
        handler.wfile.flush()
        time.sleep(0.2)


def slow_head(handler, elsewhere):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        handler.wfile.write(b"1")
        handler.wfile.flush()
        time.sleep(0.2)


def around(handler, elsewhere):
    move(handler, handler.path)


def away(handler, elsewhere):
    move(handler, elsewhere)


def moved_without_end(handler, elsewhere):
    """In a reply without end, to where the server does so again."""
    move(handler, handler.path)
    while True:
        handler.wfile.write(b"1" * (1 << 16))


def nested(handler, elsewhere):
    begin(handler)
    handler.wfile.write(b"[" * NESTED + b"]" * NESTED)


def packed(handler, elsewhere):
    """16 MiB in 16 KiB."""
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.end_headers()
    handler.wfile.write(gzip.compress(b"1" * (16 << 20)))


def begin(handler):
    handler.send_response(200)
    handler.end_headers()


def move(handler, place, status=307):
    handler.send_response(status)
    handler.send_header("Location", place)
    handler.end_headers()
