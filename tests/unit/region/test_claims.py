"""Claims on a caller's memory: what a host may do with it, and how a call gets it back from one that is using it."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from kvtiers.region.claims import RECORD_BYTES, ClaimRevoked, ClaimState, ClaimTable
from kvtiers.region.memfd import create_memfd, map_memory

FIRST, COUNT = 7, 3
PARTS_FROM = COUNT * RECORD_BYTES
REGION = 4 * 4096
NBYTES = PARTS_FROM + REGION
PLACE = {"first": FIRST, "at": 0, "count": COUNT}
HOST = """
import sys
from kvtiers.region.claims import ClaimTable
from kvtiers.region.memfd import map_memory
fd, nbytes, row = map(int, sys.argv[1:4])
mapping = map_memory(fd, nbytes, nbytes)
table = ClaimTable(fd, mapping.view, mapping.view, **eval(sys.argv[4]))
with table.held(row) as held:
    print(held.is_open, flush=True)
    sys.stdin.readline()
    held.has_landed = True
print("done", flush=True)
sys.stdin.readline()
"""
KEEPING_HOST = (
    HOST.replace("held.has_landed", "held.is_kept")
    + """
table.release(row)
print("released", flush=True)
sys.stdin.readline()
"""
)


@pytest.fixture
def fd():
    fd = create_memfd("kvtiers-test", NBYTES)
    yield fd
    os.close(fd)


@pytest.fixture
def table(fd):
    mapping = map_memory(fd, NBYTES, NBYTES)
    table = ClaimTable(fd, mapping.view, mapping.view[PARTS_FROM:], **PLACE)
    yield table
    table.close()
    mapping.close()


@pytest.fixture
def host(fd):
    """Another process that holds the claim of a row until it gets a line."""
    with started(fd, HOST) as process:
        yield process


@contextlib.contextmanager
def started(fd, script):
    command = [sys.executable, "-c", script, str(fd), str(NBYTES), str(FIRST), repr(PLACE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd], text=True) as process:
        yield process
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def test_a_claim_says_where_the_parts_lie_until_it_is_revoked(table):
    parts = [(8192, 5), (0, 4096)]
    table.open(FIRST + 1, parts, in_place=True)
    assert table.parts(FIRST + 1, 4101) == (parts, True)
    assert table.revoke(FIRST + 1) is ClaimState.OPEN
    with pytest.raises(ClaimRevoked):
        table.parts(FIRST + 1, 4101)
    with table.held(FIRST + 1) as held:
        assert not held.is_open
    assert table.revoke(FIRST + 1) is ClaimState.REVOKED


@pytest.mark.parametrize(
    "parts", [[(0, 99)], [(REGION - 99, 100)], [(REGION, 100)], [(1 << 63, 100)], [(0, 100)] * 2, [(0, 0), (0, 100)]]
)
def test_parts_that_are_not_the_value_or_lie_elsewhere_are_refused(table, parts):
    table.open(FIRST, parts, in_place=False)
    with pytest.raises(IndexError, match=f"claim {FIRST} has no 100 bytes"):
        table.parts(FIRST, 100)


@pytest.mark.parametrize("row", [FIRST - 1, FIRST + COUNT])
def test_a_row_that_is_no_claim_is_refused(table, row):
    with pytest.raises(IndexError, match=f"no claim {row}"):
        table.parts(row, 100)


def test_as_many_parts_as_a_record_has_room_for_come_back(table):
    parts = [(place, 1) for place in range(ClaimTable.MOST_PARTS)]
    table.open(FIRST + COUNT - 1, parts, in_place=False)
    assert table.parts(FIRST + COUNT - 1, len(parts)) == (parts, False)
    assert RECORD_BYTES - 16 * ClaimTable.MOST_PARTS < 32


def test_a_call_gets_its_memory_back_when_the_host_that_writes_to_it_has_done_so(table, host):
    table.open(FIRST, [(0, 8)], in_place=False)
    table.open(FIRST + 1, [(0, 8)], in_place=False)
    host.stdin.write("")
    assert host.stdout.readline() == "True\n"
    assert table.revoke(FIRST) is None, "it may be writing"
    assert table.revoke(FIRST + 1) is ClaimState.OPEN, "another claim is not its concern"
    host.stdin.write("\n")
    host.stdin.flush()
    assert host.stdout.readline() == "done\n"
    assert table.revoke(FIRST) is ClaimState.LANDED


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_call_gets_its_memory_back_from_a_host_that_is_killed(table, host, is_stopped):
    table.open(FIRST, [(0, 8)], in_place=False)
    assert host.stdout.readline() == "True\n"
    if is_stopped:
        host.send_signal(signal.SIGSTOP)
    assert table.revoke(FIRST) is None
    host.kill()
    host.wait(60)
    assert table.revoke(FIRST) is ClaimState.OPEN


def test_a_call_gets_its_memory_back_when_what_a_host_kept_is_released(table, fd):
    table.open(FIRST, [(0, 8)], in_place=True)
    with started(fd, KEEPING_HOST) as host:
        for line, state in (("True", None), ("done", None), ("released", ClaimState.OPEN)):
            assert host.stdout.readline() == f"{line}\n"
            assert table.revoke(FIRST) is state
            host.stdin.write("\n")
            host.stdin.flush()


def test_what_has_landed_is_taken_back_before_other_bytes_come(table):
    table.open(FIRST, [(0, 8)], in_place=True)
    with table.held(FIRST) as held:
        held.has_landed = True
    assert table.state(FIRST) is ClaimState.LANDED
    with table.held(FIRST):
        table.unland(FIRST)
    assert table.parts(FIRST, 8) == ([(0, 8)], True)
    assert table.revoke(FIRST) is ClaimState.OPEN


def test_a_host_that_comes_too_late_is_not_given_the_memory(table, fd):
    table.open(FIRST, [(0, 8)], in_place=False)
    table.revoke(FIRST)
    command = [sys.executable, "-c", HOST, str(fd), str(NBYTES), str(FIRST), repr(PLACE)]
    found = subprocess.run(command, pass_fds=[fd], input="\n\n", capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "done"]
