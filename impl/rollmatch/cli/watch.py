"""Trainer callback: one journal event and one line per step, and a clean stop on signals."""

import signal
import time
from types import FrameType

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rollmatch.report.console import StepConsole
from rollmatch.step_report import PHASES
from rollmatch.trainer import RolloutTrainer

UNDERFULL_STEPS = 10
"""Consecutive under-filled steps before a warning."""


class RunWatcher(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes the ``step`` event, prints its line, and stops after the current step on SIGINT or SIGTERM."""

    def __init__(self, console: StepConsole | None, *, min_fill: float | None) -> None:
        self.console = console
        self.min_fill = min_fill
        self.trainer: RolloutTrainer | None = None
        self.stop_signal: int | None = None
        self._last_step_at = time.perf_counter()
        self._num_underfull = 0

    def listen(self) -> None:
        """Take SIGINT and SIGTERM; a second one acts as if nobody listened."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def agree_to_stop(self) -> int | None:
        """The signal that some rank has received, the same on every rank (signals reach ranks at different steps)."""
        assert self.trainer is not None
        received = [number for number in self.trainer.source.ranks.gather(self.stop_signal) if number is not None]
        if received:
            self.stop_signal = received[0]
        return received[0] if received else None

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Each epoch has an order of its own, also the one a resumed run begins in the middle of."""
        assert self.trainer is not None
        self.trainer.order.set_epoch(int(state.epoch or 0))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Time the first step from here."""
        self._last_step_at = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """On a requested stop: save, then end."""
        if self.agree_to_stop() is not None:
            control.should_save = True
            control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: object
    ) -> None:
        """One event and one line per logged optimizer step."""
        if "loss" not in logs or self.trainer is None:
            return
        now = time.perf_counter()
        fields = make_step_fields(logs, step=state.global_step, step_s=now - self._last_step_at)
        fields["policy_version"] = self.trainer.source.fence.backend.policy_version
        self._last_step_at = now
        event = self.trainer.source.journal.write("step", **fields)
        if self.console is not None:
            self.console.step(event)
            self._tell_if_underfull(float(logs["fill"]))

    def _tell_if_underfull(self, fill: float) -> None:
        if self.min_fill is None or self.console is None:
            return
        self._num_underfull = self._num_underfull + 1 if fill < self.min_fill else 0
        if self._num_underfull == UNDERFULL_STEPS:
            self.console.warn(
                f"rows have been filled less than {self.min_fill:.0%} for {UNDERFULL_STEPS} steps: raise "
                "training.per_device_train_batch_size or lower global_max_length"
            )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_signal = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if self.console is not None:
            self.console.warn("stopping after this step, with a checkpoint (again to stop at once)")


def make_step_fields(logs: dict[str, float], *, step: int, step_s: float) -> dict[str, object]:
    """The flat log line as the journal's ``step`` event: drops and phases in groups of their own."""
    groups = ("drop/", "time/", "overlap/", "staleness/")
    fields: dict[str, object] = {name: value for name, value in logs.items() if not name.startswith(groups)}
    fields["drops"] = {n.removeprefix("drop/"): int(v) for n, v in logs.items() if n.startswith("drop/") and v}
    fields["phase_s"] = {phase: round(logs[f"time/{phase}_s"], 4) for phase in PHASES if f"time/{phase}_s" in logs}
    by_rank = [v for n, v in logs.items() if n.startswith("time/rollout_s/rank")]
    fields["rollout_s_by_rank"] = [round(seconds, 4) for seconds in by_rank]
    fields["overlap"] = {n.removeprefix("overlap/"): round(v, 4) for n, v in logs.items() if n.startswith("overlap/")}
    fields["staleness"] = {n.removeprefix("staleness/"): int(v) for n, v in logs.items() if n.startswith("staleness/")}
    return fields | {"step": step, "step_s": round(step_s, 4)}
