"""A Qwen3-VL with the shape of 8B and random weights, which reads and writes the digits model's tokens.

python -m conformance.gpu.big_model DIRECTORY   (17 GB; some seconds on a GPU)
"""

import json
import shutil
import sys
from pathlib import Path

import torch

from conformance.doubles.digits import MODEL

TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
}
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
    "initializer_range": 0.02,
}


def config_of(text=TEXT, vision=VISION):
    """The digits model's ``config.json`` with other sizes; sections of the rotary embedding fill half a head."""
    config = json.loads((MODEL / "config.json").read_text())
    config["text_config"] |= text
    config["vision_config"] |= vision
    half = config["text_config"]["head_dim"] // 2
    config["text_config"]["rope_parameters"]["mrope_section"] = [half - 2 * (half * 5 // 16), *[half * 5 // 16] * 2]
    return config


def make_model(directory, *, device="cuda", **sizes):
    """Write it, in bfloat16."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    shutil.copytree(MODEL, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = Qwen3VLConfig.from_dict(config_of(**sizes))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="4GB")
    (Path(directory) / "config.json").write_text(json.dumps(config_of(**sizes) | {"dtype": "bfloat16"}, indent=2))


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
