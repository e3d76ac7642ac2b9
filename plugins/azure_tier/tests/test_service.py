"""What an engine sees of Azure when it goes wrong: misses and counters, never wrong bytes, never a wait without end."""

from libraries.objectstore.tests.faults import FaultTests
from plugins.azure_tier.tests.differences import AZURE


class TestAzureFaults(FaultTests):
    differences = AZURE
