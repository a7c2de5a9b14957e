"""Settings of tiny checkpoints, one entry per family; class names are transformers'."""

from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]

VOCAB_LEN = 1344
"""Bytes, framing, a family's own tokens, 1,000 coordinates, and rows that only pad the embedding."""
TEXT: Settings = {
    "vocab_size": VOCAB_LEN,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
MROPE: Settings = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
TOWER: Settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_TOWER: Settings = {"depth": 2, "num_heads": 2, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_TOWER = QWEN_TOWER | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "patch_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one family's checkpoint is made. A text in ``settings`` that is an added token stands for its id."""

    model: str
    config: str
    settings: Settings
    words: tuple[str, ...] = ()
    """Added tokens of the family."""
    image: str = ""
    """What its chat template writes for an image; empty for a text model."""
    named: dict[str, str] = field(default_factory=dict)
    """The tokenizer's names of its words, such as ``image_token``."""
    processor: str = ""
    parts: dict[str, tuple[str, Settings]] = field(default_factory=dict)
    """Argument of the processor -> (class, settings): its image and video processors."""
    options: Settings = field(default_factory=dict)
    """Further arguments of the processor."""
    published: dict[str, str] = field(default_factory=dict)
    """Beginning of a tensor's name -> what it is in published files, where transformers writes another one."""


def _qwen(model: str, config: str, *, text: Settings, tower: Settings, parts: tuple[str, str, int]) -> Architecture:
    processor, video, patch = parts
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    side = 2 * patch
    return Architecture(
        model=model,
        config=config,
        settings={
            "text_config": TEXT | {"rope_parameters": MROPE} | text,
            "vision_config": tower,
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
            "tie_word_embeddings": False,
        },
        words=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        image="<|vision_start|><|image_pad|><|vision_end|>",
        processor=processor,
        parts={
            "image_processor": (
                "Qwen2VLImageProcessor",
                sizes | {"size": {"shortest_edge": side**2, "longest_edge": 16 * side**2}},
            ),
            "video_processor": (video, sizes | {"size": {"shortest_edge": 2048, "longest_edge": 32768}}),
        },
    )


def _glm() -> Architecture:
    kinds = ("image_start", "image_end", "video_start", "video_end", "image", "video")
    edges = (f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end"))
    words = (*edges, "<|image|>", "<|video|>")
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    size = {"size": {"shortest_edge": 2 * 28**2, "longest_edge": 32 * 28**2}}
    return Architecture(
        model="Glm4vForConditionalGeneration",
        config="Glm4vConfig",
        settings={
            "text_config": TEXT
            | {
                "attention_bias": True,  # as published: vLLM reads it, transformers has the biases in any case
                "rope_parameters": MROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
            },
            "vision_config": QWEN_TOWER
            | {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 64, "patch_size": 14, "image_size": 112},
            "tie_word_embeddings": False,
            **{f"{kind}_token_id": word for kind, word in zip(kinds, words, strict=True)},
        },
        words=words,
        image="<|begin_of_image|><|image|><|end_of_image|>",
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
        processor="Glm4vProcessor",
        parts={
            "image_processor": ("Glm4vImageProcessor", sizes | size),
            "video_processor": ("Glm4vVideoProcessor", sizes),
        },
    )


def _text(model: str, config: str, **more: Any) -> Architecture:
    return Architecture(model=model, config=config, settings=TEXT | {"tie_word_embeddings": False} | more)


SIGLIP: Settings = {"model_type": "siglip_vision_model", **TOWER, "image_size": 32, "patch_size": 16}
SMOL_SIZES: Settings = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
SMALL_SQUARE: Settings = {"size": {"height": 32, "width": 32}}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _text("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": _text("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen3_moe": _text("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **EXPERTS),
    "gemma3_text": _text(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
        query_pre_attn_scalar=32,
    ),
    "mistral": _text("MistralForCausalLM", "MistralConfig", sliding_window=16),
    "qwen2_vl": _qwen(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        text={},
        tower=QWEN_TOWER | {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14},
        parts=("Qwen2VLProcessor", "Qwen2VLVideoProcessor", 14),
    ),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        text={},
        tower=QWEN_TOWER
        | {
            "hidden_size": 64,
            "intermediate_size": 96,
            "patch_size": 14,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        parts=("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14),
    ),
    "qwen3_vl": _qwen(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        text={"rope_parameters": MROPE | {"mrope_interleaved": True}},
        tower=QWEN3_TOWER,
        parts=("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
    ),
    "qwen3_vl_moe": _qwen(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        text={"rope_parameters": MROPE | {"mrope_interleaved": True}} | EXPERTS,
        tower=QWEN3_TOWER,
        parts=("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
    ),
    "glm4v": _glm(),
    "internvl": Architecture(
        model="InternVLForConditionalGeneration",
        config="InternVLConfig",
        settings={
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": TOWER | {"image_size": [32, 32], "patch_size": [8, 8], "norm_type": "layer_norm"},
            "image_token_id": "<IMG_CONTEXT>",
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
        },
        words=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        image="<IMG_CONTEXT>",
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor="InternVLProcessor",
        parts={
            "image_processor": ("GotOcr2ImageProcessor", SMALL_SQUARE | {"max_patches": 3, "crop_to_patches": True}),
            "video_processor": ("InternVLVideoProcessor", SMALL_SQUARE),
        },
        options={"image_seq_length": 4},
    ),
    "llava_onevision": Architecture(
        model="LlavaOnevisionForConditionalGeneration",
        config="LlavaOnevisionConfig",
        settings={
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": SIGLIP | {"vision_use_head": False},
            "image_token_id": "<image>",
            "video_token_id": "<video>",
            "image_grid_pinpoints": [[32, 64], [64, 32]],
            "vision_feature_layer": -1,
        },
        words=("<image>", "<video>"),
        image="<image>",
        named={"image_token": "<image>", "video_token": "<video>"},
        published={"vision_tower.": "vision_tower.vision_model."},
        processor="LlavaOnevisionProcessor",
        parts={
            "image_processor": (
                "LlavaOnevisionImageProcessor",
                SMALL_SQUARE | {"image_grid_pinpoints": [[32, 64], [64, 32]]},
            ),
            "video_processor": ("LlavaOnevisionVideoProcessor", SMALL_SQUARE),
        },
        options={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "gemma3": Architecture(
        model="Gemma3ForConditionalGeneration",
        config="Gemma3Config",
        settings={
            "text_config": TEXT
            | {
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 32,
            },
            "vision_config": SIGLIP | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_id": "<image_soft_token>",
        },
        words=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        published={"vision_tower.": "vision_tower.vision_model."},
        image="<start_of_image>",
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        processor="Gemma3Processor",
        parts={"image_processor": ("Gemma3ImageProcessor", SMALL_SQUARE)},
        options={"image_seq_length": 4},
    ),
    "mistral3": Architecture(
        model="Mistral3ForConditionalGeneration",
        config="Mistral3Config",
        settings={
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 32, "image_size": 112, "patch_size": 14},
            "image_token_index": "[IMG]",
            "spatial_merge_size": 2,
        },
        words=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        image="[IMG]",
        processor="PixtralProcessor",
        parts={"image_processor": ("PixtralImageProcessor", {"size": {"longest_edge": 112}, "patch_size": 14})},
        options={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "smolvlm": Architecture(
        model="SmolVLMForConditionalGeneration",
        config="SmolVLMConfig",
        settings={
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER | {"image_size": 32, "patch_size": 8},
            "image_token_id": "<image>",
            "scale_factor": 2,
            "pad_token_id": "<|endoftext|>",
        },
        words=(
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            "<end_of_utterance>",
            *(f"<row_{row}_col_{col}>" for row in (1, 2, 3, 4) for col in (1, 2, 3, 4)),
        ),
        image="<image>",
        named={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        processor="SmolVLMProcessor",
        parts={
            "image_processor": ("SmolVLMImageProcessor", SMOL_SIZES),
            "video_processor": ("SmolVLMVideoProcessor", SMOL_SIZES),
        },
        options={"image_seq_len": 4},
    ),
}
