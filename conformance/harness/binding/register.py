"""The three lists beside the specification: what is pending, what is excluded, what was acknowledged."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.harness.quick_yaml import parse_own
from rollmatch.config.yaml_dialect import dump

SPEC = Path(__file__).parents[3] / "spec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Made by ``load_register``."""

    pending: Mapping[str, str]
    """Scenario or clause -> the subject of the work that will bind it."""
    excluded: Mapping[str, str]
    """Clause -> why no test can show it."""
    acknowledged: Mapping[str, str]
    """Scenario or clause -> digest of the text that its tests were written for."""


def load_register(folder: Path = SPEC) -> Register:
    return Register(
        pending=read_pending((folder / "pending.yaml").read_text(encoding="utf-8")),
        excluded=_read(folder / "exclusions.yaml"),
        acknowledged=_read(folder / "acknowledged.yaml"),
    )


def read_pending(text: str) -> dict[str, str]:
    """Subject -> ids, turned round. An id below two subjects keeps the last; ``pending-repeated`` is the gates'."""
    tree = parse_own(text, origin="spec/pending.yaml")
    return {each: subject for subject, ids in tree.items() for each in ids}


def write_acknowledged(digests: Mapping[str, str], folder: Path = SPEC) -> None:
    head = "# The text that each bound id's tests were written for. python -m conformance.harness.binding acknowledge\n"
    (folder / "acknowledged.yaml").write_text(head + dump(dict(sorted(digests.items()))), encoding="utf-8")


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    tree = parse_own(path.read_text(encoding="utf-8"), origin=path.name)
    return {name: str(value) for name, value in tree.items()}
