from pathlib import Path

import pytest

ALLOCATED = "os.fstat(region.fd).st_blocks * 512"


@pytest.mark.parametrize("advice", [23, 9999], ids=["MADV_POPULATE_WRITE", "refused by the kernel (EINVAL)"])
def test_every_page_is_there_when_prefault_has_ended_and_it_goes_in_row_order(machine, advice):
    manager = machine.party()
    manager.do(f"populate.MADV_POPULATE_WRITE = {advice}\nprefault.Prefault.piece_bytes = 1 << 20\ncache = layout()")
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 1000 * cache.row_stride)")
    rank = machine.rank()
    rank.do("seen = []\nwait_for(join, lambda s: seen.append(s.populated_rows) or s.prefault_ended)")
    seen = rank.do("seen")
    assert seen == sorted(seen)
    assert seen[-1] == 1000
    assert manager.do(f"{ALLOCATED} >= 1000 * region.row_stride") is True
    manager.do("region.wait_ready()")
    method = manager.do("region._server._prefault.method")
    assert method == ("populated" if advice == 23 else "touched")


@pytest.mark.parametrize("advice", [23, 9999], ids=["MADV_POPULATE_WRITE", "refused by the kernel (EINVAL)"])
def test_prefault_never_changes_a_byte_that_a_rank_has_written(machine, advice):
    manager = machine.party()
    manager.do(f"populate.MADV_POPULATE_WRITE = {advice}\nprefault.Prefault.piece_bytes = 1 << 20\ncache = layout()")
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 3000 * cache.row_stride)")
    rank = machine.rank()
    rank.do(
        "view = join.view\n"
        "n = 0\n"
        "while True:\n"  # write ahead of the program, at it and behind it, until it has ended
        "    n += 1\n"
        "    for row in range(0, 3000, 7):\n"
        "        view[row * join.row_stride] = n % 256\n"
        "    if join.poll().prefault_ended:\n"
        "        break\n"
        "del view"
    )
    assert rank.do("all(join.view[row * join.row_stride] == n % 256 for row in range(0, 3000, 7))") is True


def test_an_error_of_populating_is_reported_and_fails_the_start(machine, populate_with):
    manager = machine.party()
    manager.do(
        populate_with(
            "class Emptied(real.Populator):\n"  # memory that is not there: the file behind the mapping is cut off
            "    def _map(self, nbytes, alignment):\n"
            "        self._fd = os.memfd_create('emptied')\n"
            "        os.ftruncate(self._fd, nbytes)\n"
            "        address = super()._map(nbytes, alignment)\n"
            "        os.ftruncate(self._fd, 0)\n"
            "        return address\n"
            "real.Populator = Emptied"
        )
    )
    manager.do("cache = layout(2)\nregion = SharedOffloadRegion.create(engine_id, cache, 10 * cache.row_stride)")
    assert "Bad address" in manager.do("gather(region, 'PrefaultEnded')")[-1]
    machine.rank(0, 2)
    machine.rank(1, 2)
    assert manager.do("region.all_joined, region.all_ready") == [True, False]
    with pytest.raises(AssertionError, match=r"StartError: .*its memory cannot be populated: .*Bad address"):
        manager.do("region.wait_ready()")


def test_the_program_gets_the_memory_and_no_other_descriptor(machine, stuck_populate):
    manager = machine.party()
    manager.do(stuck_populate)
    manager.do("extra, other = socket.socketpair()\nextra.set_inheritable(True)")
    manager.do("cache = layout()\nregion = SharedOffloadRegion.create(engine_id, cache, 2000 * cache.row_stride)")
    machine.rank().do("wait_for(join, lambda s: s.populated_rows > 0)")
    pid = manager.do("region._server._prefault.pid")
    links = sorted(str(fd.readlink()).split(":")[0] for fd in Path(f"/proc/{pid}/fd").iterdir())
    assert links == ["/memfd", "pipe", "pipe", "socket"]  # the region, and its three standard streams
    manager.do("region.close()")


def test_a_program_that_cannot_be_started_costs_speed_only(machine):
    manager = machine.party()
    manager.do("import sys\nsys.executable = '/nowhere/python'\ncache = layout()")
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 10 * cache.row_stride)")
    rank = machine.rank()
    assert rank.do("wait_for(join, lambda s: s.prefault_ended)")[0] == "ready"
    manager.do("region.wait_ready()")


def test_memory_is_asked_for_on_the_numa_node_that_is_named(machine, stuck_populate):
    manager = machine.party()
    manager.do(stuck_populate)
    manager.do("cache = layout()")
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 2000 * cache.row_stride, numa_node=0)")
    maps = manager.do("[line for line in open('/proc/self/numa_maps') if f'memfd:kvtiers-{engine_id}\\\\' in line]")
    assert maps, "those of the rows"
    assert all("prefer:0" in line or "prefer (many):0" in line for line in maps)
    machine.rank().do("wait_for(join, lambda s: s.populated_rows > 0)")
    pid = manager.do("region._server._prefault.pid")
    heap = [line for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines() if "heap" in line]
    assert "prefer:0" in heap[0] or "prefer (many):0" in heap[0]


def test_a_numa_node_that_does_not_exist_is_a_warning_only(machine):
    manager = machine.party()
    manager.do("import logging\nlines = []\ncache = layout()")
    manager.do(
        "class Keep(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        lines.append(record.getMessage())\n"
        "logging.getLogger('kvtiers.region').addHandler(Keep())"
    )
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 10 * cache.row_stride, numa_node=900)")
    assert any("NUMA node 900" in line for line in manager.do("lines"))
    machine.rank()
    manager.do("region.wait_ready()")
