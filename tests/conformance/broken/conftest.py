"""Times of the kit, for stores and tiers that are done at once or never, on a machine that may be busy."""

import pytest

from kvtiers.testing.chunk_store.life import LifeTests
from kvtiers.testing.secondary_tier.engine import SmallEngine


@pytest.fixture(autouse=True, scope="session")
def _times():
    LifeTests.settling = 0.5  # reading half values again and again meanwhile, in three tests
    SmallEngine.late_seconds = 30.0  # beside a patience that some tiers below use up in many tests
