"""Our rollout server over a model that is only held: it receives, merges and loads as a real one, on a CPU.

As a script: ``merging_server.py HOST PORT DIRECTORY``.
"""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import uvicorn
from safetensors.torch import load_file

from conformance.doubles.digits import ROOT
from rollmatch.serve.app import make_app
from rollmatch.serve.serving import vocabulary_size
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.identity import load_model_identity
from rollmatch.server.images import ImageReader
from rollmatch.server.prompts import PromptMaker
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import assemble
from rollmatch.weights.worker.extension import WorkerExtension

FIXTURE = ROOT / "fixtures/models/arithmetic"


class ReceivingReplica(WorkerExtension):
    """A replica whose only worker is itself."""

    rank, device = 0, torch.device("cpu")

    async def call(self, method, *arguments):
        return [getattr(self, method)(*arguments)]

    async def reset_caches(self):
        return True

    def is_dead(self):
        return False

    def unfinished_tokens(self):
        return {}

    def close(self):
        self.rollmatch_close()


class HeldModel(torch.nn.Module):
    """Loads a tensor by copying it over the one it holds, as vLLM does."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            self.held[name].copy_(tensor)


def make_directory(directory, num_layers):
    """A Qwen3 of random weights in bfloat16; returns its bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(
        FIXTURE, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory, max_shard_size="100GB")
    return (Path(directory) / "model.safetensors").stat().st_size


def make_server(host, port, directory):
    settings = ServerSettings(model=directory, dtype="bfloat16", max_model_len=64, port=port, allowed_hosts=(host,))
    replica, held = ReceivingReplica(), HeldModel(load_file(Path(directory) / "model.safetensors"))
    replica.model_runner = SimpleNamespace(
        get_model=lambda: held, model_config=SimpleNamespace(model=directory, dtype=torch.bfloat16)
    )
    replica.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    model = load_model_identity(directory, dtype="bfloat16")
    prompts = PromptMaker(directory, vocabulary_size=vocabulary_size(directory), reader=ImageReader(()))
    return make_app(assemble(settings, model=model, prompts=prompts, pool=EnginePool([replica])))


if __name__ == "__main__":
    host, port, directory = sys.argv[1:]
    torch.set_num_threads(1)
    uvicorn.run(make_server(host, int(port), directory), host=host, port=int(port), log_level="warning")
