import os

import pytest


def test_closing_leaves_nothing_and_may_be_repeated(machine):
    manager = machine.manager()
    rank = machine.rank()
    rank.do("join.close()\njoin.close()")
    manager.do("region.close()\nregion.close()")
    assert machine.leftovers() == []
    with pytest.raises(AssertionError, match="ValueError: the region is closed"):
        manager.do("region.view")
    with pytest.raises(AssertionError, match=r"ValueError: rank 0 .* has no memory: it is closed"):
        rank.do("join.view")
    assert manager.do("[region.fd, region.all_joined]") == [None, False]


def test_closing_ends_a_wait_for_ranks(machine):
    manager = machine.manager()
    manager.do(
        "import threading\n"
        "said = []\n"
        "def wait():\n"
        "    try:\n"
        "        region.wait_ready(3600)\n"
        "    except Exception as error:\n"
        "        said.append(str(error))\n"
        "waiting = threading.Thread(target=wait)\n"
        "waiting.start()\n"
        "region.close()\n"
        "waiting.join(PATIENCE)"
    )
    assert manager.do("said[0]").endswith("it was closed")


def test_closing_gives_back_every_descriptor_and_thread(machine):
    party = machine.party()
    party.do("import threading\ncache = layout()")
    count = "[len(os.listdir('/proc/self/fd')), threading.active_count()]"
    before = party.do(count)
    party.do("region = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")
    party.do("join = RegionJoin.start(engine_id, cache, 0)\nregion.wait_ready()\njoin.wait(PATIENCE)")
    party.do("gather(region, 'PrefaultEnded')")
    assert party.do(count) > before
    party.do("join.close()\nregion.close()")
    assert party.do(count) == before


def test_a_region_that_cannot_be_made_gives_back_every_descriptor(machine):
    party = machine.party()
    party.do("cache = layout()\nother = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")
    count = "len(os.listdir('/proc/self/fd'))"
    party.do("gather(other, 'PrefaultEnded')")
    before = party.do(count)
    for options in ("engine_id, cache, 8 * cache.row_stride", "engine_id + '-2', cache, 1 << 50, huge_pages='2MiB'"):
        with pytest.raises(AssertionError, match="StartError"):
            party.do(f"SharedOffloadRegion.create({options})")
    assert party.do(count) == before


def test_a_region_closed_while_ranks_are_there_notifies_them(machine):
    manager = machine.manager()
    rank = machine.rank()
    manager.do("region.close()")
    assert "closed the region" in rank.do("wait_for(join, lambda s: s.state == 'lost')")[1]
    rank.do("join.close()")
    assert machine.leftovers() == []


def test_a_buffer_still_in_use_keeps_the_memory_mapped_until_it_is_gone(machine):
    manager = machine.party()
    manager.do("import logging, numpy\nlines = []\ncache = layout()")
    manager.do(
        "class Keep(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        lines.append(record.getMessage())\n"
        "logging.getLogger('kvtiers.region').addHandler(Keep())"
    )
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 10 * cache.row_stride)")
    manager.do("row = numpy.frombuffer(region.view[100:200], dtype=numpy.uint8)\nregion.close()")
    assert any("still in use" in line for line in manager.do("lines"))
    manager.do("row[:] = 7")
    assert manager.do("int(row.sum())") == 700
    assert machine.leftovers() == [f"process {manager.pid} maps it"]
    manager.do("del row")
    assert machine.leftovers() == []


def test_no_program_that_the_engine_starts_inherits_anything(machine):
    manager = machine.manager()
    rank = machine.rank()
    for party in (manager, rank):
        listing = party.do(
            "import subprocess, sys\n"
            "subprocess.run([sys.executable, '-c', 'import os; print([os.readlink(f\"/proc/self/fd/{fd}\") for fd in "
            'os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")])\'], '
            "close_fds=False, capture_output=True, text=True).stdout"
        )
        assert "pipe" in listing
        assert "memfd" not in listing
        assert "socket" not in listing
        assert "pidfd" not in listing


def test_a_forked_child_holds_nothing_of_the_region(machine, wait_until_gone):
    """A child forked without exec (multiprocessing's way) may outlive the engine: the memory and the name must not."""
    manager = machine.manager(rows=100)
    rank = machine.rank()
    manager.do("region.wait_ready()\ngather(region, 'PrefaultEnded')\nregion.view[0] = 9")
    code = (
        "is_free, has_detached = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"  # here the child has run what it runs after a fork
        "    value = {owner}.view[0] if {mapped} else None\n"  # its memory is its own now, and empty
        "    os.set_blocking(0, True)\n"
        "    os.write(has_detached, b'.')\n"
        "    signal.pause()\n"
        "os.read(is_free, 1)\n"
        "child"
    )
    children = [
        manager.do(code.format(owner="region", mapped="not region._closed")),
        rank.do(code.format(owner="join", mapped="join.state == 'ready'")),
    ]
    try:
        assert rank.do("join.state") == "ready"
        assert manager.do("[region.view[0], region.all_joined]") == [9, True]
        rank.kill()  # its forked child lives on, and yet:
        assert manager.do("gather(region, 'RankGone')")[-1] == "RankGone(rank=0)"
        manager.kill()
        assert machine.leftovers() == []
    finally:
        for child in children:
            os.kill(child, 9)
            wait_until_gone(child)


def test_a_forked_child_may_close_its_copy_without_harm_to_the_parent(machine):
    manager = machine.manager()
    rank = machine.rank()
    for party, name in ((manager, "region"), (rank, "join")):
        status = party.do(
            "child = os.fork()\n"
            "if child == 0:\n"
            f"    {name}.close()\n"
            "    os._exit(7)\n"
            "os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
        )
        assert status == 7
    rank.do("join.view[1] = 5")
    assert manager.do("[region.view[1], region.all_joined]") == [5, True]
