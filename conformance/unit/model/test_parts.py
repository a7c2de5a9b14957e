"""What is frozen and what is trained, by transformers' own accessors, for every architecture."""

import pytest

from conformance.doubles.architectures import ARCHITECTURES
from conformance.doubles.checkpoints import make_checkpoint
from conformance.doubles.frozen_parts import check_a_frozen_part, check_freezing_nothing, load
from conformance.doubles.refusals import refused
from rollmatch.config.training import TunerConfig
from rollmatch.model.parts import Part, count_parts
from rollmatch.model.policy import prepare, unwrap

PICTURED = [name for name, known in ARCHITECTURES.items() if known.processor]
TEXTUAL = [name for name in ARCHITECTURES if name not in PICTURED]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """Architecture -> its checkpoint, made once."""
    made = {}

    def find(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_checkpoint(name, made[name])
        return str(made[name])

    return find


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize("name", PICTURED)
def test_a_frozen_part_and_no_other_keeps_its_weights(directory_of, name, part):
    check_a_frozen_part(directory_of(name), part)


@pytest.mark.parametrize("name", PICTURED)
def test_adapters_are_counted_with_the_part_they_are_on(directory_of, name):
    model = load(directory_of(name), train_type="lora", freeze_vit=True, freeze_aligner=True)
    counts = count_parts(model, unwrap(model))
    trained = sum(weight.requires_grad for weight in model.parameters())
    assert {part for part, count in counts.items() if count.num_trained} == {"language model"}
    assert counts["language model"].num_trained == trained > 0


@pytest.mark.parametrize("part", [Part.VISION, Part.PROJECTOR])
@pytest.mark.parametrize("name", TEXTUAL)
def test_freezing_nothing_is_refused(directory_of, name, part):
    check_freezing_nothing(directory_of(name), part, attention="eager")  # gpt-oss has no other


def test_a_weight_of_no_known_part_is_refused_where_parts_are_frozen(directory_of):
    model = load(directory_of("llava_onevision"))
    model.model.register_parameter("strange", model.model.image_newline)
    del model.model.image_newline
    with refused("part-unknown", "tuner.freeze_vit", problem="model.strange"):
        prepare(model, TunerConfig(freeze_vit=True))
    assert prepare(model, TunerConfig()) is model


def test_options_of_peft_have_their_effect(directory_of):
    model = load(
        directory_of("llama"),
        train_type="lora",
        use_rslora=True,
        lora_rank=4,
        lora_alpha=8,
        rank_pattern={"q_proj": 16},
        alpha_pattern={"v_proj": 32},
        modules_to_save=("model.norm",),
        trainable_token_indices=[3, 5],
    )
    layer = unwrap(model).model.layers[0].self_attn
    assert [layer.q_proj.scaling["default"], layer.k_proj.scaling["default"]] == [2.0, 4.0]
    assert layer.v_proj.scaling["default"] == 16.0
    assert layer.q_proj.lora_A["default"].weight.shape[0] == 16
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name}
    assert {name.rsplit("model.", 1)[-1] for name in trained} == {
        "norm.modules_to_save.default.weight",
        "embed_tokens.token_adapter.trainable_tokens_delta.default",
    }


@pytest.mark.parametrize(("name", "parts"), [("llama", {"embed_tokens", "lm_head"}), ("gemma3_text", {"embed_tokens"})])
def test_new_coordinate_tokens_learn_beside_adapters_in_every_matrix(directory_of, name, parts):
    model = load(directory_of(name), train_type="lora", trainable_token_indices="coord_tokens")
    deltas = {key.split(".token_adapter")[0]: weight for key, weight in model.named_parameters() if "delta" in key}
    rows = {key.rpartition(".")[2]: weight for key, weight in deltas.items()}
    assert {part for part, weight in rows.items() if weight.requires_grad} == parts
    assert {weight.shape[0] for weight in rows.values()} == {1000}


@pytest.mark.parametrize(
    "wrong", [{"rank_pattern": {"qproj": 2}}, {"alpha_pattern": {"qproj": 2}}, {"modules_to_save": ("heads",)}]
)
def test_an_option_that_matches_nothing_is_refused(directory_of, wrong):
    with refused("adapter-targets-nothing", f"tuner.{next(iter(wrong))}"):
        load(directory_of("llama"), train_type="lora", **wrong)
