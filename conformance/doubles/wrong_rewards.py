"""Rewards as newcomers write them; but for ``right``, each is wrong in its own way. Tests copy this file."""


def needs_column(completions, solution, **columns):
    return [1.0 for _ in completions]


def needs_key(answer, sample):
    return float(answer == sample.metadata["solution"])


def forgets(answer, sample):
    answer == "2"  # noqa: B015 - no return


def one_for_all(completions, **columns):
    return 1.0


def one_for_two(completions, **columns):
    return [1.0]


def says(answer, sample):
    return "good"


def divides(answer, sample):
    return float("nan")


def counts(answer, sample):
    raise ValueError("no number in " + answer)


def right(answer, sample):
    return float(answer == sample.metadata["answer"])


def limits_time(answer, sample):
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 0.0
