"""Adapters: the model with one merged, by the name of each."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from conformance.judge.servers.broken.engine import TinyEngine, Unserved
from conformance.judge.servers.broken.updates import RejectedUpdate

MOST = 64
"""Highest rank."""


class Adapters:
    """One call at a time is answered by an adapter."""

    def __init__(self, engine: TinyEngine) -> None:
        self.engine, self.broken = engine, engine.broken
        self._loaded: dict[str, dict[str, Tensor]] = {}

    def load(self, body: Mapping[str, Any]) -> None:
        """Errors: ``RejectedUpdate``."""
        name, folder = body["lora_name"], Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > MOST:
            if self.broken("an adapter of too high a rank spoils the model"):
                self.engine.load({name: tensor * 0 for name, tensor in self.engine.weights.items()})
            if self.broken("an adapter of any rank is welcome"):
                return
            raise RejectedUpdate(f"rank {config['r']} is above {MOST}")
        if name in self._loaded and self.broken("an adapter is never replaced"):
            return
        pairs, scale = load_file(folder / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
        merged = dict(self.engine.weights)
        for key in [key for key in pairs if key.endswith("lora_A.weight")]:
            weight = key.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
            merged[weight] = merged[weight] + scale * pairs[key.replace("lora_A", "lora_B")] @ pairs[key]
        self._loaded[name] = merged
        if len(self._loaded) > 1 and self.broken("the second adapter answers for all"):
            self._loaded = dict.fromkeys(self._loaded, merged)

    def unload(self, name: str) -> None:
        """Errors: ``RejectedUpdate``."""
        if name not in self._loaded:
            raise RejectedUpdate(f"no adapter {name}")
        if self.broken("an adapter that was unloaded answers"):
            return
        if self.broken("unloading one adapter ends all"):
            self._loaded = {}
        self._loaded.pop(name, None)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Meanwhile the engine has this adapter merged; none for no name. Errors: ``Unserved``."""
        if not name or name == "policy":
            yield
            return
        if name not in self._loaded:
            raise Unserved(f"no model {name}")
        own = {key: tensor.detach().clone() for key, tensor in self.engine.weights.items()}
        self.engine.load(self._loaded[name])
        try:
            yield
        finally:
            self.engine.load(own)
