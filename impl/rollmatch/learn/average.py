"""An exponential average of the policy's weights, which may stand in their place for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollmatch.errors import LaunchError


class WeightAverage:
    """``average = keep * average + (1 - keep) * policy`` after every optimizer step, of all weights that learn.

    As TRL's ``sync_target_model`` with ``teacher_update_rate`` 1 - keep. It begins as the policy before training, and
    is kept in float32.

    >>> policy = nn.Linear(1, 1, bias=False)
    >>> average = WeightAverage(policy, keep=0.75)
    >>> _ = nn.init.constant_(policy.weight, 1.0), average.begin(), nn.init.constant_(policy.weight, 5.0)
    >>> average.update()
    >>> with average.in_place():
    ...     policy.weight.item()
    2.0
    >>> policy.weight.item()
    5.0
    """

    def __init__(self, model: nn.Module, *, keep: float) -> None:
        self.model = model
        self.keep = keep
        self.weights: dict[str, Tensor] = {}
        """By name; empty before training: the policy itself."""

    @property
    def _learning(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def begin(self) -> None:
        """Take the policy's weights, unless those of a checkpoint are there."""
        learning = self._learning
        if not self.weights:
            self.weights = {name: weight.detach().float().clone() for name, weight in learning.items()}
        self.weights = {name: average.to(learning[name].device) for name, average in self.weights.items()}

    def update(self) -> None:
        """After an optimizer step."""
        for name, weight in self._learning.items():
            self.weights[name].lerp_(weight.detach().float(), 1 - self.keep)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy with these weights while this lasts."""
        weights = dict(self.model.named_parameters())
        own = {name: weights[name].data for name in self.weights}
        for name, average in self.weights.items():
            weights[name].data = average.to(own[name])
        try:
            yield
        finally:
            for name, weight in own.items():
                weights[name].data = weight

    def save(self, path: Path) -> None:
        """Write the file of a checkpoint."""
        save_file({name: average.contiguous() for name, average in self.weights.items()}, path)

    def restore(self, path: Path) -> None:
        """Read it back. Errors: ``average-missing``."""
        if not path.is_file():
            problem, remedy = "is not there", "Name a checkpoint of a run that had this average as its teacher."
            raise LaunchError(problem, code="average-missing", key=str(path), remedy=remedy)
        self.weights = load_file(path)
