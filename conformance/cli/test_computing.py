"""What ``auto`` means on a machine, and what cannot be asked for."""

import pytest

from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from conformance.rollout.digits import load_digits
from rollmatch.cli.computing import is_padding_free
from rollmatch.config.effective import compiles_layers
from rollmatch.learn.attention import SlidingWindowPacked


def test_a_sliding_window_is_not_concatenated():
    config, model = load_digits("training.padding_free=true"), make_tiny_qwen3()
    assert is_padding_free(config, model)
    model.config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(SlidingWindowPacked) as caught:
        is_padding_free(config, model)
    assert (caught.value.code, caught.value.key) == ("sliding-window-packed", "training.padding_free")


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "num_parameters", "expected"),
    [
        ((), True, 2 * 10**9, True),
        ((), True, 10**8, False),
        ((), False, 2 * 10**9, False),
        (("tuner.train_type=lora", "tuner.lora_dropout=0.1"), True, 2 * 10**9, False),
        (("training.extra_arguments={fsdp: full_shard}",), True, 2 * 10**9, False),
        (("training.compile_layers=true",), False, 10**8, True),
        (("training.compile_layers=false",), True, 2 * 10**9, False),
    ],
)
def test_layers_are_compiled_where_it_pays_and_works(overrides, on_gpu, num_parameters, expected):
    config = load_digits(*overrides)
    assert compiles_layers(config, on_gpu=on_gpu, num_parameters=num_parameters) is expected
