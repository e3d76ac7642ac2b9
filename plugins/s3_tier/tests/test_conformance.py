from functools import partial

import pytest

from kvtiers.testing import ChunkStoreTests, TierPluginTests
from kvtiers.testing.chunk_store.abilities import BatchTests
from kvtiers.testing.chunk_store.methods import BufferTests, ConcurrencyTests, ValueTests
from kvtiers_s3.store import S3Store

# The server runs beside the tests: where both processors are busy, 64 requests at once take it more than 10 s, and one
# that serves them one by one more than 30 s.
PATIENT = {"timeout": "60s", "connect_timeout": "60s", "deadline": "60s"}


class TestBoto3OnCeph(ChunkStoreTests):
    store_class = S3Store
    patience = 70.0

    @pytest.fixture
    def open_store(self, config):
        return partial(S3Store, config(client="boto3", **PATIENT))


class TestObstoreOnCeph(ChunkStoreTests):
    """The largest value of the kit is moved in two parts."""

    store_class = S3Store
    patience = 70.0

    @pytest.fixture
    def open_store(self, config):
        return partial(S3Store, config(client="obstore", part_size="5MiB", **PATIENT))


class TestObstoreOnMotoWithChecksums(ChunkStoreTests):
    store_class = S3Store
    patience = 70.0

    @pytest.fixture
    def open_store(self, moto_config):
        return partial(S3Store, moto_config(client="obstore", checksums="always", part_size="5MiB", **PATIENT))


class TestBoto3OnMotoWithChecksums(ValueTests, BufferTests, ConcurrencyTests, BatchTests):
    """The tests of what a value holds, which checksums are of; for all else this client has its tests on Ceph."""

    store_class = S3Store
    patience = 70.0

    @pytest.fixture
    def open_store(self, moto_config):
        return partial(S3Store, moto_config(client="boto3", checksums="always", part_size="5MiB", **PATIENT))


class TestS3Plugin(TierPluginTests):
    @pytest.fixture
    def tier_options(self, empty_server):
        keys = {"access_key": "AK", "secret_key": "SK"}
        return {"type": "s3", "bucket": "some-bucket", "prefix": "team/kv", "endpoint": empty_server, **keys}
