"""Model directories that hold a config.json and nothing else."""

import json

QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096, "patch_size": 16,
    "temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
QWEN3_30B = QWEN3_8B | {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip


def model_directory(folder, settings):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)
