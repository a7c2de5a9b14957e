"""A run of two steps whose checkpoints are exported."""

from transformers import AutoModelForImageTextToText

from conformance.doubles.digits import write_cut
from conformance.doubles.started import HF, train_command
from rollmatch.cli.main import main

FULL = ("training.learning_rate=1e-3",)


def train(folder, *overrides, dtype=None):
    """Two steps of a small policy, saved in ``dtype``; its directory."""
    model = folder / "model"
    write_cut(model)
    if dtype is not None:
        AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).save_pretrained(model)
    small = (
        *(f"model.model={model}", f"training.output_dir={folder / 'run'}", "training.max_steps=2"),
        *("training.save_steps=2", "training.eval_scenes=2", "custom.extra.rollout_matching.max_new_tokens=8"),
    )
    command = train_command(*HF, *small, *overrides)
    assert main(command[command.index("train") :]) == 0
    return folder / "run"
