"""One made-up workload, served by the tests of plans."""

import pytest

from kvtiers_replay.plan import PlanTrace
from kvtiers_replay.workload import Workload

from .synthetic import synthetic


@pytest.fixture(scope="session")
def workload() -> Workload:
    return synthetic()


@pytest.fixture(scope="session")
def trace(workload) -> PlanTrace:
    return PlanTrace(workload)
