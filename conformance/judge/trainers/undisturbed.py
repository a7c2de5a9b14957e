"""Checks of runs without a fault: weights, groups, seeds and calls."""

from collections.abc import Sequence
from itertools import pairwise

from conformance.judge.servers.check import SHOULD
from conformance.judge.servers.exchange import Exchange
from conformance.judge.trainers.arrivals import Event, of_kind, rounds_of
from conformance.judge.trainers.reading import ended, events_of, last_line, unlike, wrong_in
from conformance.judge.trainers.registry import ENDS, FIRST, SEEDS, SENDER, WEIGHTS, WHOLE, WRONG, check
from conformance.judge.trainers.runs import AGAIN, PLAIN, ending_of


@check(ENDS, "Without a fault, the command MUST end with exit code 0.", clause=f"{WRONG}#1")
def judge_end(exchange: Exchange) -> str:
    code = ending_of(exchange)
    return "" if code == 0 else f"{ended(code)}: {last_line(exchange)}"


@check(FIRST, "A whole update MUST arrive before the first rollout is requested.", clause=f"{WEIGHTS}#1")
def judge_first(exchange: Exchange) -> str:
    early = rounds_of(events_of(exchange))[0]
    return f"{len(early)} calls for rollouts came before any update" if early else ""


@check(
    "weights-after-every-step",
    "Between the rollouts of one step and those of the next, an update MUST arrive.",
    requires=(FIRST,),
    clause=f"{WEIGHTS}#2",
)
def judge_every_step(exchange: Exchange) -> str:
    num_rounds, steps = sum(map(bool, rounds_of(events_of(exchange))[1:])), exchange.notes["steps"]
    return f"rollouts followed {num_rounds} updates, not {steps}, one for each step" if num_rounds < steps else ""


@check(
    "updates-hold-new-weights",
    "Every update after the first MUST hold other weights than the one before it.",
    requires=(FIRST,),
    clause=f"{WEIGHTS}#3",
)
def judge_new(exchange: Exchange) -> str:
    digests = [event["digest"] for event in of_kind(events_of(exchange), "update")]
    same = [number for number, (one, other) in enumerate(pairwise(digests), start=2) if one == other]
    return f"update {same[0]} of {len(digests)} repeats the weights of the one before it" if same else ""


@check(
    "the-first-update-is-the-checkpoint",
    "The first update MUST hold the values of the checkpoint that training began with.",
    requires=(FIRST,),
    clause=f"{WEIGHTS}#4",
)
def judge_checkpoint(exchange: Exchange) -> str:
    return wrong_in(exchange, "not_the_checkpoint", "other values", only_first=True)


@check(
    "every-tensor-is-sent", "Every update MUST hold every tensor of the model.", requires=(FIRST,), clause=f"{WHOLE}#1"
)
def judge_missing(exchange: Exchange) -> str:
    return wrong_in(exchange, "missing", "left out")


@check(
    "only-tensors-of-the-model-are-sent",
    "An update MUST hold nothing that the model does not have.",
    requires=(FIRST,),
    clause=f"{WHOLE}#2",
)
def judge_unknown(exchange: Exchange) -> str:
    return wrong_in(exchange, "unknown", "unknown")


@check("a-tensor-is-sent-once", "An update MUST hold no tensor twice.", requires=(FIRST,), clause=f"{WHOLE}#3")
def judge_twice(exchange: Exchange) -> str:
    return wrong_in(exchange, "twice", "sent twice")


@check(
    "shapes-are-the-model-s", "Every tensor MUST have its shape in the model.", requires=(FIRST,), clause=f"{WHOLE}#4"
)
def judge_shapes(exchange: Exchange) -> str:
    return wrong_in(exchange, "shapes", "another shape")


@check(
    "dtypes-are-the-server-s",
    "Every tensor MUST have the dtype that the server holds.",
    requires=(FIRST,),
    clause=f"{WHOLE}#5",
)
def judge_dtypes(exchange: Exchange) -> str:
    return wrong_in(exchange, "dtypes", "another dtype")


@check(
    "nothing-is-requested-during-an-update",
    "Rollouts MUST NOT be requested or running while an update is sent, unless generation was paused.",
    clause=f"{SENDER}#1",
)
def judge_overlap(exchange: Exchange) -> str:
    return "; ".join(event["what"] for event in of_kind(events_of(exchange), "overlap")[:3])


@check(
    "one-sender",
    "One process MUST open the group, however many ranks learn, and no second group while one is open.",
    requires=(FIRST,),
    clause=f"{SENDER}#2",
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
    "The group's size MUST be the server's workers and one learner.",
    requires=(FIRST,),
    clause=f"{SENDER}#3",
)
def judge_size(exchange: Exchange) -> str:
    sizes = [event["world_size"] for event in of_kind(events_of(exchange), "open")]
    return f"groups of {sizes} were asked for, not of 2" if set(sizes) != {2} else ""


@check(
    "the-group-is-closed",
    "The group SHOULD be closed before the run ends.",
    grade=SHOULD,
    requires=(FIRST,),
    clause=f"{SENDER}#4",
)
def judge_closed(exchange: Exchange) -> str:
    last = [event["kind"] for event in events_of(exchange) if event["kind"] in ("open", "close")][-1:]
    return "" if last == ["close"] else "the group is left open"


@check(
    SEEDS, "Every call for rollouts SHOULD have a seed, or one for each request.", grade=SHOULD, clause=f"{SENDER}#5"
)
def judge_seeds(exchange: Exchange) -> str:
    calls = of_kind(events_of(exchange), "generate")
    bare = sum(None in event["seeds"] for event in calls)
    return f"{bare} of {len(calls)} calls have none" if bare else ""


@check(
    "seeds-differ",
    "Calls and requests of a run SHOULD have different seeds.",
    grade=SHOULD,
    requires=(SEEDS,),
    clause=f"{SENDER}#6",
)
def judge_different(exchange: Exchange) -> str:
    seeds = [seed for event in of_kind(events_of(exchange), "generate") for seed in event["seeds"]]
    return f"{len(set(seeds))} different seeds in {len(seeds)}" if len(set(seeds)) < len(seeds) else ""


@check(
    "seeds-repeat",
    "A second run of the same command SHOULD have the seeds of the first.",
    PLAIN,
    AGAIN,
    grade=SHOULD,
    requires=(SEEDS, ENDS),
    clause=f"{SENDER}#7",
)
def judge_repeated(exchange: Exchange) -> str:
    def seeds(calls: Sequence[Event]) -> list[int]:
        return sorted(seed for event in calls for seed in event["seeds"])

    return unlike(exchange, seeds, "seeds")


@check(
    "calls-repeat",
    "A second run SHOULD request the same prompts in the same calls and order.",
    PLAIN,
    AGAIN,
    grade=SHOULD,
    requires=(ENDS,),
    clause=f"{SENDER}#8",
)
def judge_calls(exchange: Exchange) -> str:
    def chunks(calls: Sequence[Event]) -> list[list[str]]:
        return sorted(event["prompts"] for event in calls)

    return unlike(exchange, chunks, "prompts of calls")
