"""The command that this distribution adds to ``kvtiers``."""

from kvtiers.api.command import CommandPlugin

__all__ = ["VLLM_CONFIG"]

VLLM_CONFIG = CommandPlugin(
    name="vllm-config",
    help="Print a config as vLLM's --kv-transfer-config.",
    target="kvtiers_vllm.cli:vllm_config",
    api_version=1,
)
