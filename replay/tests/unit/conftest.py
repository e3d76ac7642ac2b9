"""One made-up workload, served by the tests of plans."""

import pytest

from kvtiers_replay.plan import PlanTrace
from kvtiers_replay.workload import Workload

from .made_up import made_up


@pytest.fixture(scope="session")
def workload() -> Workload:
    return made_up()


@pytest.fixture(scope="session")
def trace(workload) -> PlanTrace:
    return PlanTrace(workload)
