"""Trainer callbacks: one journal event and one line per step, a clean stop, scenes for Weights & Biases."""

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.optim import Optimizer
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rollmatch.errors import ConfigError
from rollmatch.records import NUM_BINS, rounded
from rollmatch.report.console import StepConsole
from rollmatch.report.evaluations import Scene, load_evaluation
from rollmatch.report.scenes import image_path
from rollmatch.training.evaluation import evaluation_file
from rollmatch.training.report import PHASES
from rollmatch.training.trainer import RolloutTrainer

NUM_IMAGES = 8
"""Scenes of an evaluation that are sent as images."""
OF_THE_MACHINE = frozenset({"seconds", "tokens_per_s"})
"""Metrics that differ between ranks, so that one of them might end training alone."""
UNDERFULL_STEPS = 10
"""Consecutive under-filled steps before a warning."""
FLAT_STEPS = 3
"""Consecutive steps without any difference in reward before a warning."""
MANY_CUT = 0.5
"""Share of completions at the length limit that explains equal rewards."""


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: the terminal was closed."""


def _is_ignored(number: signal.Signals) -> bool:
    """Whether ``nohup`` keeps the end of the terminal from this process."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class RunWatcher(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes the ``step`` event, prints its line, and stops after the current step on SIGINT, SIGTERM or SIGHUP."""

    def __init__(self, console: StepConsole | None, *, min_fill: float | None) -> None:
        self.console = console
        self.min_fill = min_fill
        self.machine_figures: Callable[[], Mapping[str, object]] = dict
        """Fields of the ``step`` event about the machine."""
        self.trainer: RolloutTrainer | None = None
        self.stop_signal: int | None = None
        self.evaluated_at: int | None = None
        """Optimizer steps before the last evaluation."""
        self._last_step_at = time.perf_counter()
        self._num_underfull = self._num_flat = 0
        self._has_warned_of_rate = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take ``STOPPING`` inside; a second signal acts as if nobody listened. Only a main thread can take any."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = [number for number in STOPPING if is_main and not _is_ignored(number)]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agree_to_stop(self) -> int | None:
        """The signal that some rank has received, the same on every rank (signals reach ranks at different steps)."""
        assert self.trainer is not None
        received = [number for number in self.trainer.source.ranks.gather(self.stop_signal) if number is not None]
        if received:
            self.stop_signal = received[0]
        return received[0] if received else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Time the first step from here; say where there is none."""
        self._last_step_at = time.perf_counter()
        if state.global_step >= state.max_steps and self.console is not None:
            self.console.warn(f"all {state.max_steps} steps are done: raise training.max_steps (or epochs) to continue")

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        **_: object,
    ) -> None:
        """Say where a step changes nothing."""
        rates = [group["lr"] for group in optimizer.param_groups] if optimizer is not None else []
        if rates and not any(rates) and self.console is not None and not self._has_warned_of_rate:
            self._has_warned_of_rate = True
            reason = "the warm-up begins there" if state.global_step == 0 and args.warmup_steps else "see its schedule"
            self.console.warn(f"step {state.global_step + 1} has learning rate 0 and changes nothing: {reason}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """On a requested stop: save, then end."""
        if self.agree_to_stop() is not None:
            control.should_save = True
            control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Remember it: what was just evaluated is not evaluated again at the end."""
        self.evaluated_at = state.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Say where another callback has ended training."""
        if state.global_step < state.max_steps and self.stop_signal is None and self.console is not None:
            self.console.warn(f"a callback has ended training after step {state.global_step}, with a checkpoint")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: object
    ) -> None:
        """One event and one line per logged optimizer step."""
        if "loss" not in logs or self.trainer is None:
            return
        now = time.perf_counter()
        fields = make_step_fields(logs, step=state.global_step, step_s=now - self._last_step_at)
        fields |= self.machine_figures()
        fields["policy_version"] = self.trainer.source.fence.backend.policy_version
        self._last_step_at = now
        event = self.trainer.source.journal.write("step", **fields)
        if self.console is not None:
            self.console.step(event)
            self._tell_if_underfull(float(logs["fill"]))
            self._tell_if_flat(logs)

    def _tell_if_underfull(self, fill: float) -> None:
        if self.min_fill is None or self.console is None:
            return
        self._num_underfull = self._num_underfull + 1 if fill < self.min_fill else 0
        if self._num_underfull == UNDERFULL_STEPS:
            self.console.warn(
                f"rows have been filled less than {self.min_fill:.0%} for {UNDERFULL_STEPS} steps: raise "
                "training.per_device_train_batch_size or lower global_max_length"
            )

    def _tell_if_flat(self, logs: Mapping[str, float]) -> None:
        """Where all completions of each group are worth the same, there is nothing to learn."""
        self._num_flat = self._num_flat + 1 if logs.get("flat_group_rate") == 1 else 0
        if self._num_flat != FLAT_STEPS or self.console is None:
            return
        reward, truncated = float(logs["reward"]), float(logs.get("truncated_rate", 0.0))
        cause = (
            f"{truncated:.0%} of the completions are cut off: raise max_new_tokens"
            if truncated >= MANY_CUT
            else f"they are about {reward:z.3g}: read completions in run.html (rollmatch page); the task is too hard "
            "or too easy for the model, or the reward function does not find the answer"
        )
        self.console.warn(
            f"no group has taught anything for {FLAT_STEPS} steps, all rewards of each are equal: {cause}"
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_signal = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if self.console is not None:  # from another thread: a handler may interrupt the writing of a line
            said = "stopping after this step, with a checkpoint (again to stop at once)"
            _thread.start_new_thread(self.console.warn, (said,))  # threading's locks may be held here


class EarlyStop(EarlyStoppingCallback):  # type: ignore[misc]
    """That of transformers. It warns of what nobody asks for here: to load the best model at the end."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Nothing: the configuration was checked."""

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **others: object,
    ) -> None:
        """As transformers, and say why training ends. Errors: those of ``check_metric``."""
        check_metric(args.metric_for_best_model, metrics)
        super().on_evaluate(args, state, control, metrics, **others)
        if self.early_stopping_patience_counter >= self.early_stopping_patience and state.is_world_process_zero:
            print(
                f"  early stopping: {args.metric_for_best_model} has not got better than {state.best_metric:.4g} in "
                f"{self.early_stopping_patience} evaluations (step {state.best_global_step})"
            )


class SceneImages(TrainerCallback):  # type: ignore[misc]
    """Evaluated scenes with their boxes as images in Weights & Biases, beside the metrics that transformers sends."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Of the evaluation that was just written, the first scenes."""
        directory = Path(args.output_dir)
        path = directory / evaluation_file(state.global_step)
        if not state.is_world_process_zero or not path.is_file():
            return
        import wandb  # type: ignore[import-not-found,unused-ignore]

        if wandb.run is None:  # WANDB_DISABLED
            return
        scenes = load_evaluation(path).scenes[:NUM_IMAGES]
        images = [
            wandb.Image(str(image_path(scene.image, directory)), boxes=boxes_of(scene), caption=str(scene.sample_id))
            for scene in scenes
        ]
        if images:
            wandb.log({"eval/scenes": images, "train/global_step": state.global_step})


def boxes_of(scene: Scene) -> dict[str, dict[str, object]]:
    """As wandb.Image takes them: corners as shares of width and height; a polygon is drawn as the box around it."""
    drawn: dict[str, dict[str, object]] = {}
    for name, outlines in (("ground_truth", scene.truth), ("predictions", scene.predicted)):
        data = []
        for outline in outlines:
            x, y = outline.bins[::2], outline.bins[1::2]
            corners = {"minX": min(x), "maxX": max(x), "minY": min(y), "maxY": max(y)}
            position = {corner: place / (NUM_BINS - 1) for corner, place in corners.items()}
            data.append({"position": position, "class_id": 0, "box_caption": outline.desc})
        drawn[name] = {"box_data": data, "class_labels": {0: name}}
    return drawn


def check_metric(metric: str, metrics: Mapping[str, float]) -> None:
    """Early stopping watches a metric that the evaluations have. Errors: ``early-stopping-metric``."""
    known = sorted(name.removeprefix("eval_") for name in metrics)
    names = [name for name in known if name not in OF_THE_MACHINE]
    if metric.removeprefix("eval_") not in names:
        raise ConfigError(
            f"{metric!r} is no metric of the evaluations",
            code="early-stopping-metric",
            key="training.early_stopping.metric",
            remedy=f"Name one of: {', '.join(names)}.",
        )


def make_step_fields(logs: dict[str, float], *, step: int, step_s: float) -> dict[str, object]:
    """The flat log line as the journal's ``step`` event: drops and phases in groups of their own."""
    groups = ("drop/", "time/", "overlap/", "staleness/")
    fields: dict[str, object] = {name: value for name, value in logs.items() if not name.startswith(groups)}
    fields["drops"] = {n.removeprefix("drop/"): int(v) for n, v in logs.items() if n.startswith("drop/") and v}
    fields["phase_s"] = {phase: rounded(logs[f"time/{phase}_s"]) for phase in PHASES if f"time/{phase}_s" in logs}
    by_rank = [v for n, v in logs.items() if n.startswith("time/rollout_s/rank")]
    fields["rollout_s_by_rank"] = [rounded(seconds) for seconds in by_rank]
    fields["overlap"] = {n.removeprefix("overlap/"): rounded(v) for n, v in logs.items() if n.startswith("overlap/")}
    fields["staleness"] = {n.removeprefix("staleness/"): int(v) for n, v in logs.items() if n.startswith("staleness/")}
    return fields | {"step": step, "step_s": rounded(step_s)}
