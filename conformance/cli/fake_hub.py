"""A Hugging Face hub of one process: it keeps what is uploaded, by the routes that ``huggingface_hub`` calls."""

import base64
import json
from contextlib import contextmanager
from urllib.parse import urlsplit

from conformance.doubles.http_server import http_server, send

TOKEN = "hf_right"
LFS = (".safetensors", "tokenizer.json")


class FakeHub:
    """``files`` and ``private`` of each repository; ``refused``: part of a path -> status instead of an answer."""

    def __init__(self, *, has_lfs=True, refused=None):
        self.has_lfs, self.refused = has_lfs, refused or {}
        self.files, self.private, self.blobs, self.paths = {}, {}, {}, []
        self.url = ""

    def answer(self, handler):
        path, raw = urlsplit(handler.path).path, handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.paths.append(f"{handler.command} {path}")
        if handler.command == "PUT":  # a signed address: it needs no token
            self.blobs[path.rpartition("/")[2]] = raw
            return send(handler, 200, {})
        if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            return send(handler, 401, {"error": "Invalid username or password."})
        for part, status in self.refused.items():
            if part in path:
                return send(handler, status, {"error": "refused"})
        return send(handler, *self._reply(path, [json.loads(line) for line in raw.splitlines()]))

    def _reply(self, path, lines):
        if path == "/api/repos/create":
            return self._create(*lines)
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if path.endswith(".git/info/lfs/objects/batch"):
            upload = [object | {"actions": {"upload": self._href(object["oid"])}} for object in lines[0]["objects"]]
            return 200, {"transfer": "basic", "objects": upload}
        if "/preupload/" in path:
            return 200, {"files": [{**self._mode(file["path"]), "shouldIgnore": False} for file in lines[0]["files"]]}
        if "/commit/" in path:
            return self._commit("/".join(path.split("/")[3:5]), lines)
        return 404, {"error": "not found"}

    def _create(self, body):
        name = f"{body['organization']}/{body['name']}"
        status = 409 if name in self.files else 200
        self.files.setdefault(name, {})
        self.private.setdefault(name, body.get("private") or body.get("visibility") == "private")
        return status, {"url": f"{self.url}/{name}"}

    def _mode(self, path):
        return {"path": path, "uploadMode": "lfs" if self.has_lfs and path.endswith(LFS) else "regular"}

    def _href(self, oid):
        return {"href": f"{self.url}/signed/{oid}"}

    def _commit(self, name, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.blobs[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def fake_hub(**settings):
    hub = FakeHub(**settings)
    with http_server(hub.answer) as server:
        hub.url = server.url
        yield hub
