"""Times of the kit, for stores and tiers that are done at once or never, on a machine that may be busy."""

import pytest

from kvtiers.testing.chunk_store import life
from kvtiers.testing.secondary_tier import engine


@pytest.fixture(autouse=True, scope="session")
def _times():
    life._SETTLING_SECONDS = 0.5  # reading half values again and again meanwhile, in three tests
    engine._LATE_SECONDS = 30.0  # beside a patience that some tiers below use up in many tests
