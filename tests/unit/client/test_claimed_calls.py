"""Calls on values in a client's region, beside a driver and hosts that do the unexpected: they end, as do claims."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvtiers.client.arguments import Value
from kvtiers.client.client import Client
from kvtiers.client.pieces import Pieces
from kvtiers.client.requests import Get, Put, Task, Transfer
from kvtiers.client.rows import BounceRows
from kvtiers.client.state import ClientState
from kvtiers.layout.tenants import Tenants
from kvtiers.region.claims import ClaimState

LENGTH = 4000
PATIENCE = 60.0


class Driver:
    """It begins a job of each transfer, and then does what the test says."""

    def __init__(self):
        self.after = lambda: None
        self.at_a_task = lambda: None
        self.tasks = []

    def send(self, request):
        if isinstance(request, Task):
            self.tasks.append(request)
            self.at_a_task()
            return False
        if isinstance(request, Transfer):
            request.job_began()
            self.after()
        return True


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def rows():
    rows = BounceRows(4, 4096, region=1 << 16, claims=4)
    yield rows
    rows.end()
    rows.close()


@pytest.fixture
def client(driver, rows):
    return Client(driver, rows, {LENGTH: 0}, LENGTH, PATIENCE, dict, lambda timeout: None, Tenants(""))


@pytest.fixture
def pieces(driver, rows):
    return Pieces(driver, rows, ClientState())


@pytest.mark.parametrize("calls", [1, 2])
def test_an_interrupt_while_a_call_is_begun_leaves_no_claim_open(client, driver, rows, calls):
    def interrupt():
        nonlocal calls
        calls -= 1
        if not calls:
            raise KeyboardInterrupt

    driver.after = interrupt
    views = np.frombuffer(client.region, np.uint8)[: 4 * LENGTH].reshape(4, -1)
    with pytest.raises(KeyboardInterrupt):
        client.get_into([bytes([number]) for number in range(4)], list(views))  # in pieces of two
    table = rows.claims.table
    assert calls == 0
    assert {table.state(table.first + place) for place in range(table.count)} == {ClaimState.REVOKED}


def test_an_interrupt_while_a_call_ends_leaves_no_claim_open(client, driver, rows):
    def interrupt():
        driver.at_a_task = lambda: None
        raise KeyboardInterrupt

    driver.at_a_task = interrupt
    view = np.frombuffer(client.region, np.uint8)[:LENGTH]
    with pytest.raises(KeyboardInterrupt):
        client.get_into([b"a"], [view], timeout=0.0)
    assert len(driver.tasks) == 2
    table = rows.claims.table
    assert {table.state(table.first + place) for place in range(table.count)} == {ClaimState.REVOKED}


@pytest.mark.parametrize("state", ClaimState)
def test_a_call_does_not_wait_for_a_claim_that_no_job_uses(pieces, rows, state):
    """Its host has left a lock behind."""
    table = SimpleNamespace(revoke=lambda row: None if row == 4 else ClaimState.OPEN, state=lambda row: state)
    request = Put([], rows.claims.take(2, 0.0), 0.0)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(pieces._ended(request, table, [4, 5])), daemon=True)
    thread.start()
    thread.join(5.0)
    assert ended == [{4: state, 5: ClaimState.OPEN}]


def test_a_call_waits_for_a_claim_that_a_job_uses_and_has_it_ended(pieces, rows, driver):
    answers = iter([None] * 200 + [ClaimState.OPEN])
    table = SimpleNamespace(revoke=lambda row: next(answers))
    request = Put([], rows.claims.take(1, 0.0), 0.0)
    request.job_began()
    assert pieces._ended(request, table, [4]) == {4: ClaimState.OPEN}
    assert len(driver.tasks) == 2, "to drop what has not begun, and to end what is in use"
    assert all(task.until == float("inf") for task in driver.tasks), "neither may be too late"


@pytest.mark.parametrize(("free", "begun", "may"), [(4, 1, True), (3, 1, False), (0, 0, True), (4, 16, False)])
def test_a_get_begins_further_pieces_only_while_half_of_the_rows_stay_free(pieces, rows, free, begun, may):
    rows.free = rows.free[:free]
    piece = [Value(b"key", LENGTH, [[]], [0])] * 2
    assert pieces._may_begin(Get, piece, begun) is may
    assert pieces._may_begin(Put, piece, begun) is (begun < 16)
