"""Memory that is populated before there is a region: the region takes it over, or it is given back."""

import os

import pytest

BEGIN = (
    "from kvtiers.region.early_memory import EarlyMemory\n"
    "cache = layout()\n"
    "memory = EarlyMemory('kvtiers-' + engine_id, 400 * cache.row_stride + 4097, window=1 << 30)\n"
    "memory.nbytes"
)
POPULATED = (
    "until = time.monotonic() + PATIENCE\n"
    "while os.fstat(memory.fd).st_blocks * 512 < memory.nbytes and time.monotonic() < until: time.sleep(0.01)\n"
    "os.fstat(memory.fd).st_blocks * 512"
)
CREATE = "region = SharedOffloadRegion.create(engine_id, cache, 400 * cache.row_stride + 4097, memory=memory)"


def test_a_region_goes_on_with_the_memory_that_was_begun(machine):
    manager = machine.party()
    nbytes = manager.do(BEGIN)
    assert manager.do(POPULATED) >= nbytes, "before there is a region"
    pid = manager.do("memory.prefault.pid")
    manager.do(CREATE)
    assert manager.do("(region.num_rows, region.map_bytes, region.fd == memory.fd)") == [400, nbytes, True]
    assert manager.do("region._server._prefault.pid if region._server._prefault else None") in {pid, None}
    rank = machine.rank()
    assert rank.do("wait_for(join, lambda s: s.prefault_ended)")[2] >= 400
    rank.do("join.view[399 * join.row_stride] = 7")
    assert manager.do("region.view[399 * region.row_stride]") == 7
    manager.do("memory.close()")  # not its own any more
    assert manager.do("region.view[399 * region.row_stride]") == 7
    manager.do("region.close()")
    assert not [one for one in machine.leftovers() if "socket" not in one and str(manager.pid) in one]


def test_memory_without_a_region_is_given_back(machine, wait_until_gone):
    manager = machine.party()
    manager.do(BEGIN)
    pid = manager.do("memory.prefault.pid")
    manager.do("memory.close()\nmemory.close()")
    wait_until_gone(pid)
    assert not machine.leftovers()
    with pytest.raises(AssertionError, match="has been released or used"):
        manager.do(CREATE)
    assert not machine.leftovers()


def test_a_killed_engine_leaves_neither_memory_nor_program(machine, wait_until_gone):
    manager = machine.party()
    manager.do(BEGIN.replace("window=1 << 30", "window=1 << 16"))
    pid = manager.do("memory.prefault.pid")
    manager.kill()
    wait_until_gone(pid)
    assert not machine.leftovers()


def test_a_forked_worker_holds_nothing_of_it(machine):
    """An executor starts its workers while the memory is being populated, and may fork them."""
    manager = machine.party()
    manager.do(BEGIN)
    child = manager.do(
        "ready, running = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.write(running, b'x')\n"
        "    time.sleep(PATIENCE)\n"
        "os.read(ready, 1)\n"
        "child"
    )
    assert child not in {pid for pid, _ in machine.holders()}
    manager.do("os.kill(child, signal.SIGKILL)\nos.waitpid(child, 0)\nmemory.close()")
    assert not machine.leftovers()


def test_what_is_wanted_later_is_populated_by_fewer_threads_that_give_way(machine):
    manager = machine.party()
    manager.do("prefault.Prefault.piece_bytes = 1 << 20\ncache = layout()")
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 64 << 20, prefault_window=8 << 20)")
    rank = machine.rank()
    rank.do("wait_for(join, lambda s: s.populated_rows * join.row_stride >= (8 << 20) - join.row_stride)")
    pid = manager.do("region._server._prefault.pid")
    manager.do("region.follow(512)")
    rank.do("wait_for(join, lambda s: s.populated_rows * join.row_stride >= (16 << 20))")
    nice = manager.do(
        "sorted(int((task / 'stat').read_text().rpartition(')')[2].split()[16])"
        f" for task in Path('/proc/{pid}/task').iterdir())"
    )
    own = os.nice(0)  # that of the test run, and of all that it starts
    assert nice[0] == own, "the thread that reads its input"
    assert nice.count(min(own + 10, 19)) in {1, 2}
    assert len(nice) <= 4, "two that follow, one that reads, and the one that waits for them"
