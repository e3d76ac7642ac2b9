"""What an engine sees of Cloud Storage when it goes wrong: misses and counters, never wrong bytes."""

from libraries.objectstore.tests.faults import FaultTests
from plugins.gcs_tier.tests.differences import GCS


class TestGcsFaults(FaultTests):
    differences = GCS
