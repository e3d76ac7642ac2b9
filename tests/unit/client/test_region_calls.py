"""Calls on values in a client's region, whose jobs are detached from it before a call ends that is over early."""

import threading
import time

import numpy as np
import pytest

from kvtiers.client.arguments import Value
from kvtiers.client.client import Client
from kvtiers.client.pieces import Pieces
from kvtiers.client.requests import Get, Put
from kvtiers.client.rows import BounceRows
from kvtiers.client.state import ClientState
from kvtiers.host.messages import Status
from kvtiers.layout.tenants import Tenants
from kvtiers.secondary.tier_jobs import JobReleased

LENGTH = 4000
PATIENCE = 60.0


class Driver:
    """It begins a job of each transfer, and detaches all when it is woken, unless the test says otherwise."""

    def __init__(self):
        self.after = lambda: None
        self.at_waking = lambda: None
        self.requests = []

    def send(self, request):
        self.requests.append(request)
        request.job_began()
        self.after()
        return True

    def wake(self):
        self.at_waking()
        for request in self.requests:
            if request.is_stopped and request.stop():
                request.job_detached(None, ())


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def rows():
    rows = BounceRows(4, 4096, region=1 << 16, in_region=4)
    yield rows
    rows.end()
    rows.close()


@pytest.fixture
def client(driver, rows, monkeypatch):
    monkeypatch.setattr(Get, "_landed", lambda *_: None)  # the driver above has no job to say it of
    return Client(driver, rows, {LENGTH: 0}, LENGTH, PATIENCE, dict, lambda timeout: None, Tenants(""))


@pytest.fixture
def pieces(driver, rows):
    return Pieces(driver, rows, ClientState())


@pytest.mark.parametrize("calls", [1, 2])
def test_an_interrupt_while_a_call_is_begun_leaves_its_memory_in_no_use(client, driver, calls):
    def interrupt():
        nonlocal calls
        calls -= 1
        if not calls:
            raise KeyboardInterrupt

    driver.after = interrupt
    views = np.frombuffer(client.region, np.uint8)[: 4 * LENGTH].reshape(4, -1)
    with pytest.raises(KeyboardInterrupt):
        client.get_into([bytes([number]) for number in range(4)], list(views))  # in pieces of one
    assert calls == 0
    assert [request.stop() for request in driver.requests] == [False] * len(driver.requests)


def test_an_interrupt_while_a_call_ends_leaves_its_memory_in_no_use(client, driver):
    woken = []

    def interrupt():
        woken.append(1)
        if len(woken) == 1:
            raise KeyboardInterrupt

    driver.at_waking = interrupt
    view = np.frombuffer(client.region, np.uint8)[:LENGTH]
    with pytest.raises(KeyboardInterrupt):
        client.get_into([b"a"], [view], timeout=0.0)
    assert len(woken) == 2
    assert [request.stop() for request in driver.requests] == [False]


def test_jobs_in_the_region_are_detached_when_their_call_is_over_and_what_landed_is_found(bench, played, keys, clock):
    tier = played(*keys)
    driver = bench.drive(tier)
    get = bench.begin(Get, keys, clock.now + 1)
    get.parts = {row: [(0, 8)] for row in get.lease.rows}
    (job_id,) = tier.jobs
    assert tier.released == []
    assert get.stop()
    bench.step()
    bench.step()
    assert (set(tier.released), tier.killed) == ({job_id}, [])
    tier.says.append(JobReleased(job_id, bytes([Status.DONE] + [Status.FAILED] * (len(keys) - 1))))
    bench.step()
    assert not get.stop()
    get.wait_detached()
    assert get.found == {keys[0]: get.lease.rows[0]}
    clock.now += bench.detach_seconds
    bench.step()
    assert tier.killed == [], "it has answered"
    get.release()
    tier.end(keys[0])
    bench.step()
    assert bench.free == 8
    assert driver is not None


def test_a_host_that_does_not_answer_in_time_is_killed_and_its_end_ends_the_call(bench, played, keys, clock):
    tier = played()
    bench.drive(tier)
    put = bench.begin(Put, keys, clock.now + 1)
    (job_id,) = tier.jobs
    put.stop()
    bench.step()
    clock.now += bench.detach_seconds
    bench.step()
    bench.step()
    assert (set(tier.released), tier.killed) == ({job_id}, [job_id]), "killed once"
    assert put.stop(), "until the process has been reaped"
    tier.end()
    bench.step()
    put.wait_detached()


@pytest.mark.parametrize("stalls", ["between the poll and the decision", "before the message is sent"])
def test_a_host_is_not_killed_for_a_stall_of_the_callers_own_process(bench, played, keys, clock, stalls):
    """A long call that holds the interpreter takes as long: the answer lies in the socket meanwhile."""
    tier = played(*keys)
    poll, stalled = tier.poll, 0.0

    def stalling_poll():
        said = poll()
        clock.now += stalled if stalls == "between the poll and the decision" else 0.0
        return said

    def stalling_end():
        clock.now += stalled if stalls == "before the message is sent" else 0.0

    tier.poll, tier.on_schedule_end = stalling_poll, stalling_end
    bench.drive(tier)
    put = bench.begin(Put, keys, clock.now + 1)
    put.parts = {row: [(0, 8)] for row in put.lease.rows}
    (job_id,) = tier.jobs
    put.stop()
    stalled = bench.detach_seconds if stalls == "before the message is sent" else 0.0
    bench.step()
    assert tier.released
    stalled = bench.detach_seconds - stalled
    clock.now += bench.detach_seconds / 100
    bench.step()
    assert tier.killed == []
    tier.says.append(JobReleased(job_id, bytes([Status.FAILED] * len(keys))))
    bench.step()
    assert (tier.killed, put.stop()) == ([], False)


def test_a_driver_whose_thread_ends_by_a_bug_kills_the_hosts_that_a_call_would_wait_for(bench, played, keys, clock):
    tier = played()
    kill = tier.kill_job
    tier.kill_job = lambda job_id, reason: (kill(job_id, reason), tier.end())
    driver = bench.drive(tier, wait=pytest.fail, clock=time.monotonic)
    put = bench.begin(Put, keys)
    put.parts = {row: [(0, 8)] for row in put.lease.rows}
    driver._run()
    assert (tier.killed, put.over.is_set(), put.stop()) == ([1], True, False)


def test_of_a_call_whose_time_is_over_nothing_more_is_copied(pieces, driver, rows):
    gathered = [np.zeros(LENGTH, np.uint8) for _ in range(100)]
    values = [Value(bytes([place]) * 8, LENGTH, [[view]], [place]) for place, view in enumerate(gathered)]
    driver.after = lambda: driver.requests[-1].end("no time left")
    list(pieces.moved(Put, pieces.cut(values), time.monotonic() - 1))
    assert len(driver.requests) == 1


def test_jobs_that_are_left_when_the_tiers_are_closed_hold_no_call(bench, played, keys):
    tier = played()
    driver = bench.drive(tier)
    put = bench.begin(Put, keys)
    put.stop()
    waiting = threading.Thread(target=put.wait_detached, daemon=True)
    waiting.start()
    driver.close()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_a_call_whose_jobs_have_ended_waits_for_nothing(pieces, rows, driver):
    request = Put([], rows.in_region.take(1, 0.0), 0.0, {4: [(0, LENGTH)]})
    driver.at_waking = pytest.fail
    pieces._take_back(request)
    assert request.job_began() is None, "no further one begins"


def test_a_value_in_the_region_is_named_by_its_parts_and_a_piece_has_no_more_than_a_message_is_to_have(pieces, rows):
    parts = [(at, 8) for at in range(0, 255 * 16, 16)]
    values = [Value(bytes([number]), LENGTH, [[]], [number], parts) for number in range(200)]
    rows.in_region.count = 10_000
    cut = pieces.cut([*values, Value(b"row", LENGTH, [[]], [200])])
    assert [len(piece) for piece in cut] == [1, (1 << 15) // 255, 200 - (1 << 15) // 255]


@pytest.mark.parametrize(("free", "begun", "may"), [(4, 1, True), (3, 1, False), (0, 0, True), (4, 16, False)])
def test_a_get_begins_further_pieces_only_while_half_of_the_rows_stay_free(pieces, rows, free, begun, may):
    rows.free = rows.free[:free]
    piece = [Value(b"key", LENGTH, [[]], [0])] * 2
    assert pieces._may_begin(Get, piece, begun) is may
    assert pieces._may_begin(Put, piece, begun) is (begun < 16)
