"""``rollmatch-judge-trainer OPTIONS -- COMMAND``: judge a trainer by what it does to a rollout server.

COMMAND trains with a rollout server at {url} (also {host} and {port}), opens its group at {group_port}, begins with the
model of {model}, takes {steps} optimizer steps with rollouts of their own, on {ranks} ranks, and may write below {out}.
The same values are in the environment, as ROLLMATCH_JUDGE_URL and so on. Its weights must change with every step: give
it a learning rate without warm-up and rewards that differ.
"""

import argparse
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from conformance.judge.rule_sets import TRAINERS, judged_by
from conformance.judge.servers.command import INTERRUPTED, explained, leave, say, write_reports
from conformance.judge.servers.options import CODES, REPORTS, add_reports, is_installed
from conformance.judge.servers.report_commands import add_gaps, add_rules, check_files
from conformance.judge.servers.reports import meaning_of
from conformance.judge.servers.verdicts import summary

EXTRA = "pip install . './conformance/judge[trainers]' in a clone"
NEEDED = ("torch", "transformers", "rollmatch", "starlette", "uvicorn")
DIALECTS = ("native", "swift", "trl", "vllm")
DTYPES = ("bfloat16", "float16", "float32")


def main(arguments: Sequence[str] | None = None, *, prog: str = "rollmatch-judge-trainer") -> int:
    """Judge, print and write. Returns the exit code that ``--help`` explains."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    place = words.index("--") if "--" in words else len(words)
    parser = make_parser(prog)
    options, unknown = parser.parse_known_args(words[:place])
    if unknown:
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}; COMMAND stands behind --")
    _check(parser, options, words[place + 1 :])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the command is ended, too
    return judge_trainer(options, words[place + 1 :], prog)


def run() -> NoReturn:
    """``main`` as a process of its own."""
    leave(main)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """All options before ``--``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=CODES,
        usage=f"{prog} --dialect D --model DIR [options] -- COMMAND",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dialect", choices=DIALECTS, required=True, help="of the server that the trainer expects")
    parser.add_argument("--model", metavar="DIR", required=True, help="directory of a small model, served on the CPU")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of what it sends; default: float32")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps; default: 3")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="learner processes, for {ranks}; default: 1")
    parser.add_argument("--late", type=float, default=8.0, metavar="S", help="seconds of a late answer; default: 8")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds of one run; default: 300")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="start no run after; default: 30")
    parser.add_argument("--check", action="append", default=[], metavar="ID", help="only this one and what it requires")
    add_rules(parser)
    add_gaps(parser)
    add_reports(parser)
    return parser


def judge_trainer(options: argparse.Namespace, words: Sequence[str], prog: str) -> int:
    """What can be used is given."""
    judgement, checks = judgement_of(options, words, prog)
    say(f"{judgement.title}: dialect {options.dialect}, model {options.model}, {options.steps} steps")
    is_ended = False
    try:
        judgement.look()
        for check in checks:
            row = judgement.verdict_of(check)
            if not judgement.preflight.problem:  # which is said once, at the end
                say(row.line)
        judgement.is_finished = True
    except KeyboardInterrupt:
        is_ended = True
    write_reports(judgement, options)
    say(*explained(judgement), f"\n{summary(judgement.rows)}; {judgement.seconds:g} s")
    code = judgement.exit_code
    meaning = judgement.preflight.problem or meaning_of(code, judgement.rows)
    say("not finished" if is_ended else f"{code}: rules {judgement.rules}: {meaning}")
    return INTERRUPTED if is_ended else code


def judgement_of(options: argparse.Namespace, words: Sequence[str], prog: str) -> tuple[Any, Any]:
    """The judgement and the checks that it is to ask."""
    from transformers.utils.logging import disable_progress_bar

    from conformance.judge.servers.broken.engine import TinyEngine
    from conformance.judge.servers.broken.switches import Switches
    from conformance.judge.servers.gaps import load_gaps
    from conformance.judge.trainers.checks import BY_ID
    from conformance.judge.trainers.judgement import TrainerJudgement, with_required
    from conformance.judge.trainers.runs import TrainerSubject, command_launch

    disable_progress_bar()  # it would stand between the verdicts
    subject = TrainerSubject(
        launch=command_launch(words),
        engine=TinyEngine(options.model, Switches()),
        dialect=options.dialect,
        dtype=options.dtype,
        steps=options.steps,
        ranks=options.ranks,
        limit_s=options.limit,
        late_s=options.late,
    )
    own = [prog, "--dialect", options.dialect, "--model", options.model, "--dtype", options.dtype]
    own += ["--steps", str(options.steps), "--ranks", str(options.ranks)]
    judgement = TrainerJudgement(
        subject,
        lambda check: shlex.join([*own, *(["--check", check] if check else []), "--", *words]),
        gaps=load_gaps(options.known_gaps, BY_ID) if options.known_gaps else {},
        rules=options.rules,
        budget_s=60 * options.minutes,
        name=shlex.join(words),
    )
    return judgement, judged_by(options.rules, TRAINERS, with_required(options.check))


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, words: Sequence[str]) -> None:
    """What is set must be usable, before anything is started."""
    if not words:
        parser.error("COMMAND: nothing stands behind --")
    if missing := [name for name in NEEDED if not is_installed(name)]:
        parser.error(f"needs {' and '.join(missing)}; {EXTRA}")
    if not (Path(options.model) / "config.json").is_file():
        parser.error(f"--model: {options.model} is not the directory of a model")
    for name, least in (("ranks", 1), ("late", 0.0), ("limit", 1.0), ("minutes", 0.0)):
        if not getattr(options, name) >= least:
            parser.error(f"--{name}: must be at least {least:g}")
    if options.steps < 3:
        parser.error("--steps: needs at least 3; the second step is disturbed, and the third shows what follows")
    check_files(parser, options, *REPORTS)
    from conformance.judge.trainers.checks import BY_ID

    if unknown := set(options.check) - BY_ID.keys():
        parser.error(f"--check: there is no check {', '.join(sorted(unknown))}")
    if "{" not in words[0] and shutil.which(words[0]) is None:
        parser.error(f"COMMAND: there is no program {words[0]}")


if __name__ == "__main__":
    run()
