"""kvtiers in transformers: ``PrefixCache`` loads what any process has computed of a prompt, and stores what is new."""

from kvtiers_transformers.prefix_cache import PrefixCache

__all__ = ["PrefixCache"]
