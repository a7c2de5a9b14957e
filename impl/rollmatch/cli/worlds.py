"""The configured environment. Needs no torch, so that a wrong name is told before anything starts."""

from collections.abc import Sequence

from rollmatch.config import RunConfig
from rollmatch.errors import ErrorList, TargetError
from rollmatch.objectives.environment import MakeEnvironment, load_environment, show
from rollmatch.records import Sample


def load_world(config: RunConfig) -> MakeEnvironment | None:
    """What makes environments; None where none is named. Errors: ``EnvironmentUnknown``, ``EnvironmentMisfit``."""
    told = config.custom.extra.environment
    if told.name is None:
        return None
    return load_environment(told.name, told.options, key="custom.extra.environment.name")


def show_world(config: RunConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Samples with what their environments show first; as they are where there is no environment.

    Errors: ``ErrorList`` of what environments could not begin with.
    """
    make = load_world(config)
    if make is None:
        return list(samples)
    prompts = config.custom.prompts
    system = (("system", prompts.system),) if prompts.system else ()
    asked = (*system, ("user", prompts.user))
    shown: list[Sample] = []
    errors: list[TargetError] = []
    for sample in samples:
        try:
            shown.append(show(make, sample, run_seed=config.training.seed, asked=asked))
        except TargetError as error:
            errors.append(error)
    if errors:
        raise ErrorList(errors)
    return shown
