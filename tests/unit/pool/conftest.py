"""The end of what a test has started, and a hold on threads that ends with it."""

import threading

import pytest
from tests import pool_rig


@pytest.fixture(autouse=True)
def _ends():
    yield
    pool_rig.end_all()


@pytest.fixture
def over():
    """An event for which a test has a thread wait."""
    event = threading.Event()
    yield event
    event.set()
