"""Callbacks that end a run by an error of their own."""

from transformers import TrainerCallback


class FailsInTheThirdStep(TrainerCallback):
    """A user's callback with a bug."""

    def on_step_end(self, args, state, control, **others):
        if state.global_step == 3:
            raise RuntimeError("the third step")
