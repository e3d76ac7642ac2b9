"""kvtiers moves an LLM engine's KV cache out of GPU memory, through tiers of storage, and back."""

from kvtiers._version import __version__

__all__ = ["__version__"]
