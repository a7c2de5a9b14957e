"""Where tensors live: small models whose loaders do what vLLM's do, and what they must not do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
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


class Otherwise(Fused):
    """``change(model, tensor)`` is loaded in place of the tensor ``name``; ``shape`` is that of ``a``."""

    def __init__(self, name, change, shape=(3, 4)):
        super().__init__()
        self.name, self.change, self.shape = name, change, shape

    def load(self, name, tensor):
        loaded = self.change(self, tensor) if name == self.name else tensor
        if loaded is not None:
            super().load(name, loaded)

    def tensors(self):
        return super().tensors() | {"a": torch.randn(self.shape)}


def put_in_two_pieces(model, tensor):
    model.fused.data[:1].copy_(tensor[:1])
    model.fused.data[1:3].copy_(tensor[1:])


def put_in_two_pieces_turned_round(model, tensor):
    model.fused.data[2:3].copy_(tensor[:1])
    model.fused.data[:2].copy_(tensor[1:])


@pytest.mark.parametrize(
    ("name", "change", "shape", "wanted"),
    [
        ("a", lambda model, tensor: tensor.narrow(1, 4, 4), (3, 8), "copies"),  # the second of two ranks
        ("c", lambda model, tensor: tensor.abs() * 2, (3, 4), "by_loader"),
        ("a", put_in_two_pieces, (3, 4), "whole"),
        ("a", put_in_two_pieces_turned_round, (3, 4), "copies"),
        ("a", lambda model, tensor: tensor[:3], (6, 4), "copies"),
        ("a", lambda model, tensor: tensor[3:], (6, 4), "copies"),
        ("a", lambda model, tensor: tensor.T, (4, 3), "copies"),
    ],
    ids=["half", "scaled", "in two pieces", "turned round", "first rows", "last rows", "transposed"],
)
def test_what_is_no_whole_run_goes_another_way(name, change, shape, wanted):
    model = Otherwise(name, change, shape)
    place = check_equal(model, model.tensors()).by_name[name]
    found = {"copies": bool(place.copies), "by_loader": place.by_loader, "whole": place.whole is not None}
    assert found == dict.fromkeys(found, False) | {wanted: True}


def test_another_type_is_cast_by_a_copy():
    model = Fused()
    tensors = {name: tensor.bfloat16() for name, tensor in model.tensors().items()}
    assert all(place.copies for place in check_equal(model, tensors).by_name.values())


def test_a_tensor_that_the_loader_passes_over_has_no_place():
    model = Otherwise("unused", lambda model, tensor: None)
    place = check_equal(model, model.tensors() | {"unused": torch.randn(2)}).by_name["unused"]
    assert (place.whole, place.copies, place.by_loader) == (None, (), False)


def load_twice(model, tensor):
    Fused.load(model, "a", tensor)
    return tensor


def replace_own(model, tensor):
    model.own.data = tensor


def add_to_own(model, tensor):
    model.own.data.add_(tensor)


def read_a_value(model, tensor):
    model.scale = float(tensor[0])
    return tensor


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        *(("a", load_twice, "fused"), ("c", lambda model, tensor: None, "own"), ("c", replace_own, "layout")),
        *(("c", add_to_own, "layout"), ("c", read_a_value, "layout")),
    ],
)
def test_a_loader_that_is_not_copies_is_refused(name, change, key):
    model = Otherwise(name, change)
    before = held(model)
    with refused("places-unknown", key):
        learn_layout(model, specs_of(model.tensors()))
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
