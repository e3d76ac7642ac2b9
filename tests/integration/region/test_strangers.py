import os

import pytest

# Another user's process. As root it really is one; else both ends' idea of their own uid is shifted by one, so that
# the uid that the kernel reports is a foreign one.
BECOME_A_STRANGER = "os.setgid(65534)\nos.setuid(65534)" if os.geteuid() == 0 else "None"
OUR_UID = os.geteuid() if os.geteuid() == 0 else os.geteuid() + 1
CLAIM_OUR_UID = f"os.geteuid = lambda: {OUR_UID}"


def test_a_rank_of_another_user_is_refused_and_does_not_disturb_the_start(machine):
    manager = machine.party()
    manager.do(CLAIM_OUR_UID)
    manager.do("cache = layout()\nregion = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")
    stranger = machine.party()
    stranger.do(BECOME_A_STRANGER)
    stranger.do(
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.settimeout(PATIENCE)\n"
        f"sock.connect(socket_name(engine_id, {OUR_UID}))\n"
        "data, fds, _, _ = socket.recv_fds(sock, 10000, 4)"
    )
    assert stranger.do("fds") == []
    assert "must be of one user" in stranger.do("next(MessageReader().feed(data)).body.decode()")
    assert manager.do("gather(region, 'RankRefused')")[-1].startswith("RankRefused(rank=None, reason=")
    with pytest.raises(AssertionError, match="did not join"):  # and not: was refused
        manager.do("region.wait_ready(0.05)")


def test_a_name_squatted_by_another_user_is_one_clear_line_for_the_rank(machine):
    squatter = machine.party()
    squatter.do(BECOME_A_STRANGER)
    squatter.do(f"sock = socket.socket(socket.AF_UNIX)\nsock.bind(socket_name(engine_id, {OUR_UID}))\nsock.listen()")
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
    squatter.do(f"sock = socket.socket(socket.AF_UNIX)\nsock.bind(socket_name(engine_id, {OUR_UID}))\nsock.listen()")
    manager = machine.party()
    manager.do(CLAIM_OUR_UID)
    manager.do("cache = layout()")
    with pytest.raises(
        AssertionError, match=f"StartError: engine id .* is in use .* by process {squatter.pid} of user"
    ):
        manager.do("SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")


def test_an_engine_id_in_use_is_one_clear_line_that_names_the_process(machine):
    first = machine.manager()
    second = machine.party()
    second.do("cache = layout()")
    with pytest.raises(AssertionError, match=f"StartError: engine id .* is in use .* by process {first.pid} ") as error:
        second.do("SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")
    assert "\n" not in str(error.value)
    machine.rank()
    first.do("region.wait_ready()")


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


def test_a_stranger_that_connects_in_a_loop_is_few_lines_and_keeps_no_rank_out(machine):
    manager = machine.party()
    manager.do(CLAIM_OUR_UID)
    manager.do(
        "import logging\n"
        "lines = []\n"
        "class Keep(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        lines.append(record.getMessage())\n"
        "logging.getLogger('kvtiers.region').addHandler(Keep())\n"
        "cache = layout(world_size=2)\nregion = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)"
    )
    ranks = [machine.party() for _ in range(2)]
    for number, rank in enumerate(ranks):
        rank.do(CLAIM_OUR_UID)
        rank.do(f"join = RegionJoin.start(engine_id, layout(world_size=2), {number})")
    manager.do("region.wait_ready(PATIENCE)")
    stranger = machine.party()
    stranger.do(BECOME_A_STRANGER)
    stranger.do(
        "for _ in range(3000):\n"
        "    with socket.socket(socket.AF_UNIX) as sock:\n"
        f"        sock.connect(socket_name(engine_id, {OUR_UID}))\n"
    )
    assert manager.do("sum('refused' in line for line in lines)") < 100
    assert manager.do("region._ranks._events.qsize()") <= 1100
    ranks[1].do("join.close()")
    back = machine.party()
    back.do(CLAIM_OUR_UID)
    back.do("join = RegionJoin.start(engine_id, layout(world_size=2), 1)\njoin.wait(PATIENCE)")


def test_a_hello_larger_than_any_of_this_layout_is_refused_before_anything_is_made_of_it(machine):
    manager = machine.manager()
    manager.do("made = []\nCacheLayout.differences_in = lambda self, document: made.append(1)")
    peer = machine.party()
    peer.do(
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(socket_name(engine_id, os.geteuid()))\n"
        "sock.settimeout(PATIENCE)\n"
        "sock.sendall(encode_message(Kind.HELLO, b'[' + b'1,' * 1_000_000 + b'1]'))"
    )
    assert "expected at most" in peer.do("next(MessageReader().feed(sock.recv(1000))).body.decode()")
    assert manager.do("made") == []


@pytest.mark.parametrize(
    "change",
    [
        "world_size=10**9",
        "world_size=10**9, tensors=[]",
        "blocks_per_chunk=-1",
        "groups=[{}] * 5000",
        "tensors=[{'page_bytes': []}]",
        "model=None",
        "more=[[[[0]]]]",
    ],
)
def test_a_hello_with_a_layout_that_no_rank_has_is_answered_at_once_and_keeps_no_rank_out(machine, change):
    manager = machine.manager()
    manager.do("import time\nclock = time.pthread_getcpuclockid(region._server._thread.ident)")
    began = manager.do("time.clock_gettime(clock)")
    peer = machine.party()
    peer.do(
        "import json\n"
        f"hello = {{'rank': 0, 'layout': json.loads(layout().to_json()) | dict({change})}}\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(socket_name(engine_id, os.geteuid()))\n"
        "sock.settimeout(PATIENCE)\n"
        "sock.sendall(encode_message(Kind.HELLO, json.dumps(hello | {'speaks': SPEAKS}).encode()))"
    )
    assert "its cache layout is not the scheduler's" in peer.do(
        "next(MessageReader().feed(sock.recv(9999))).body.decode()"
    )
    machine.rank()
    manager.do("region.wait_ready(PATIENCE)")
    assert manager.do("time.clock_gettime(clock)") - began < 1.0, "processor time of the engine's side"


@pytest.mark.parametrize("words", ["b''", "b'garbage' * 10"], ids=["says nothing", "says garbage"])
def test_a_process_of_the_same_user_that_connects_in_a_loop_costs_the_engine_next_to_nothing(machine, words):
    manager = machine.manager()
    rank = machine.rank()
    manager.do("region.wait_ready(PATIENCE)")
    manager.do(
        "import time\n"
        "accepted, accept = [], region._server._accept\n"
        "def counted():\n"
        "    accepted.append(1)\n"
        "    accept()\n"
        "region._server._accept = counted\n"
        "clock = time.pthread_getcpuclockid(region._server._thread.ident)\n"
        "began, work = time.monotonic(), time.clock_gettime(clock)"
    )
    other = machine.party()
    tries = other.do(
        "import time\n"
        "tries, until = 0, time.monotonic() + 1\n"
        "while tries <= 1000 or time.monotonic() < until:\n"
        "    with socket.socket(socket.AF_UNIX) as sock:\n"
        "        sock.setblocking(False)\n"
        "        try:\n"
        "            sock.connect(socket_name(engine_id, os.geteuid()))\n"
        f"            sock.send({words})\n"
        "        except BlockingIOError:\n"
        "            time.sleep(0.0005)\n"
        "        tries += 1\n"
        "tries"
    )
    seconds, work, accepted = manager.do("[time.monotonic() - began, time.clock_gettime(clock) - work, len(accepted)]")
    assert tries > 1000, "however long a busy machine takes for so many"
    assert accepted <= 1000 * seconds + 200
    assert work < 0.1 * seconds, "processor time of the engine's side"
    rank.do("join.close()")
    machine.rank()  # a rank that has waited meanwhile comes in
