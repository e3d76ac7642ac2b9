"""What keeps a process out: another user, another holder of the name, memory that is not there."""

import os
from pathlib import Path

import pytest

# Another user's process. As root it really is one; else both ends' idea of their own uid is shifted by one, so that
# the uid that the kernel reports is a foreign one.
BECOME_A_STRANGER = "os.setgid(65534)\nos.setuid(65534)" if os.geteuid() == 0 else "None"
OUR_UID = os.geteuid() if os.geteuid() == 0 else os.geteuid() + 1
CLAIM_OUR_UID = f"os.geteuid = lambda: {OUR_UID}"
CONNECT = f"sock = connected(engine_id, {OUR_UID})"
SQUAT = (
    "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
    f"sock.bind(socket_name(engine_id, {OUR_UID}))\n"
    "sock.listen()"
)


def test_a_rank_of_another_user_is_refused_and_does_not_disturb_the_start(machine):
    manager = machine.party()
    manager.do(CLAIM_OUR_UID)
    manager.do("cache = layout()\nregion = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")
    stranger = machine.party()
    stranger.do(BECOME_A_STRANGER)
    stranger.do(f"{CONNECT}\ndata, fds, _, _ = socket.recv_fds(sock, 10000, 4)")
    assert stranger.do("fds") == []
    assert stranger.do("data[0] == Kind.REFUSED and data[1:].decode()").endswith("must be of one user")
    with pytest.raises(AssertionError, match="did not join"):  # and not: was refused
        manager.do("region.wait_ready(0.05)")


def test_a_name_squatted_by_another_user_is_one_clear_line_for_the_rank(machine):
    squatter = machine.party()
    squatter.do(BECOME_A_STRANGER)
    squatter.do(SQUAT)
    rank = machine.party()
    rank.do(CLAIM_OUR_UID)
    rank.do("join = RegionJoin.start(engine_id, layout(), 0)")
    with pytest.raises(
        AssertionError, match=r"StartError: .*of user id .* answers in the scheduler's place"
    ) as refusal:
        rank.do("join.wait(PATIENCE)")
    assert "\n" not in str(refusal.value)
    # Nothing was said to the stranger.
    squatter.do("peer, _ = sock.accept()\npeer.settimeout(PATIENCE)")
    assert squatter.do("len(peer.recv(100))") == 0


def test_a_name_squatted_by_another_user_is_one_clear_line_for_the_scheduler(machine):
    squatter = machine.party()
    squatter.do(BECOME_A_STRANGER)
    squatter.do(SQUAT)
    manager = machine.party()
    manager.do(CLAIM_OUR_UID)
    manager.do("cache = layout()")
    with pytest.raises(
        AssertionError, match=f"StartError: engine id .* is in use .* by process {squatter.pid} of user"
    ):
        manager.do("SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")


def test_an_engine_id_in_use_is_one_clear_line_that_names_the_process(machine):
    first = machine.manager()
    first.do(
        "import logging\n"
        "lines = []\n"
        "logging.getLogger('kvtiers.region').addFilter(lambda record: lines.append(record.getMessage()) or True)"
    )
    second = machine.party()
    second.do("cache = layout()")
    with pytest.raises(AssertionError, match=f"StartError: engine id .* is in use .* by process {first.pid} ") as error:
        second.do("SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")
    assert "\n" not in str(error.value)
    machine.rank()
    first.do("region.wait_ready()")
    assert first.do("lines") == [], "the engine that has the id is not bothered"


def test_an_engine_id_is_free_again_at_once_after_its_engine_was_killed(machine):
    manager = machine.manager()
    rank = machine.rank()
    manager.kill()
    second = machine.manager()
    assert rank.do("wait_for(join, lambda s: s.state == 'lost')")[0] == "lost"
    rank.do("join.close()\njoin = RegionJoin.start(engine_id, layout(), 0)\njoin.wait(PATIENCE)")
    second.do("region.wait_ready()")


def test_a_region_larger_than_the_machine_is_refused_before_it_is_made(machine):
    manager = machine.party()
    manager.do("cache = layout()")
    with pytest.raises(
        AssertionError, match=r"StartError: region of engine .*: 102.TiB of memory are wanted, but .*lower"
    ):
        manager.do("SharedOffloadRegion.create(engine_id, cache, 1 << 50)")
    assert machine.leftovers() == []


def test_a_capacity_below_one_row_is_refused(machine):
    manager = machine.party()
    manager.do("cache = layout()")
    with pytest.raises(AssertionError, match="holds no row; one row takes 36864 bytes"):
        manager.do("SharedOffloadRegion.create(engine_id, cache, 20000)")


@pytest.mark.parametrize("pages", ["2MiB", "1GiB"])
def test_huge_pages_that_are_not_reserved_are_one_clear_line(machine, pages):
    manager = machine.party()
    manager.do("cache = layout()")
    with pytest.raises(AssertionError, match=r"StartError: .*huge.pages") as error:
        manager.do(f"SharedOffloadRegion.create(engine_id, cache, 1 << 50, huge_pages={pages!r})")
    assert "\n" not in str(error.value)
    assert machine.leftovers() == []


@pytest.fixture
def two_huge_pages():
    reserved = Path("/proc/sys/vm/nr_hugepages")
    before = reserved.read_text()
    try:
        reserved.write_text(str(int(before) + 2))
    except OSError:
        pytest.skip("no huge pages can be reserved here: it takes root")
    if int(reserved.read_text()) < int(before) + 2:
        reserved.write_text(before)
        pytest.skip("this machine has no huge pages to reserve")
    yield
    reserved.write_text(before)


def test_a_region_of_huge_pages_has_its_state_beside_them_and_takes_no_page_more(machine, two_huge_pages):
    manager = machine.party()
    manager.do("cache = layout()")
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 4 << 20, huge_pages='2MiB')")
    rank = machine.rank()
    assert (
        rank.do("wait_for(join, lambda s: s.prefault_ended)")[2]
        == manager.do("region.num_rows")
        == (4 << 20) // (36 << 10)
    )
    assert manager.do("region.map_bytes") == 4 << 20
    rank.do("join.view[-1] = 9\njoin.settle()")
    assert manager.do("region.view[-1]") == 9


def test_a_process_that_connects_in_a_loop_keeps_no_rank_out_and_costs_the_engine_little(machine):
    manager = machine.manager(world_size=2)
    machine.rank(0, 2)
    manager.do(
        "import logging\n"
        "region._server._listener.listen(64)\n"  # or the rank stands in line behind 1,024 of them, for seconds
        "lines = []\n"
        "logging.getLogger('kvtiers.region').addFilter(lambda record: lines.append(record.getMessage()) or True)\n"
        "clock = time.pthread_getcpuclockid(region._server._thread.ident)\n"
        "began, work = time.monotonic(), time.clock_gettime(clock)"
    )
    others = [machine.party(), machine.party()]
    for other, words in zip(others, ("b''", "b'garbage'"), strict=True):
        other.do(
            "import threading\n"
            "is_over = threading.Event()\n"
            "def loop():\n"
            "    while not is_over.is_set():\n"
            "        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:\n"
            "            sock.setblocking(False)\n"
            "            try:\n"
            "                sock.connect(socket_name(engine_id, os.geteuid()))\n"
            f"                sock.send({words})\n"
            "            except OSError:\n"
            "                time.sleep(0.001)\n"  # the line is full
            "thread = threading.Thread(target=loop)\n"
            "thread.start()"
        )
    machine.rank(1, 2)
    seconds, work = manager.do("[time.monotonic() - began, time.clock_gettime(clock) - work]")
    for other in others:
        other.do("is_over.set()\nthread.join()")
    assert work < 0.1 * seconds + 0.1, "processor time of the engine's side"
    assert len(manager.do("lines")) < 10, "the same refusal again and again is one line"
    assert manager.do("region.all_joined") is True
