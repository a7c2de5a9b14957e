"""Options of ``rollmatch-judge URL``, and what is refused of them before anything is called."""

import argparse
import importlib.util
from pathlib import Path

from conformance.judge.servers.dialect_plugins import DialectUnusable, kind_of, kinds
from conformance.judge.servers.gaps import FOLDER as GAPS
from conformance.judge.servers.numbers import SMALL, TOLERANCE
from conformance.judge.servers.profiles import PROFILES
from conformance.judge.servers.report_commands import add_gaps, add_rules, check_files
from conformance.judge.servers.reports import MEANINGS
from conformance.judge.servers.subject import KEY_VARIABLE

WEIGHTS = "pip install . './conformance/judge[weights]' in a clone"
REPORTS = {
    "json": "everything that was sent and came back",
    "junit": "JUnit",
    "page": "an HTML page",
    "badge": "an SVG",
}
"""Option -> what it writes."""
NVIDIA = tuple(Path("/dev").glob("nvidia[0-9]*"))
"""GPUs of this machine."""
_WITH_GAPS = "of " + ", ".join(sorted(path.stem for path in GAPS.glob("*.yaml")))
KEY_TEXT = f"The environment variable {KEY_VARIABLE} holds the server's key, where it has one.\n\n"
CODES = "exit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in sorted(MEANINGS.items()))


def make_parser(prog: str = "rollmatch-judge") -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Judge a running rollout server. Also: badge, compare, replay, schema.",
        epilog=KEY_TEXT + CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="of the running server, such as http://127.0.0.1:8000")
    texts = "http: calls alone; weights: updates, too; full: also what may stop the server (with --dangerous)"
    parser.add_argument("--profile", choices=PROFILES, help=f"{texts}; default: weights with --transport, else http")
    parser.add_argument("--dialect", metavar="NAME|FILE.py", default="auto", help="default: by routes; see the guide")
    parser.add_argument("--model", metavar="DIR|ID", help=f"what it serves, to compare numbers; needs {WEIGHTS}")
    parser.add_argument(
        "--tolerance", type=float, metavar="NATS", help=f"of numbers beside those of --model; default: {TOLERANCE:g}"
    )
    parser.add_argument(
        "--transport",
        metavar="T",
        help="how weights reach its workers: gloo, or nccl with a GPU on this machine; needs --model",
    )
    parser.add_argument(
        "--group-host", metavar="HOST", help="address at which its workers and the judge open the group of a transfer"
    )
    parser.add_argument("--dangerous", action="store_true", help="also checks that may stop the server")
    parser.add_argument(
        "--minutes", type=float, default=15.0, metavar="M", help="start no check after so many; default: 15"
    )
    parser.add_argument("--check", action="append", default=[], metavar="ID", help="only this one; can be repeated")
    add_rules(parser)
    add_gaps(parser)
    parser.add_argument(
        "--server-name",
        metavar="NAME-VERSION",
        default="",
        help=f"what it is; without --known-gaps, gaps are known {_WITH_GAPS}",
    )
    parser.add_argument(
        "--started-by", metavar="COMMAND", default="", help="how the server was started; kept in the report"
    )
    add_reports(parser)
    return parser


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Files that are written at the end."""
    for name, text in REPORTS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {text}")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What is set must be usable, before anything is called."""
    options.profile = options.profile or ("weights" if options.transport else "http")
    if not options.url.startswith(("http://", "https://")):
        parser.error(f"URL: {options.url} does not begin with http:// or https://")
    _check_dialect(parser, options)
    if options.profile == "http" and options.transport and not options.check:
        parser.error("--transport: the http profile sends no weights; say --profile weights")
    if options.group_host and not options.transport:
        parser.error("--group-host: without --transport, there is no group")
    if options.transport and not options.model:
        parser.error("--transport: the weights come from --model DIR")
    if options.transport == "nccl" and not (NVIDIA and is_installed("vllm")):
        parser.error("--transport: nccl needs a GPU that the server does not use, and vLLM, on this machine")
    if options.tolerance is not None and not options.model:
        parser.error("--tolerance: without --model, no numbers are compared")
    if options.tolerance is not None and not 0 < options.tolerance <= SMALL:
        parser.error(f"--tolerance: {options.tolerance:g} is not above 0 and at most {SMALL:g}")
    name, _, version = options.server_name.rpartition("-")
    if options.server_name and not (name and version):
        parser.error(f"--server-name: {options.server_name} is no NAME-VERSION, such as ms-swift-4.6.0")
    missing = [name for name in ("torch", "rollmatch") if options.model and not is_installed(name)]
    if missing:
        parser.error(f"--model: needs {' and '.join(missing)}; {WEIGHTS}")
    check_files(parser, options, *REPORTS)


def _check_dialect(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """There is one of that name or in that file; it, or one that may be found, has the transport."""
    try:
        named = kinds().values() if options.dialect == "auto" else [kind_of(options.dialect)]
    except DialectUnusable as error:
        parser.error(f"--dialect: {error}")
    offered = {transport for kind in named for transport in kind.transports}
    if options.transport not in (None, *offered):
        parser.error(f"--transport: {options.transport} is none of {', '.join(sorted(offered))}")


def is_installed(package: str) -> bool:
    """Whether it can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
