"""Ids, digests and bodies."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rollmatch.data.ids import PackedIds, pack_ids, unpack_ids
from rollmatch.server.payloads import CommunicatorRequest, Sampling
from rollmatch.server.sampling import model_defaults
from rollmatch.weights.digest import bytes_of, digest_of

packed = TypeAdapter(PackedIds)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_ids_survive_as_bytes_and_as_lists(ids):
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert packed.validate_python(ids) == packed.validate_python(pack_ids(ids)) == pack_ids(ids)
    assert len(pack_ids(ids)) == 4 * len(ids)


@pytest.mark.parametrize("wrong", [b"abc", [1.5], ["1"], [True], [-1], [2**31], "12", None])
def test_what_is_no_list_of_ids_is_refused(wrong):
    with pytest.raises(ValidationError):
        packed.validate_python(wrong)


def test_a_digest_sees_every_bit_and_only_bytes():
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    assert (
        digest_of(tensor) == digest_of(tensor.clone()) == digest_of(tensor.reshape(4, 3)) == digest_of(bytes_of(tensor))
    )
    assert digest_of(tensor.t()) == digest_of(tensor.t().contiguous()) != digest_of(tensor)
    for place in range(0, 12 * 16, 7):
        flipped = tensor.clone()
        flipped.view(torch.uint8).view(-1)[place // 8] ^= 1 << (place % 8)
        assert digest_of(flipped) != digest_of(tensor)
    assert len(digest_of(torch.zeros(()))) == len(digest_of(torch.zeros(0))) == 16


GROUP = {"client": "me", "host": "h", "port": 1, "world_size": 2, "secret": "s" * 16}
BOUNDS = [
    (Sampling, {}, "max_tokens", (1, 2**31 - 1), (0, 2**31)),
    (Sampling, {}, "temperature", (0, 2), (-0.1, 2.1)),
    (Sampling, {}, "top_p", (0.01, 1), (0, 1.01)),
    (Sampling, {}, "top_k", (-1, 2**31 - 1), (-2, 2**31)),
    (Sampling, {}, "min_p", (0, 1), (-0.01, 1.01)),
    (Sampling, {}, "repetition_penalty", (0.01, 9), (0, math.inf)),
    *((Sampling, {}, f"{name}_penalty", (-2, 2), (-2.1, 2.1)) for name in ("presence", "frequency")),
    (Sampling, {"max_tokens": 2**31 - 1}, "min_tokens", (0, 2**31 - 1), (-1, 2**31)),
    (Sampling, {}, "stop_token_ids", ([0, 2**31 - 1], [1] * 128), ([-1], [2**31], [1] * 129)),
    (Sampling, {}, "logit_bias", ({0: 1, 2**31 - 1: -1}, dict.fromkeys(range(1024), 1.0)),
     ({-1: 1}, {2**31: 1}, {1: math.nan}, dict.fromkeys(range(1025), 1.0))),
    (CommunicatorRequest, GROUP, "client", ("a",), ("",)),
    (CommunicatorRequest, GROUP, "port", (1, 65535), (0, 65536)),
    (CommunicatorRequest, GROUP, "world_size", (2, 4096), (1, 4097)),
    (CommunicatorRequest, GROUP, "secret", ("s" * 16, "s" * 256), ("s" * 15, "s" * 257)),
    (CommunicatorRequest, GROUP, "rank_offset", (0, 4095), (-1, 4096)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "others", "name", "good", "bad"), BOUNDS, ids=[each[2] for each in BOUNDS])
def test_values_have_the_bounds_of_the_protocol(kind, others, name, good, bad):
    others = others or {"max_tokens": 1}
    for value in good:
        kind.model_validate(others | {name: value})
    for value in bad:
        with pytest.raises(ValidationError):
            kind.model_validate(others | {name: value})


def test_a_model_s_own_sampling_lies_over_the_temperature_of_vllm(tmp_path):
    assert model_defaults(tmp_path) == {"temperature": 1.0}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "bos": 1}')
    assert model_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0}')
    assert model_defaults(tmp_path) == {"temperature": 0.0}, "greedy"
