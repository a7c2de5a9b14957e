"""What vLLM must keep so that weights can be loaded into its model again (it fuses q, k, v, and packs on a CPU)."""

import torch


def keep_weights_loadable() -> None:
    """Before vLLM builds a model: see to it that later weights can be loaded, and are all that it needs."""
    if not torch.cuda.is_available():
        _keep_plain_linear_weights()
        _keep_plain_expert_weights()
    _keep_buffers_of_placeholder_weights()


def has_plain_weights() -> bool:
    """Whether ``keep_weights_loadable`` was called in this process."""
    from vllm.model_executor.layers import utils

    return str(utils.dispatch_cpu_unquantized_gemm.__module__) == __name__


def _keep_plain_linear_weights() -> None:
    """Keep vLLM from prepacking linear weights on a CPU.

    Prepacking removes ``layer.weight`` at start, so that later weights cannot be loaded, and a tied output head would
    silently keep its old copy (vLLM 0.32). Can go when vLLM loads weights into prepacked layers.
    """
    from vllm.model_executor.layers import utils

    def keep(layer: torch.nn.Module, **_: object) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    utils.dispatch_cpu_unquantized_gemm = keep


def _keep_plain_expert_weights() -> None:
    """Let vLLM pack experts when they are used, not when they are loaded (CPU).

    It puts reordered and padded tensors in place of ``w13_weight`` and ``w2_weight``; a later sync would write plain
    weights there (vLLM 0.32). Can go as above.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    pack, use = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def apply(
        self: CPUUnquantizedExperts, *arguments: object, w1: torch.Tensor, w2: torch.Tensor, **named: object
    ) -> None:
        layer = torch.nn.Module()
        layer.w13_weight = torch.nn.Parameter(w1, requires_grad=False)
        layer.w2_weight = torch.nn.Parameter(w2, requires_grad=False)
        pack(self, layer)
        use(self, *arguments, w1=layer.w13_weight, w2=layer.w2_weight, **named)

    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = apply


def _keep_buffers_of_placeholder_weights() -> None:
    """Let ``load_format: dummy`` leave buffers alone: they are computed, not loaded, so no sync would repair them.

    Qwen3-VL's image mean and spread are such (vLLM 0.32). Can go when vLLM initialises parameters only.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load_weights = DummyModelLoader.load_weights

    def load(self: DummyModelLoader, model: torch.nn.Module, *rest: object) -> None:
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        load_weights(self, model, *rest)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])

    DummyModelLoader.load_weights = load
