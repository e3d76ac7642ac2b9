"""kvtiers moves an LLM engine's KV cache out of GPU memory, through tiers of storage, and back."""

from typing import TYPE_CHECKING, Any

from kvtiers._version import __version__

if TYPE_CHECKING:
    from kvtiers.config import load_config
    from kvtiers.runtime import open_manager, open_worker

__all__ = ["__version__", "load_config", "open_manager", "open_worker"]


def __getattr__(name: str) -> Any:
    # Late, so that `import kvtiers`, which every plugin's entry module does, stays cheap.
    if name == "load_config":
        from kvtiers.config import load_config

        return load_config
    if name in {"open_manager", "open_worker"}:
        from kvtiers import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
