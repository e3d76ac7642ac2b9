"""The command and the small distributions of core's tests."""

from tests.unit.cli.conftest import config, process, run, store
from tests.unit.conftest import distributions

__all__ = ["config", "distributions", "process", "run", "store"]
