"""What makes a model directory harmful."""


class Harmful:
    """Leaves a mark where a loader calls what a pickle names."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def replace_weights(model, name):
    """The path of other weights in a directory, whose own are gone."""
    (file,) = model.glob("*.safetensors")
    file.unlink()
    return model / name
