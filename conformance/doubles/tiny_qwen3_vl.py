"""A random Qwen3-VL (and a random Qwen3) of less than a million parameters, made in memory.

float32, and weights drawn wide enough (0.1) that logits differ by whole units: a leak between segments shows
as a difference of 1e-1 and more, rounding as 1e-6. No disk, no tokenizer: token ids are laid out below.
"""

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from conformance.doubles.architectures import SHARED

NUM_TEXT_IDS = 256
PAD_ID, _, EOS_ID, VISION_START_ID, VISION_END_ID, _, IMAGE_ID, VIDEO_ID = range(256, 264)
COORD_IDS = tuple(range(264, 1264))
VOCAB_LEN = 1280
PATCH_SIZE, TEMPORAL_PATCH_SIZE, MERGE_SIZE = 16, 2, 2
VALUES_PER_PATCH = 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE**2
SIZES = SHARED["text"] | {
    "vocab_size": VOCAB_LEN,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
}


def bin_of(token_id: int) -> int | None:
    """The bin of a coordinate token of this layout."""
    return token_id - COORD_IDS[0] if COORD_IDS[0] <= token_id <= COORD_IDS[-1] else None


def make_tiny_qwen3_vl(seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """A vision-language model, in evaluation mode."""
    tower = {"intermediate_size": 128, "out_hidden_size": 128, "initializer_range": 0.1}
    config = Qwen3VLConfig(
        text_config=SIZES | {"rope_parameters": SHARED["interleaved"]},
        vision_config=SHARED["qwen3_tower"] | tower,
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=VISION_START_ID,
        vision_end_token_id=VISION_END_ID,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return _ready(Qwen3VLForConditionalGeneration(config))


def make_tiny_qwen3(*, num_layers: int = 2) -> Qwen3ForCausalLM:
    """A text model of the same sizes, in evaluation mode."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = SIZES | {"num_hidden_layers": num_layers}
    return _ready(Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters=rope, tie_word_embeddings=True)))


def _ready(model):
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False)
    return model.float().eval()
