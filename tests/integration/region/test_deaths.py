"""``kill -9`` of each party at each stage: the others notice, and nothing is left."""

import os
import signal
from pathlib import Path

import pytest

STAGES = ["before the rank has joined", "during pre-fault", "after all have joined"]


def start(machine, stuck_populate, stage):
    """A manager and a rank at this stage, and the pre-fault program's pid where it still runs."""
    manager = machine.party()
    prefault = None
    if stage == "during pre-fault":
        manager.do(stuck_populate)
    manager.do("cache = layout()\nregion = SharedOffloadRegion.create(engine_id, cache, 4000 * cache.row_stride)")
    rank = machine.rank(wait=stage != "before the rank has joined") if stage != STAGES[0] else machine.party()
    if stage == "during pre-fault":
        prefault = manager.do("region._server._prefault.pid")
        populated = rank.do("wait_for(join, lambda s: s.populated_rows > 0)")
        assert not populated[3]
    else:
        manager.do("gather(region, 'PrefaultEnded')")
    return manager, rank, prefault


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_scheduler_leaves_nothing_and_its_ranks_notice(machine, stuck_populate, wait_until_gone, stage):
    manager, rank, prefault = start(machine, stuck_populate, stage)
    manager.kill()
    if prefault is not None:
        wait_until_gone(prefault)
    if stage != STAGES[0]:
        _, reason, _, ended = rank.do("wait_for(join, lambda s: s.state == 'lost')")
        assert f"process {manager.pid} has ended" in reason
        assert ended
        rank.do("join.view[0] = 1")  # until it closes, a running copy still has its memory
        rank.do("join.close()")
    assert machine.leftovers() == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_is_noticed_and_another_may_take_its_place(machine, stuck_populate, wait_until_gone, stage):
    manager, rank, prefault = start(machine, stuck_populate, stage)
    if stage == STAGES[0]:  # connected, and killed before it has said who it is
        rank.do("sock = connected(engine_id)")
    rank.kill()
    if stage != STAGES[0]:
        events = manager.do("gather(region, 'RankGone')")
        assert [event for event in events if "Rank" in event and "Joined" not in event] == [
            "RankLost(rank=0)",
            "RankGone(rank=0)",
        ]
        assert manager.do("[region.all_joined, len(region.lost_ranks)]") == [False, 0]
    machine.rank()
    manager.do("region.wait_ready(PATIENCE)")
    manager.do("region.close()")
    if prefault is not None:
        wait_until_gone(prefault)


def test_a_killed_prefault_program_costs_speed_only(machine, stuck_populate):
    manager, rank, prefault = start(machine, stuck_populate, "during pre-fault")
    os.kill(prefault, signal.SIGKILL)
    ended = manager.do("gather(region, 'PrefaultEnded')")[-1]
    assert "error=''" in ended
    assert not Path(f"/proc/{prefault}").exists()  # reaped: a zombie would still be there
    state, _, rows, _ = rank.do("wait_for(join, lambda s: s.prefault_ended)")
    assert state == "ready"
    assert 0 < rows < 4000
    manager.do("region.wait_ready()")
    rank.do("join.view[-1] = 9")
    assert manager.do("region.view[-1]") == 9


def test_a_prefault_program_that_the_kernel_kills_for_want_of_memory_ends_the_use_of_further_rows(
    machine, stuck_populate
):
    counts = "from kvtiers.region import prefault\nprefault.oom_kills = iter([3, 4]).__next__\n"
    manager, rank, prefault = start(machine, counts + stuck_populate, "during pre-fault")
    os.kill(prefault, signal.SIGKILL)
    ended = manager.do("gather(region, 'PrefaultEnded')")[-1]
    assert "memory ran out" in ended
    rank.do("wait_for(join, lambda s: s.prefault_ended)")
    assert rank.do("join.poll().memory_is_short") is True
    assert manager.do("region.all_ready") is False


def test_a_prefault_program_that_is_stopped_ends_with_its_engine_too(machine, stuck_populate, wait_until_gone):
    manager, _, prefault = start(machine, stuck_populate, "during pre-fault")
    os.kill(prefault, signal.SIGSTOP)
    manager.kill()
    wait_until_gone(prefault)


def test_a_prefault_program_that_is_stopped_just_after_its_engines_end_ends_too(
    machine, populate_with, wait_until_gone
):
    """Before it has armed its signal, and when its process group is orphaned already."""
    manager = machine.party()
    manager.do(
        populate_with("while os.getppid() == int(sys.argv[1]):\n    real.time.sleep(0.01)\nos.kill(os.getpid(), 19)")
    )
    manager.do("cache = layout()\nregion = SharedOffloadRegion.create(engine_id, cache, 4000 * cache.row_stride)")
    started = "None if region._server._prefault is None else region._server._prefault.pid"
    while (prefault := manager.do(started)) is None:  # by the accept thread
        pass
    manager.kill()
    wait_until_gone(prefault)


def test_a_region_closed_during_prefault_ends_the_program(machine, stuck_populate, wait_until_gone):
    manager, _, prefault = start(machine, stuck_populate, "during pre-fault")
    manager.do("region.close()")
    wait_until_gone(prefault)


def test_a_rank_whose_connection_ended_is_lost_and_only_gone_when_its_process_is(machine):
    manager = machine.manager(options="prefault='off'")  # its end would be an event, too
    rank = machine.rank()
    manager.do("region.wait_ready()")
    rank.do("join._sock.shutdown(socket.SHUT_RDWR)")  # no goodbye; the process and its mapping live on
    assert manager.do("gather(region, 'RankLost')")[-1] == "RankLost(rank=0)"
    assert manager.do("[list(region.lost_ranks), region.all_joined, region.poll()]") == [[0], False, []]
    second = machine.rank(wait=False)
    with pytest.raises(AssertionError, match=f"process {rank.pid} has joined as this rank already"):
        second.do("join.wait(PATIENCE)")
    rank.kill()
    assert manager.do("gather(region, 'RankGone')")[-1] == "RankGone(rank=0)"
    assert manager.do("list(region.lost_ranks)") == []


def test_a_rank_that_closes_is_gone_at_once_though_its_process_lives_on(machine):
    manager = machine.manager()
    rank = machine.rank()
    rank.do("join.close()")
    assert manager.do("gather(region, 'RankGone')")[-2:] == ["RankLost(rank=0)", "RankGone(rank=0)"]
    assert machine.leftovers() != []  # the manager's own
    assert not any(f"process {rank.pid} " in line for line in machine.leftovers())


def test_a_rank_that_closes_with_a_buffer_in_use_is_not_taken_for_gone(machine):
    manager = machine.manager()
    rank = machine.rank()
    rank.do("import numpy\ncells = numpy.frombuffer(join.view[:100], dtype=numpy.uint8)\njoin.close()")
    assert manager.do("gather(region, 'RankLost')")[-1] == "RankLost(rank=0)"
    assert manager.do("list(region.lost_ranks)") == [0]
    rank.do("cells[5] = 3")
    assert manager.do("region.view[5]") == 3


def test_a_rank_that_dies_during_the_start_is_named(machine):
    manager = machine.manager(world_size=2)
    rank = machine.rank(1, 2)
    rank.kill()
    with pytest.raises(AssertionError, match=rf"StartError: .*rank 1 \(process {rank.pid}\) ended before all ranks"):
        manager.do("region.wait_ready()")


def test_a_rank_finds_the_next_scheduler_when_the_first_dies_before_it_answered(machine):
    first = machine.party()
    first.do("sock = listen(engine_id)")
    rank = machine.rank(wait=False)
    first.do(
        "sock.setblocking(True)\nsock.settimeout(PATIENCE)\npeer, _ = sock.accept()"
    )  # it came, and gets no answer
    first.kill()
    machine.manager()
    rank.do("join.wait(PATIENCE)")


def test_a_scheduler_that_is_stopped_does_not_make_its_ranks_give_up(machine):
    manager = machine.manager()
    rank = machine.rank()
    os.kill(manager.pid, signal.SIGSTOP)
    try:
        rank.do("join.view[0] = 4")
        assert rank.do("join.state") == "ready"
    finally:
        os.kill(manager.pid, signal.SIGCONT)
    assert manager.do("region.view[0]") == 4


def test_a_rank_that_is_stopped_holds_nothing_up_and_its_end_is_seen(machine):
    manager = machine.party()
    manager.do("cache = layout(2)\nregion = SharedOffloadRegion.create(engine_id, cache, 3000 * cache.row_stride)")
    stopped, rank = machine.rank(0, 2), machine.rank(1, 2)
    os.kill(stopped.pid, signal.SIGSTOP)
    manager.do("region.wait_ready()")
    assert rank.do("wait_for(join, lambda s: s.prefault_ended)")[2] == 3000
    rank.do("join.close()")
    assert "RankGone(rank=1)" in manager.do("gather(region, 'RankGone')")
    assert manager.do("list(region.lost_ranks)") == []
    os.kill(stopped.pid, signal.SIGKILL)
    assert manager.do("gather(region, 'RankGone')") == ["RankLost(rank=0)", "RankGone(rank=0)"]


def test_a_rank_whose_other_code_copies_and_closes_descriptors_stays_what_it_is(machine):
    manager = machine.manager()
    rank = machine.rank()
    rank.do(
        "import mmap\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        os.close(os.dup(int(fd)))\n"
        "        os.close(os.open(f'/proc/self/fd/{fd}', os.O_RDONLY))\n"
        "    except OSError:\n"
        "        pass\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.closerange(3, 1000)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)"
    )
    rank.do("join.pinned(5)\njoin.view[0] = 8")
    manager.do("until = time.monotonic() + PATIENCE\nwhile region.pinned_rows != 5: assert time.monotonic() < until")
    assert manager.do("[region.all_joined, region.view[0], list(region.lost_ranks)]") == [True, 8, []]
    rank.kill()
    assert manager.do("gather(region, 'RankGone')")[-2:] == ["RankLost(rank=0)", "RankGone(rank=0)"]


def test_a_process_that_is_forked_in_c_and_holds_the_socket_of_a_dead_rank_keeps_it_not_alive(machine):
    manager = machine.manager()
    rank = machine.rank()
    child = rank.do(
        "import ctypes\n"
        "child = ctypes.PyDLL(None).fork()\n"  # no hook of Python's runs
        "if child == 0:\n"
        "    signal.pause()\n"
        "child"
    )
    try:
        rank.kill()
        assert manager.do("gather(region, 'RankGone')")[-2:] == ["RankLost(rank=0)", "RankGone(rank=0)"]
    finally:
        os.kill(child, signal.SIGKILL)


def test_ranks_and_scheduler_in_containers_beside_each_other_see_each_others_end(machine, namespaces):
    one, other = namespaces
    manager = machine.manager(processes=one)
    rank = machine.rank(processes=other)
    assert manager.do("region.wait_ready()\n'RankJoined(rank=0, pid=0)' in gather(region, 'RankJoined')") is True
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 5):
        pytest.skip("before Linux 6.5 no process sees the end of one in a PID namespace beside its own")
    rank.kill()
    assert manager.do("gather(region, 'RankGone')") == ["RankLost(rank=0)", "RankGone(rank=0)"]
    again = machine.rank(processes=other)
    manager.kill()
    again.do("wait_for(join, lambda s: s.state == 'lost')")


WITHOUT_PEERPIDFD = "from kvtiers.region import handshake\nhandshake._SO_PEERPIDFD = 9999"


def test_where_the_kernel_gives_no_pidfd_of_a_peer_its_number_does(machine):
    manager = machine.party()
    manager.do(WITHOUT_PEERPIDFD)
    manager.do("cache = layout()\nregion = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")
    rank = machine.rank()
    rank.do("join._sock.shutdown(socket.SHUT_RDWR)")
    assert manager.do("gather(region, 'RankLost')")[-1] == "RankLost(rank=0)"
    assert manager.do("list(region.lost_ranks)") == [0]
    rank.kill()
    assert manager.do("gather(region, 'RankGone')") == ["RankGone(rank=0)"]


def test_a_rank_whose_end_the_kernel_cannot_report_keeps_its_rows_for_ever(machine, namespaces):
    one, other = namespaces
    manager = machine.party(one)
    manager.do(WITHOUT_PEERPIDFD)
    manager.do(
        "import logging\n"
        "lines = []\n"
        "logging.getLogger('kvtiers.region').addFilter(lambda record: lines.append(record.getMessage()) or True)\n"
        "cache = layout()\nregion = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride, prefault='off')"
    )
    rank = machine.rank(processes=other)
    assert "rank 0: process 0 cannot be watched; if it dies, its rows stay leased" in manager.do("lines")
    rank.kill()
    assert manager.do("gather(region, 'RankLost')")[-1] == "RankLost(rank=0)"
    assert manager.do("[list(region.lost_ranks), region.poll()]") == [[0], []]
    rank = machine.rank(processes=other, wait=False)
    with pytest.raises(AssertionError, match="has joined as this rank already"):
        rank.do("join.wait(PATIENCE)")
