"""The conformance tests of a ``SecondaryTierManager``.

::

    class TestMyTier(SecondaryTierTests):
        @pytest.fixture
        def open_tier(self):
            return lambda context: MyTier(MyConfig(type="my-tier"), context)

Further promises are tested if the subclass declares them: ``max_chunks = N``, the most chunks that the opened tier can
hold; ``keeps_quotas = True``, that it keeps quotas of tenants (``SupportsQuotas``); and a fixture ``hold`` that returns
a function ``hold(tier)``, a context manager within which the backend moves nothing.
"""

from kvtiers.testing.secondary_tier.engine import SmallEngine
from kvtiers.testing.secondary_tier.promises import (
    ChunkTests,
    EngineThreadTests,
    LifeTests,
    ResultTests,
    RowTests,
    TierTestBase,
)
from kvtiers.testing.secondary_tier.quotas import QuotaTests

__all__ = ["SecondaryTierTests", "SmallEngine", "TierTestBase"]


class SecondaryTierTests(ChunkTests, ResultTests, RowTests, EngineThreadTests, QuotaTests, LifeTests):
    """Subclass it and give the fixture ``open_tier``.

    ``open_tier`` returns a function that opens a tier from a ``TierContext``; the kit closes it. The tier needs room
    for 16 chunks of 12 KiB. ``max_chunks``, ``keeps_quotas`` and the fixture ``hold`` bring further tests (see the
    module).
    ``patience``: seconds after which a job counts as hung.
    """
