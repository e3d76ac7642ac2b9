"""What the process of a scheduler says of itself: SGLang's release, and the server's arguments."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["release", "server_arguments"]


def release() -> str:
    """Return SGLang's version."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def server_arguments() -> Any:
    """Return the server's arguments, resolved as far as they are; None where no server has published any."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError, AttributeError):
        return None
