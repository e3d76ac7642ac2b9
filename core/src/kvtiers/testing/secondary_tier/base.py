"""The base of all tests of a third-rung tier: the author's fixture, and a small engine with that tier."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar

import pytest

from kvtiers.api import SecondaryTierManager, TierContext
from kvtiers.testing.backend import require_backend
from kvtiers.testing.secondary_tier.engine import SmallEngine, new_keys

__all__ = ["OpenTier", "TierTestBase"]

OpenTier = Callable[[TierContext], SecondaryTierManager]


class TierTestBase:
    """The author's side: ``max_chunks``, ``patience`` and the fixture ``open_tier``."""

    max_chunks: ClassVar[int | None] = None
    patience: ClassVar[float] = 30.0

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        """Return a function that opens a tier from its context; the author's subclass overrides this."""
        raise pytest.UsageError(
            f"{type(self).__name__}: define a fixture 'open_tier' that returns a function which opens your tier from "
            "a TierContext"
        )

    @pytest.fixture(autouse=True)
    def _backend(self, open_tier: OpenTier) -> None:
        require_backend(type(self), [("open_tier(context)", lambda: self._try(open_tier), True)])

    @pytest.fixture
    def engine(self, open_tier: OpenTier) -> Iterator[SmallEngine]:
        """Open one tier over a region of 64 rows, for a test on the engine's thread."""
        engine = SmallEngine(open_tier, patience=self.patience)
        yield engine
        # Draining and closing have tests of their own; here a failure would only blame the wrong one.
        with suppress(Exception):
            engine.close()

    def _try(self, open_tier: OpenTier) -> None:
        engine = SmallEngine(open_tier, patience=self.patience)
        with suppress(AssertionError):  # whatever it answers: there are tests for that
            engine.present(new_keys(1))
        with suppress(Exception):
            engine.close()
