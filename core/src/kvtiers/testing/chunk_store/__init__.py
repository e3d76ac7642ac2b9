"""The conformance tests of a ``ChunkStore``.

::

    class TestMyStore(ChunkStoreTests):
        store_class = MyStore

        @pytest.fixture
        def open_store(self, tmp_path):
            return partial(MyStore, tmp_path / "values")

The tests of ``SupportsBatch``, ``SupportsPieces``, ``SupportsListing``, ``SupportsDiagnosis`` and ``SupportsStats`` are
there if ``store_class`` has the ability.
``persistent = False`` (values end with the store) replaces the tests of reopening and of a killed writer by one that
the store starts empty. A fixture ``break_backend`` that returns a function ``break_backend(store)``, a context manager
within which the backend fails (a server that is stopped, a folder that is away), brings the test that no error is
swallowed.
"""

from kvtiers.testing.chunk_store.abilities import (
    BatchTests,
    DiagnosisTests,
    ListingTests,
    PiecesTests,
    StatsTests,
)
from kvtiers.testing.chunk_store.base import StoreTestBase
from kvtiers.testing.chunk_store.life import FailureTests, LifeTests
from kvtiers.testing.chunk_store.methods import BufferTests, ConcurrencyTests, NameTests, ValueTests

__all__ = ["ChunkStoreTests", "StoreTestBase"]


class ChunkStoreTests(
    ValueTests,
    NameTests,
    BufferTests,
    ConcurrencyTests,
    LifeTests,
    FailureTests,
    BatchTests,
    PiecesTests,
    ListingTests,
    DiagnosisTests,
    StatsTests,
):
    """Subclass it, set ``store_class``, and give the fixture ``open_store``.

    ``open_store`` returns a function without arguments that opens a store, each time on the same backing; the kit
    closes what it opens and deletes what it wrote. For a persistent store another process calls it too, so it must
    survive pickling: a ``functools.partial`` of a class or function that can be imported, not a lambda. The backing
    needs room for 64 MiB. ``patience``: seconds after which a call counts as hung. Before the first test the kit tries
    the backend: one that is down is one error, and the other tests of the class are skipped.
    """
