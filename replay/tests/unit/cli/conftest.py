"""The commands of this distribution are run as core's are."""

from tests.unit.cli.conftest import config, process, run, store
from tests.unit.conftest import distributions

__all__ = ["config", "distributions", "process", "run", "store"]
