"""Upload of an exported model to the Hugging Face hub; what goes wrong leaves the directory as it is."""

import shlex
from http import HTTPStatus
from pathlib import Path

from rollmatch.errors import LaunchError


def check_name(name: str) -> None:
    """Errors: ``hub-name-invalid`` unless the name is OWNER/NAME as the hub allows it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    problem = ""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        problem = str(error).rstrip(".")
    if not problem and "/" not in name:
        problem = f"{name!r} names no owner"
    if problem:
        remedy = "Name it OWNER/NAME, where OWNER is your user name or an organization on the hub."
        raise LaunchError(problem, code="hub-name-invalid", key="--push", remedy=remedy)


def check_links(*directories: Path) -> None:
    """Errors: ``link-leads-out`` where a link of a directory that is copied leads to a file elsewhere.

    The links of a directory in the hub's cache lead to ``blobs`` beside its ``snapshots``.
    """
    for directory in directories:
        home = directory.resolve()
        inside = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
        for path in sorted(directory.iterdir()):
            if path.is_symlink() and not any(path.resolve().is_relative_to(each) for each in inside):
                problem, remedy = f"{path} leads to {path.resolve()}", "Copy the file there if it is to be published."
                raise LaunchError(problem, code="link-leads-out", key="--push", remedy=remedy)


def push(out: Path, name: str) -> str:
    """Upload a directory to a model repository, a private one if it is new; returns the address of the commit.

    Errors: ``hub-access-denied``, ``hub-upload-failed``.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        return str(hub.upload_folder(folder_path=out, repo_id=name).commit_url)
    except Exception as error:  # of httpx, hf_xet and the hub's client, without a base class of their own
        raise _failure(error, out, name, endpoint=str(hub.endpoint)) from error


def _failure(error: Exception, out: Path, name: str, *, endpoint: str) -> LaunchError:
    """The error with what is kept, and what to type instead of a second export."""
    from huggingface_hub.errors import HfHubHTTPError

    again = f"{out} is complete: upload it by `hf upload {name} {shlex.quote(str(out))} --private`."
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):  # it wants a token, or another one
        return _denied(status, name, again, endpoint=endpoint)
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    problem = f"the upload to {endpoint} failed: {reason.strip().rstrip('.')}"
    remedy = f"Check the connection, HF_ENDPOINT and HF_HUB_OFFLINE. {again}"
    return LaunchError(problem, code="hub-upload-failed", key="--push", remedy=remedy)


def _denied(status: int, name: str, again: str, *, endpoint: str) -> LaunchError:
    from huggingface_hub import get_token

    problem = f"{endpoint} answered {status}: the token may not write to {name}"
    if get_token() is None:
        problem = f"{endpoint} answered {status}: no token is set"
    remedy = f"Log in by `hf auth login` with a token that may write there, or set HF_TOKEN. {again}"
    return LaunchError(problem, code="hub-access-denied", key="--push", remedy=remedy)
