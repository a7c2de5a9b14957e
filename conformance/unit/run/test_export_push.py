"""``rollmatch export --push`` over HTTP to a hub that keeps the files, and to hubs that do not answer or refuse."""

import base64
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

from conformance.doubles.http_server import http_server, send
from conformance.doubles.instance import free_port
from conformance.doubles.started import TIMEOUT_S
from conformance.doubles.trained_run import FULL, train
from rollmatch.cli.main import format_error, main
from rollmatch.config import load_config
from rollmatch.errors import LaunchError
from rollmatch.run.directory import RESOLVED, last_checkpoint
from rollmatch.run.push import check_links, push

NAME = "someone/digits"
TOKEN = "hf_right"
LFS = (".safetensors", "tokenizer.json")


class FakeHub:
    """A hub of one process, by the routes that ``huggingface_hub`` calls.

    ``files`` and ``private`` of each repository; ``refused``: part of a path -> status instead of an answer.
    """

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
                return send(handler, status, {"error": f"refused: {handler.headers['Authorization']}"})
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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("pushed"), *FULL)


@pytest.mark.wide
def test_the_hub_has_the_files_in_a_private_repository(run, tmp_path):
    """A fresh process, because ``HF_ENDPOINT`` is read at import."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "rollmatch", "export", str(run), str(out), "--push", NAME]
    with fake_hub() as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        environment = os.environ | {"HF_HOME": str(tmp_path), **variables}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.files == {NAME: written}
    assert not any(TOKEN.encode() in content for content in (*written.values(), ended.stdout.encode()))
    assert TOKEN not in ended.stderr
    assert hub.private == {NAME: True}
    assert {"model.safetensors", "config.json", "README.md"} <= written.keys()
    assert written["model.safetensors"] in hub.blobs.values()
    assert (ended.stderr + ended.stdout).rstrip().endswith(f"{hub.url}/{NAME}/commit/1")


def test_without_a_token_the_directory_is_whole(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with fake_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        assert main(["export", str(run), str(out), "--push", NAME]) == 1
    output = capsys.readouterr().err
    assert f"[hub-access-denied] --push: {hub.url} answered 401: no token is set\n" in output
    assert f"hf upload {NAME} {out} --private" in output
    assert "hf auth login" in output
    assert "Traceback" not in output
    assert {"model.safetensors", "config.json", "README.md"} <= {path.name for path in out.iterdir()}
    assert hub.files == {}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory to push from this process, which has a token and may use the network."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("# model\n")
    return tmp_path / "model"


def failure(model, url, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    with pytest.raises(LaunchError) as caught:
        push(model, NAME)
    assert caught.value.key == "--push"
    assert f"hf upload {NAME} {model} --private" in caught.value.remedy
    assert "Traceback" not in format_error(caught.value)
    assert sorted(path.name for path in model.iterdir()) == ["README.md", "config.json"]
    return caught.value


@pytest.mark.parametrize("disables_xet", [True, False], ids=["basic", "pipelined"])
def test_a_repository_that_exists_takes_new_files(model, monkeypatch, disables_xet):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", disables_xet)
    with fake_hub(has_lfs=False) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        hub.files[NAME], hub.private[NAME] = {"config.json": b"before", "other": b"kept"}, False
        assert push(model, NAME) == f"{hub.url}/{NAME}/commit/1"
    assert hub.files == {NAME: {"config.json": b"{}", "README.md": b"# model\n", "other": b"kept"}}
    assert hub.private == {NAME: False}


@pytest.mark.parametrize(("route", "status"), [("/api/repos/create", 403), ("/commit/", 403), ("/preupload/", 401)])
def test_a_token_that_may_not_write_is_named(model, monkeypatch, route, status):
    with fake_hub(has_lfs=False, refused={route: status}) as hub:
        error = failure(model, hub.url, monkeypatch)
    assert error.code == "hub-access-denied"
    assert error.problem == f"{hub.url} answered {status}: the token may not write to {NAME}"
    assert "hf auth login" in error.remedy


def test_an_answer_that_is_no_refusal_is_quoted(model, monkeypatch):
    with fake_hub(has_lfs=False, refused={"/commit/": 413}) as hub:
        error = failure(model, hub.url, monkeypatch)
    assert hub.private == {NAME: True}, "also where nothing was uploaded"
    assert error.code == "hub-upload-failed"
    assert "413" in error.problem
    assert TOKEN not in format_error(error)


def test_no_secret_of_an_address_is_shown(model, monkeypatch):
    error = failure(model, f"http://me:sesame@127.0.0.1:{free_port()}", monkeypatch)
    assert "sesame" not in format_error(error)


PUSHED = """
import sys
from pathlib import Path
from rollmatch.run.push import push
from rollmatch.startup import run_process
run_process(lambda: push(Path(sys.argv[1]), sys.argv[2]), with_traceback=True)
"""


def test_no_secret_of_an_address_is_in_the_traceback_of_what_the_hubs_client_raised(model):
    command = [sys.executable, "-c", PUSHED, str(model), NAME]
    with fake_hub() as hub:  # refuses: user and password take the place of the token
        variables = {"HF_ENDPOINT": hub.url.replace("://", "://me:sesame@"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
        ended = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    assert ended.returncode == 1
    assert "HTTPStatusError: Client error '401 Unauthorized' for url 'http://***@127.0.0.1:" in ended.stderr
    assert "sesame" not in ended.stderr


def test_a_hub_that_cannot_be_reached_is_named(model, monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    error = failure(model, url, monkeypatch)
    assert error.code == "hub-upload-failed"
    assert error.problem.startswith(f"the upload to {url} failed: ")
    assert "HF_ENDPOINT" in error.remedy


def test_an_offline_client_is_named(model, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = failure(model, "http://127.0.0.1:1", monkeypatch)
    assert "HF_HUB_OFFLINE" in error.problem


def test_a_link_to_a_file_elsewhere_is_not_published(run, tmp_path, capsys):
    """A directory of weights that somebody has sent, with a link to a key; not one of the hub's cache."""
    checkpoint, secret = tmp_path / "checkpoint-1", tmp_path / "id_rsa"
    shutil.copytree(last_checkpoint(run), checkpoint)
    secret.write_text("sesame")
    (checkpoint / "notes.txt").symlink_to("../id_rsa")
    assert main(["export", str(run), str(tmp_path / "out"), "--checkpoint", str(checkpoint), "--push", NAME]) == 1
    assert f"[link-leads-out] --push: {checkpoint}/notes.txt leads to {secret}" in capsys.readouterr().err
    config = load_config(str(run / RESOLVED))
    named, other = shutil.copytree(config.model.model, tmp_path / "named"), shutil.copytree(run, tmp_path / "other")
    (named / "config.json").unlink()
    (named / "config.json").symlink_to("../id_rsa")
    resolved = (other / RESOLVED).read_text().replace(str(config.model.model), str(named))
    (other / RESOLVED).write_text(resolved)
    assert main(["export", str(other), str(tmp_path / "out"), "--push", NAME]) == 1
    assert f"[link-leads-out] --push: {named}/config.json leads to {secret}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    cached = tmp_path / "models--a--b" / "snapshots" / "0"
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (blobs / "1").touch()
    cached.mkdir(parents=True)
    (cached / "config.json").symlink_to("../../blobs/1")
    check_links(cached)


@pytest.mark.parametrize("name", ["name", "owner/two words", "owner/name/more", "/name", "owner/", "owner/a--b", ""])
def test_a_wrong_name_is_refused_before_the_run_is_looked_at(tmp_path, capsys, name):
    assert main(["export", str(tmp_path / "missing"), str(tmp_path / "out"), f"--push={name}"]) == 1
    message = capsys.readouterr().err
    assert "[hub-name-invalid] --push: " in message
    assert "OWNER/NAME" in message
    assert list(tmp_path.iterdir()) == []
