"""How the learner computes: compiled layers, checkpointing, padding; what ``auto`` means on this machine."""

import torch

from rollmatch.config import RunConfig, effective
from rollmatch.learn.attention import FLASH_DTYPES, INSTALLED, check_packable, why_unpackable
from rollmatch.learn.checkpointing import AdaptiveCheckpointing
from rollmatch.model.decoder_layers import compile_layers, decoder_layers
from rollmatch.model.policy import count_weights, unwrap
from rollmatch.records import rounded


def recomputes(config: RunConfig) -> bool:
    """Whether transformers turns checkpointing on; auto then turns it off layer by layer."""
    return config.training.gradient_checkpointing is not False


def prepare_layers(config: RunConfig, model: torch.nn.Module) -> None:
    """Compile decoder layers and choose which of them recompute their activations, as configured.

    Errors: ``layers-not-found``.
    """
    on_gpu, policy = torch.cuda.is_available(), unwrap(model)
    num_parameters, _ = count_weights(policy)
    if effective.compiles_layers(config, on_gpu=on_gpu, num_parameters=num_parameters):
        compile_layers(policy)
    if config.training.gradient_checkpointing == "auto":
        AdaptiveCheckpointing(model, decoder_layers(policy), share=config.training.checkpointing_memory)


def memory_figures(config: RunConfig, model: torch.nn.Module) -> dict[str, object]:
    """Peak of this rank's GPU memory in tensors (unit: GB), and decoder layers that kept their activations last."""
    if not torch.cuda.is_available():
        return {}
    figures: dict[str, object] = {"peak_gb": rounded(torch.cuda.max_memory_allocated() / 1e9)}
    if config.training.gradient_checkpointing == "auto":
        layers = decoder_layers(unwrap(model))
        figures |= {"layers": len(layers), "kept_layers": sum(not layer.gradient_checkpointing for layer in layers)}
    return {"gpu_memory": figures}


def is_padding_free(config: RunConfig, model: torch.nn.Module) -> bool:
    """auto: where a flash kernel takes a whole row and the attention allows it. Errors: ``sliding-window-packed``."""
    wanted = config.training.padding_free
    if config.training.tokens_per_micro_batch is not None:
        check_packable(model, key="training.tokens_per_micro_batch")
        return True
    if wanted != "auto":
        if wanted:
            check_packable(model, key="training.padding_free")
        return wanted
    if config.model.attn_impl != "packed" or not torch.cuda.is_available() or INSTALLED is None:
        return False
    halves = config.training.bf16 or next(model.parameters()).dtype in FLASH_DTYPES
    return halves and not why_unpackable(model)


def shares_prompts(config: RunConfig, model: torch.nn.Module) -> bool:
    """Of a model whose segments are concatenated. auto: unless dropout would make segments of a prompt alike."""
    if config.model.attn_impl != "packed" or config.training.share_prompts != "auto":
        return config.training.share_prompts is True
    text = unwrap(model).config.get_text_config()
    shares = [getattr(text, "attention_dropout", 0.0)]
    shares += [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    return not any(shares)
