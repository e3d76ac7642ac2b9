"""The end of what a test has started, also where it fails."""

import pytest
from tests import pool_rig


@pytest.fixture(autouse=True)
def _ends():
    yield
    pool_rig.end_all()
