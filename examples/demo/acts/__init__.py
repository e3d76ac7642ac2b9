"""The acts: each returns, in one line, what it has shown, or raises ActError."""

__all__ = ["ActError", "expect"]


class ActError(Exception):
    """What was promised did not happen."""


def expect(holds: bool, why: str) -> None:
    """Go on if it holds; ActError with this reason if not."""
    if not holds:
        raise ActError(why)
