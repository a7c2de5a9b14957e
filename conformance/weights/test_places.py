"""Where tensors live: small models whose loaders do what vLLM's do, and what they must not do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.errors import RollmatchError
from rollmatch.weights.plan import spec_of
from rollmatch.weights.worker.weight_layout import learn_layout, write_tensors


class Fused(torch.nn.Module):
    """``a`` and ``b`` are rows of one parameter, padded with zeros; ``c`` has a parameter of its own."""

    def __init__(self, rows_a=3, rows_b=2, padding=1, width=4):
        super().__init__()
        self.rows = {"a": (0, rows_a), "b": (rows_a, rows_b)}
        self.fused = torch.nn.Parameter(torch.randn(rows_a + rows_b + padding, width), requires_grad=False)
        self.own = torch.nn.Parameter(torch.randn(5), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name, tensor):
        if name == "c":
            self.own.data.copy_(tensor)
            return
        first, num = self.rows[name]
        self.fused.data.narrow(0, first, num).copy_(tensor)
        if name == "b":
            self.fused[first + num :].data.fill_(0)

    def tensors(self):
        width = self.fused.shape[1]
        return {name: torch.randn(num, width) for name, (_, num) in self.rows.items()} | {"c": torch.randn(5)}


def specs_of(tensors):
    return [spec_of(*pair) for pair in tensors.items()]


def held(model):
    return [weight.detach().clone() for weight in model.parameters()]


def written_by(model, write):
    for weight in model.parameters():
        weight.data.fill_(7)
    write()
    return held(model)


def check_equal(model, tensors):
    """Learning changes nothing, and what is written is what the loader writes."""
    before = held(model)
    places = learn_layout(model, specs_of(tensors))
    assert all(map(torch.equal, before, held(model)))
    ours = written_by(model, lambda: write_tensors(model, places, tensors))
    theirs = written_by(model, lambda: model.load_weights(tensors.items()))
    assert all(map(torch.equal, ours, theirs))
    return places


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 5))
def test_rows_of_a_fused_parameter_are_whole(rows_a, rows_b, padding, width):
    model = Fused(rows_a, rows_b, padding, width)
    places = check_equal(model, model.tensors())
    assert all(place.whole is not None for place in places.by_name.values())
    assert places.by_name["b"].whole.data_ptr() == model.fused[rows_a].data_ptr()


class SplitParameter(Fused):
    """Keeps the right half of ``a``, as the second of two tensor parallel ranks does."""

    def load(self, name, tensor):
        super().load(name, tensor.narrow(1, 4, 4) if name == "a" else tensor)

    def tensors(self):
        return super().tensors() | {"a": torch.randn(3, 8)}


class Scaling(Fused):
    """Changes ``c`` on its way."""

    def load(self, name, tensor):
        super().load(name, tensor.abs() * 2 if name == "c" else tensor)


class InTwoPieces(Fused):
    """Takes ``a`` apart and puts it together again in the same place."""

    def load(self, name, tensor):
        if name == "a":
            self.fused.data[:1].copy_(tensor[:1])
            self.fused.data[1:3].copy_(tensor[1:])
        else:
            super().load(name, tensor)


class Transposing(Fused):
    def load(self, name, tensor):
        super().load(name, tensor.T if name == "a" else tensor)

    def tensors(self):
        return super().tensors() | {"a": torch.randn(4, 3)}


@pytest.mark.parametrize(
    ("kind", "name", "wanted"),
    [
        (SplitParameter, "a", "copies"),
        (Scaling, "c", "by_loader"),
        (InTwoPieces, "a", "whole"),
        (Transposing, "a", "copies"),
    ],
)
def test_what_is_no_whole_run_goes_another_way(kind, name, wanted):
    model = kind()
    place = check_equal(model, model.tensors()).by_name[name]
    found = {"copies": bool(place.copies), "by_loader": place.by_loader, "whole": place.whole is not None}
    assert found == dict.fromkeys(found, False) | {wanted: True}


def test_another_type_is_cast_by_a_copy():
    model = Fused()
    tensors = {name: tensor.bfloat16() for name, tensor in model.tensors().items()}
    assert all(place.copies for place in check_equal(model, tensors).by_name.values())


def test_a_tensor_that_the_loader_passes_over_has_no_place():
    class Skipping(Fused):
        def load(self, name, tensor):
            if name != "unused":
                super().load(name, tensor)

    model = Skipping()
    place = check_equal(model, model.tensors() | {"unused": torch.randn(2)}).by_name["unused"]
    assert (place.whole, place.copies, place.by_loader) == (None, (), False)


class Twice(Fused):
    def load(self, name, tensor):
        super().load(name, tensor)
        super().load(name, tensor)


class Forgetting(Fused):
    def load(self, name, tensor):
        if name != "c":
            super().load(name, tensor)


class Replacing(Fused):
    def load(self, name, tensor):
        if name == "c":
            self.own.data = tensor
        else:
            super().load(name, tensor)


class Adding(Fused):
    def load(self, name, tensor):
        if name == "c":
            self.own.data.add_(tensor)
        else:
            super().load(name, tensor)


class Reading(Fused):
    def load(self, name, tensor):
        super().load(name, tensor)
        if name == "c":
            self.scale = float(tensor[0])


@pytest.mark.parametrize(
    ("kind", "key"),
    [(Twice, "fused"), (Forgetting, "own"), (Replacing, "layout"), (Adding, "layout"), (Reading, "layout")],
)
def test_a_loader_that_cannot_be_told_as_copies_is_refused(kind, key):
    model = kind()
    before = held(model)
    with pytest.raises(RollmatchError) as caught:
        learn_layout(model, specs_of(model.tensors()))
    assert (caught.value.code, caught.value.key) == ("places-unknown", key)
    assert all(map(torch.equal, before, held(model)))


def test_places_hold_as_long_as_no_memory_moves():
    model = Fused()
    places = learn_layout(model, specs_of(model.tensors()))
    assert places.holds_for(model)
    model.own.data = model.own.data.clone()
    assert not places.holds_for(model)
    places = learn_layout(model, specs_of(model.tensors()))
    assert places.holds_for(model)
    model.own = torch.nn.Parameter(model.own.data.clone())
    assert not places.holds_for(model)
    assert not learn_layout(model, specs_of(model.tensors())).holds_for(Fused())
