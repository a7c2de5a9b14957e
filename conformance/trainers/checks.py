"""What a trainer owes a rollout server, judged by what arrives there."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from conformance.servers.check import MUST, SHOULD, Check, Judge
from conformance.servers.exchange import Exchange
from conformance.trainers.arrivals import Event, after, of_kind, rounds_of
from conformance.trainers.reading import disturbed, ended, events_of, last_line, repeats, since_restart, told, unlike
from conformance.trainers.runs import AGAIN, PLAIN, TrainerRuns, ending_of
from conformance.trainers.server import BUSY, LATE, RESTART, SHORT, UNAVAILABLE

REGISTERED: list[Check] = []
FIRST, ENDS, SEEDS = "weights-before-the-first-rollout", "the-run-ends-well", "every-call-has-a-seed"


def asking(*names: str) -> Callable[[TrainerRuns], Exchange]:
    """The first run, with the events of the others beside it."""

    def ask(runs: TrainerRuns) -> Exchange:
        first = runs.run(names[0])
        others = {f"{name}_events": runs.run(name).notes["events"] for name in names[1:]}
        return Exchange(calls=first.calls, notes=first.notes | others, untestable=first.untestable)

    return ask


def check(check_id: str, sentence: str, *runs: str, **fields: Any) -> Callable[[Judge], Judge]:
    """Register the decorated function; ``runs`` are those that it reads, the plain one where none is named."""

    def register(judge: Judge) -> Judge:
        if runs and runs[0] != PLAIN:
            fields["requires"] = (ENDS, *fields.get("requires", ()))
        REGISTERED.append(
            Check(check_id=check_id, sentence=sentence, ask=asking(*(runs or (PLAIN,))), judge=judge, **fields)
        )
        return judge

    return register


@check(ENDS, "Without a fault, the command ends with exit code 0.")
def judge_end(exchange: Exchange) -> str:
    code = ending_of(exchange)
    return "" if code == 0 else f"{ended(code)}: {last_line(exchange)}"


@check(FIRST, "A whole update is sent before the first rollout is requested.")
def judge_first(exchange: Exchange) -> str:
    early = rounds_of(events_of(exchange))[0]
    return f"{len(early)} calls for rollouts came before any update" if early else ""


@check(
    "weights-after-every-step",
    "Between the rollouts of one step and those of the next, an update is sent.",
    requires=(FIRST,),
)
def judge_every_step(exchange: Exchange) -> str:
    num_rounds, steps = sum(map(bool, rounds_of(events_of(exchange))[1:])), exchange.notes["steps"]
    return f"rollouts followed {num_rounds} updates, not {steps}, one for each step" if num_rounds < steps else ""


@check(
    "updates-hold-new-weights",
    "Every update after the first holds other weights than the one before it.",
    requires=(FIRST,),
)
def judge_new(exchange: Exchange) -> str:
    digests = [event["digest"] for event in of_kind(events_of(exchange), "update")]
    same = [number for number, (one, other) in enumerate(pairwise(digests), start=2) if one == other]
    return f"update {same[0]} of {len(digests)} repeats the weights of the one before it" if same else ""


@check(
    "the-first-update-is-the-checkpoint",
    "The first update holds the values of the checkpoint that training began with.",
    requires=(FIRST,),
)
def judge_checkpoint(exchange: Exchange) -> str:
    return told(of_kind(events_of(exchange), "update")[:1], "not_the_checkpoint", "other values")


@check("every-tensor-is-sent", "Every update holds every tensor of the model.", requires=(FIRST,))
def judge_missing(exchange: Exchange) -> str:
    return told(of_kind(events_of(exchange), "update"), "missing", "left out")


@check("only-tensors-of-the-model-are-sent", "An update holds nothing that the model does not have.", requires=(FIRST,))
def judge_unknown(exchange: Exchange) -> str:
    return told(of_kind(events_of(exchange), "update"), "unknown", "unknown")


@check("a-tensor-is-sent-once", "An update holds no tensor twice.", requires=(FIRST,))
def judge_twice(exchange: Exchange) -> str:
    return told(of_kind(events_of(exchange), "update"), "twice", "sent twice")


@check("shapes-are-the-model-s", "Every tensor has its shape in the model.", requires=(FIRST,))
def judge_shapes(exchange: Exchange) -> str:
    return told(of_kind(events_of(exchange), "update"), "shapes", "another shape")


@check("dtypes-are-the-server-s", "Every tensor has the dtype that the server holds.", requires=(FIRST,))
def judge_dtypes(exchange: Exchange) -> str:
    return told(of_kind(events_of(exchange), "update"), "dtypes", "another dtype")


@check(
    "nothing-is-requested-during-an-update",
    "No rollout is requested or running while an update is sent; one that was paused may be running.",
)
def judge_overlap(exchange: Exchange) -> str:
    return "; ".join(event["what"] for event in of_kind(events_of(exchange), "overlap")[:3])


@check(
    "one-sender",
    "One process opens a group, however many ranks learn; no second group while one is open.",
    requires=(FIRST,),
)
def judge_sender(exchange: Exchange) -> str:
    is_open = False
    for event in events_of(exchange):
        if event["kind"] == "open" and is_open:
            return f"a second group was asked for while one was open (answered {event['status']})"
        is_opened = event["kind"] == "open" and event["status"] < 400
        is_open = is_opened or (is_open and event["kind"] != "close")
    return ""


@check(
    "the-world-size-is-the-workers-and-one",
    "The group's size is the server's workers and one learner.",
    requires=(FIRST,),
)
def judge_size(exchange: Exchange) -> str:
    sizes = [event["world_size"] for event in of_kind(events_of(exchange), "open")]
    return f"groups of {sizes} were asked for, not of 2" if set(sizes) != {2} else ""


@check("the-group-is-closed", "The group is closed before the run ends.", grade=SHOULD, requires=(FIRST,))
def judge_closed(exchange: Exchange) -> str:
    last = [event["kind"] for event in events_of(exchange) if event["kind"] in ("open", "close")][-1:]
    return "" if last == ["close"] else "the group is left open"


@check(SEEDS, "Every call for rollouts has a seed, or one for each request.", grade=SHOULD)
def judge_seeds(exchange: Exchange) -> str:
    calls = of_kind(events_of(exchange), "generate")
    bare = sum(None in event["seeds"] for event in calls)
    return f"{bare} of {len(calls)} calls have none" if bare else ""


@check("seeds-differ", "No two requests of a run have the same seed.", grade=SHOULD, requires=(SEEDS,))
def judge_different(exchange: Exchange) -> str:
    seeds = [seed for event in of_kind(events_of(exchange), "generate") for seed in event["seeds"]]
    return f"{len(set(seeds))} different seeds in {len(seeds)}" if len(set(seeds)) < len(seeds) else ""


@check(
    "seeds-repeat", "A second run of the same command has the seeds of the first.", PLAIN, AGAIN,
    grade=SHOULD, requires=(SEEDS, ENDS),
)  # fmt: skip
def judge_repeated(exchange: Exchange) -> str:
    def seeds(calls: Sequence[Event]) -> list[int]:
        return sorted(seed for event in calls for seed in event["seeds"])

    return unlike(exchange, seeds, "seeds")


@check(
    "calls-repeat", "A second run requests the same prompts in the same calls and order.", PLAIN, AGAIN,
    grade=SHOULD, requires=(ENDS,),
)  # fmt: skip
def judge_calls(exchange: Exchange) -> str:
    def chunks(calls: Sequence[Event]) -> list[list[str]]:
        return sorted(event["prompts"] for event in calls)

    return unlike(exchange, chunks, "prompts of calls")


@check(
    "a-late-answer-is-waited-for", "A late answer is waited for; its call is not repeated.", LATE,
    requires=("weights-after-every-step",),
)  # fmt: skip
def judge_late(exchange: Exchange) -> str:
    if repeats(exchange):
        return "the call was repeated before it was answered"
    code, num_rounds = ending_of(exchange), sum(map(bool, rounds_of(events_of(exchange))[1:]))
    if code != 0:
        return f"{ended(code)}: {last_line(exchange)}"
    return "" if num_rounds >= exchange.notes["steps"] else "the run ended early"


def judge_ignored(exchange: Exchange) -> str:
    if repeats(exchange):
        return ""
    code = ending_of(exchange)
    if code is None:
        return "the run hangs"
    updates = of_kind(list(after(events_of(exchange), disturbed(exchange))), "update")
    if code == 0 or updates:
        return f"the call was not repeated, {len(updates)} updates followed, and {ended(code)}"
    return ""


for _name, _fault, _what in (
    ("a-short-answer-is-not-learned-from", SHORT, "After an answer with fewer responses than requested"),
    ("a-busy-server-is-not-ignored", BUSY, "After a 429"),
    ("an-unavailable-server-is-not-ignored", UNAVAILABLE, "After a 503"),
):
    check(_name, f"{_what}, the call is repeated, or the run ends with an error.", _fault)(judge_ignored)


def judge_asked_again(exchange: Exchange) -> str:
    if not repeats(exchange):
        return f"the call was not repeated; {ended(ending_of(exchange))}: {last_line(exchange)}"
    return "" if ending_of(exchange) == 0 else f"{ended(ending_of(exchange))}: {last_line(exchange)}"


for _name, _fault, _required in (
    ("a-busy-server-is-asked-again", BUSY, "a-busy-server-is-not-ignored"),
    ("an-unavailable-server-is-asked-again", UNAVAILABLE, "an-unavailable-server-is-not-ignored"),
):
    check(
        _name, f"After a {_fault} with Retry-After, the call is repeated, and the run ends well.", _fault,
        grade=SHOULD, requires=(_required,),
    )(judge_asked_again)  # fmt: skip


@check(
    "a-restarted-server-gets-weights-first",
    "After the server was restarted, it gets an update before it is asked for rollouts, or the run ends with an error.",
    RESTART,
)
def judge_restarted(exchange: Exchange) -> str:
    for event in since_restart(exchange):
        if event["kind"] == "update":
            return ""
        if event["kind"] == "generate":
            return "rollouts were requested of the first weights, which the restarted server holds"
    code = ending_of(exchange)
    return "" if code else f"{ended(code)}, although the server was restarted"


@check(
    "the-run-outlives-a-restart",
    "After the server was restarted, the run sends weights anew and ends well.",
    RESTART,
    grade=SHOULD,
    requires=("a-restarted-server-gets-weights-first",),
)
def judge_outlives(exchange: Exchange) -> str:
    code = ending_of(exchange)
    return "" if code == 0 else f"{ended(code)}: {last_line(exchange)}"


CHECKS: tuple[Check, ...] = tuple(REGISTERED)
BY_ID = {each.check_id: each for each in CHECKS}
assert len(BY_ID) == len(CHECKS)
assert all(required in BY_ID for each in CHECKS for required in each.requires)
assert {each.grade for each in CHECKS} == {MUST, SHOULD}
