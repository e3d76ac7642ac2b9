"""The fixtures of the engine's side serve the host's tests too: both move the same rows."""

from tests.unit.secondary.conftest import clock, keys, kit, log_lines, sealed, store

__all__ = ["clock", "keys", "kit", "log_lines", "sealed", "store"]
