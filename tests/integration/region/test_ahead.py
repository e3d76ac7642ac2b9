"""Memory that is ready ahead of use: the window, what follows it, and what happens where the memory is not there."""

import os
import signal
import time

import pytest

RESIDENT = "os.fstat(region.fd).st_blocks * 512"
ROW = 36 << 10


def window(machine, rows, ahead, options=""):
    """A manager whose pre-fault program keeps ``ahead`` rows ready, in pieces of 1 MiB."""
    manager = machine.party()
    manager.do("prefault.Prefault.piece_bytes = 1 << 20\ncache = layout()")
    how = f"prefault_window={ahead} * cache.row_stride{options}"
    manager.do(f"region = SharedOffloadRegion.create(engine_id, cache, {rows} * cache.row_stride, {how})")
    return manager


def test_memory_is_ready_a_window_ahead_of_the_rows_in_use_and_no_further(machine):
    manager = window(machine, rows=4000, ahead=256)
    rank = machine.rank()
    assert 256 <= rank.do("wait_for(join, lambda s: s.populated_rows >= 256)")[2] <= 256 + 2 * (1 << 20) // ROW
    for rows in (100, 1000, 900, 1016):
        again = manager.do(f"region.follow({rows})")
        assert again == rows + 256 // 16
    assert rank.do(f"wait_for(join, lambda s: s.populated_rows >= {1016 + 256})")[3] is False
    resident = manager.do(RESIDENT)
    assert (1016 + 256) * ROW <= resident <= (1016 + 256) * ROW + 5 * (1 << 20)  # whole pieces, one a thread
    assert manager.do("region.follow(3990)") > 4000
    assert rank.do("wait_for(join, lambda s: s.prefault_ended)")[2] == 4000


def test_a_window_as_large_as_the_region_is_all_of_it(machine):
    manager = window(machine, rows=100, ahead=5000)
    assert manager.do("region.follow(0)") > 100
    assert machine.rank().do("wait_for(join, lambda s: s.prefault_ended)")[2] == 100


def test_a_primary_of_512_gib_takes_no_more_memory_than_its_window(machine):
    manager = machine.party()
    manager.do(
        "prefault.Prefault.piece_bytes = 1 << 20\n"
        "from kvtiers.region import region as of_regions\n"
        "of_regions.memory_problem = lambda nbytes: None\n"  # this machine has less: it is never touched
        "cache = layout()\n"
        "region = SharedOffloadRegion.create(engine_id, cache, 512 << 30, prefault_window=64 << 20)"
    )
    rank = machine.rank()
    rank.do("wait_for(join, lambda s: s.populated_rows * join.row_stride >= (64 << 20) - join.row_stride)")
    manager.do("region.wait_ready()")
    assert manager.do("region.num_rows * region.row_stride") > 511 << 30
    resident = manager.do(RESIDENT)
    manager.do("import kvtiers.primary.tier as tier")
    manager.do("primary = tier.CPUPrimaryTier(region.num_rows, region.row_stride, region.view)")
    assert manager.do("primary.prepare_store([b'key%d' % n for n in range(100)], 'r').rows") == list(range(100))
    rank.do("join.view[99 * join.row_stride] = 7")
    assert manager.do("region.view[99 * region.row_stride]") == 7
    assert (64 << 20) <= resident <= manager.do(RESIDENT) <= (64 << 20) + 5 * (1 << 20)
    manager.do("primary.close()\nregion.close()")


def test_a_killed_engine_leaves_nothing_while_its_program_waits_for_more_to_do(machine, wait_until_gone):
    manager = window(machine, rows=4000, ahead=64)
    machine.rank().do("wait_for(join, lambda s: s.populated_rows >= 64)")
    pid = manager.do("region._server._prefault.pid")
    manager.kill()
    wait_until_gone(pid)


def test_a_program_that_stands_still_never_makes_the_one_who_asks_wait(machine, stuck_populate):
    manager = machine.party()
    manager.do(stuck_populate)
    manager.do(
        "cache = layout()\n"
        "region = SharedOffloadRegion.create(engine_id, cache, 9000 * cache.row_stride, prefault_window=1 << 20)"
    )
    machine.rank().do("wait_for(join, lambda s: s.populated_rows > 0)")
    os.kill(manager.do("region._server._prefault.pid"), signal.SIGSTOP)
    begin = time.monotonic()
    manager.do("for row in range(9000):\n    _ = region.follow(row)")
    assert time.monotonic() - begin < 30.0  # it returns at all: nothing reads what is asked
    manager.do("region.close()")


READY_WITH_ALL = "region = SharedOffloadRegion.create(engine_id, cache, 200 * cache.row_stride, prefault='all')"


def test_where_the_start_waits_for_all_it_waits_until_every_rank_has_pinned_every_row(machine):
    manager = machine.party()
    manager.do(f"cache = layout(2)\n{READY_WITH_ALL}")
    ranks = [machine.rank(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.do("wait_for(join, lambda s: s.prefault_ended)")
    assert manager.do("gather(region, 'PrefaultEnded')")
    assert manager.do("[region.all_joined, region.all_ready]") == [True, False]
    ranks[0].do("join.settle()")
    with pytest.raises(AssertionError, match="its memory is not pinned by all ranks after"):
        manager.do("region._ranks.wait_all(0.2)")
    ranks[1].do("join.settle()")
    manager.do("region.wait_ready(60)")
    assert manager.do("region.all_ready") is True
    ranks[1].kill()
    assert manager.do("gather(region, 'RankGone')")
    assert manager.do("region.all_ready") is False


def test_memory_that_is_missing_later_ends_the_growth_and_every_rank_hears_that_it_is_short(machine, populate_with):
    manager = machine.party()
    manager.do(
        populate_with(
            "real_populate = real.Populator._populate\n"
            "def short(self, start, length):\n"
            "    if start >= 4 << 20:\n"
            "        raise OSError(12, 'Cannot allocate memory')\n"
            "    real_populate(self, start, length)\n"
            "real.Populator._populate = short"
        )
    )
    manager.do(
        "cache = layout()\n"
        "region = SharedOffloadRegion.create(engine_id, cache, 2000 * cache.row_stride, prefault_window=2 << 20)"
    )
    rank = machine.rank()
    rank.do("wait_for(join, lambda s: s.populated_rows >= (2 << 20) // join.row_stride)")
    manager.do("region.wait_ready()")
    manager.do("region.follow(500)")
    status = rank.do("wait_for(join, lambda s: s.prefault_ended)")
    assert status[2] == (4 << 20) // ROW
    assert rank.do("join.poll().memory_is_short") is True
    assert "Cannot allocate memory" in manager.do("gather(region, 'PrefaultEnded')")[-1]


def test_rows_are_open_as_far_as_every_rank_that_pins_has_pinned_them(machine):
    manager = machine.party()
    manager.do("cache = layout(2)\nregion = SharedOffloadRegion.create(engine_id, cache, 200 * cache.row_stride)")
    ranks = [machine.rank(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.do("wait_for(join, lambda s: s.state == 'ready')")
    manager.do("region.wait_ready(60)")
    rows = manager.do("region.num_rows")
    assert manager.do("region.pinned_rows") == rows, "no rank pins: all are open"

    def opened(wanted):
        end = "import time\nend = time.monotonic() + 60"
        manager.do(f"{end}\nwhile region.pinned_rows != {wanted}: assert time.monotonic() < end; time.sleep(0.001)")

    ranks[0].do("join.pinned(0)")
    opened(0)
    ranks[0].do("join.pinned(9)")
    ranks[1].do("join.pinned(3)")
    opened(3)
    ranks[1].do("join.settle()")  # it has no GPU, or cannot pin: it does not keep the others' rows closed
    opened(9)
    ranks[0].kill()
    opened(rows)
