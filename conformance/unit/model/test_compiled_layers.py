"""Compiled decoder layers learn what eager ones learn, without a graph for each length."""

import json
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from conformance.doubles.models import assert_same_gradients, gradients, make_packed_model, packed_logits, padded_logits
from conformance.doubles.refusals import refused
from conformance.doubles.segments import make_row, make_segment
from conformance.doubles.started import finish_ranks
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from rollmatch.model.decoder_layers import compile_layers, decoder_layers
from rollmatch.model.images import NO_IMAGES
from rollmatch.rollout.hf import eager

SPLIT = """
import json, pathlib, sys
import torch
import torch.distributed as dist
from conformance.doubles.sharded import make_model, split
from rollmatch.model.decoder_layers import compile_layers
from torch._dynamo.utils import counters

dist.init_process_group("gloo")
models = [make_model().train() for _ in range(2)]
for model in models:
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
compile_layers(models[1].get_base_model(), backend="eager")
losses = []
for model in map(split, models):
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    losses.append([])
    for length in (16, 11, 13):
        ids = torch.arange(20, 20 + length)[None] + dist.get_rank()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[-1].append(loss.item())
graphs = counters["stats"]["unique_graphs"]
broken = list(counters["graph_break"])
found = {"losses": losses, "graphs": graphs, "broken": broken}
pathlib.Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def fresh_graphs(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # engine tests in the same process turn it off
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def batch_of(seed):
    pairs = [
        make_segment(7 * seed + number, num_images=count) for number, count in enumerate((1, 0, 2)[: 1 + seed % 3])
    ]
    return make_row(*(segment for segment, _ in pairs)), [images for _, images in pairs]


def learn(model, row, images):
    model.zero_grad()
    torch.manual_seed(0)  # of dropout
    loss = packed_logits(model, row, images).pow(2).mean()
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize(
    ("adapter", "checkpointed", "backend"),
    [
        pytest.param(None, True, "aot_eager", marks=pytest.mark.wide),
        pytest.param({}, True, "eager", marks=pytest.mark.wide),
        ({"lora_dropout": 0.4}, False, "eager"),
        pytest.param({"use_dora": True}, False, "eager", marks=pytest.mark.wide),
    ],
)
def test_packed_rows_of_any_length_have_the_same_loss_and_gradients(adapter, checkpointed, backend):
    models = [make_packed_model().train() for _ in range(2)]
    if adapter is not None:
        settings = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": "gaussian"}
        models = [get_peft_model(model, LoraConfig(**settings, **adapter)) for model in models]
        models[1].load_state_dict(models[0].state_dict())
    bases = [model if adapter is None else model.get_base_model() for model in models]
    if checkpointed:
        for base in bases:
            base.gradient_checkpointing_enable({"use_reentrant": False})
    assert compile_layers(bases[1], backend=backend) == len(decoder_layers(bases[1])) == 2
    for seed in range(5):
        row, images = batch_of(seed)
        (loss, expected), (ours, found) = (learn(model, row, images) for model in models)
        assert ours == pytest.approx(loss, abs=1e-6)
        assert_same_gradients(found, expected)
        graphs = counters["stats"]["unique_graphs"]
        if seed == 2:
            after_three = graphs
    assert graphs == after_three > 0


@pytest.mark.wide
def test_ranks_that_hold_parts_of_the_layers_learn_the_same_by_few_whole_graphs(tmp_path):
    (tmp_path / "split.py").write_text(SPLIT)
    finish_ranks(tmp_path, 2, sys.executable, str(tmp_path / "split.py"), str(tmp_path))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        plain, compiled = found["losses"]
        assert compiled == pytest.approx(plain, abs=1e-6)
        assert len(set(plain)) == 3
        assert 0 < found["graphs"] <= 2  # one more for the layer that is recomputed first
        assert found["broken"] == []


def test_batches_with_a_mask_have_the_same_logits():
    plain, compiled = make_packed_model(), make_packed_model()
    compile_layers(compiled, backend="eager")
    for number in (2, 3, 5):
        segments = [make_segment(seed)[0] for seed in range(number)]
        with torch.no_grad():
            ours, expected = (padded_logits(model, segments, [NO_IMAGES] * number) for model in (compiled, plain))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_generation_runs_no_compiled_layer():
    model, plain = make_tiny_qwen3(), make_tiny_qwen3()
    compile_layers(model, backend="eager")
    assert list(model.state_dict()) == list(plain.state_dict()), "names of weights stay"
    prompt = torch.tensor([[1, 2, 3]])
    with eager(model):
        ids = model.generate(prompt, max_new_tokens=5, do_sample=False)
    assert torch.equal(ids, plain.generate(prompt, max_new_tokens=5, do_sample=False))
    assert counters["stats"]["unique_graphs"] == 0
    model(prompt)
    assert counters["stats"]["unique_graphs"] > 0


def test_numbers_of_a_layer_are_constants_of_its_graphs():
    base = make_packed_model().train()
    get_peft_model(base, LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"]))
    numbers = []

    def compiler(graph, inputs):
        numbers.extend(one for one in inputs if isinstance(one, torch.Tensor) and not one.dim())
        return graph.forward

    compile_layers(base, backend=compiler)
    for seed in range(3):
        learn(base, *batch_of(seed))
    assert counters["stats"]["unique_graphs"] > 0
    assert numbers == [], "a tensor without axes, on the CPU: inductor would compile C++ for it"


def test_a_model_without_decoder_layers_is_rejected():
    model = make_tiny_qwen3()
    model.model.layers = torch.nn.ModuleList([torch.nn.Identity()])
    with refused("layers-not-found", "training.compile_layers"):
        compile_layers(model)
