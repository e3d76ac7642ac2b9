"""A model with states whose layers have no experts: on a CPU vLLM computes no experts beside LoRA adapters."""

from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

__all__ = ["DenseQwen3Next"]


class DenseQwen3Next(Qwen3NextForCausalLM):
    """vLLM's own Qwen3-Next, which takes a config with ``mlp_only_layers`` for all layers."""

    def set_moe_parameters(self) -> None:
        """Do nothing: vLLM's refuses a model without experts."""
