import re

import pytest


def test_ranks_may_come_before_the_scheduler(machine):
    ranks = [machine.rank(rank, 2, wait=False) for rank in range(2)]
    manager = machine.manager(world_size=2)
    manager.do("region.wait_ready(float('inf'))")
    for rank in ranks:
        rank.do("join.wait(float('inf'))")
    assert manager.do("region.all_joined") is True


def test_the_scheduler_may_come_before_the_ranks(machine):
    manager = machine.manager(world_size=2)
    manager.send("region.wait_ready()")
    for rank in range(2):
        machine.rank(rank, 2)
    manager.answer()
    joined = manager.do("gather(region, 'RankJoined')")
    assert {event.split(",")[0] for event in joined if "Joined" in event} <= {"RankJoined(rank=0", "RankJoined(rank=1"}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"x"', b"[" * 100000, b'{"rank": 0, "layout": "x"}', b'{"rank": "\\ud800", "layout": {}}']
)
def test_no_hello_whatsoever_harms_the_scheduler(machine, body):
    manager = machine.manager()
    stranger = machine.party()
    stranger.do(
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(socket_name(engine_id, os.geteuid()))\n"
        "sock.settimeout(PATIENCE)\n"
        f"sock.sendall(encode_message(Kind.HELLO, {body!r}))\n"
        "sock.recv(1000)"
    )
    machine.rank()
    manager.do("region.wait_ready()")


@pytest.mark.parametrize("rank_first", [True, False])
def test_a_rank_in_the_schedulers_own_thread_joins_in_either_order(machine, rank_first):
    party = machine.party()
    party.do("cache = layout()")
    steps = [
        "join = RegionJoin.start(engine_id, cache, 0)",
        "region = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)",
    ]
    for step in steps if rank_first else reversed(steps):
        party.do(step)
    party.do("region.wait_ready()\njoin.wait(PATIENCE)")
    party.do("join.view[3] = 77")
    assert party.do("region.view[3]") == 77
    party.do("join.close()\nregion.close()")
    assert machine.leftovers() == []


def test_both_calls_return_at_once_without_a_peer(machine):
    party = machine.party()
    party.do("cache = layout(2)")
    joined = party.do(
        "join = RegionJoin.start(engine_id, cache, 0, start_deadline=3600)\n"
        "region = SharedOffloadRegion.create(engine_id, cache, 2000 * cache.row_stride, start_deadline=3600)\n"
        "region.all_joined"
    )
    assert joined is False  # a start that waits for the other rank would not end here


def test_what_a_rank_writes_the_scheduler_and_the_other_rank_see_and_the_other_way_round(machine):
    manager = machine.manager(rows=5, world_size=2)
    first, second = machine.rank(0, 2), machine.rank(1, 2)
    first.do("join.view[-10:] = b'from rank0'")
    assert manager.do("bytes(region.view[-10:]).decode()") == "from rank0"
    manager.do("region.view[region.row_stride : region.row_stride + 4] = b'boss'")
    assert second.do("bytes(join.view[join.row_stride : join.row_stride + 4]).decode()") == "boss"
    assert second.do("len(join.view) == 5 * join.row_stride and join.num_rows == 5") is True


def test_a_rank_that_is_ready_has_joined(machine):
    manager = machine.manager()
    machine.rank()
    assert manager.do("region.all_joined") is True


def test_rows_that_are_not_populated_can_be_used(machine):
    manager = machine.manager(rows=64, options="prefault='off'")
    rank = machine.rank()
    assert rank.do("[join.populated_rows, join.poll().prefault_ended]") == [0, True]
    rank.do("join.view[63 * join.row_stride] = 5")
    assert manager.do("[region.view[63 * region.row_stride], region.view[62 * region.row_stride]]") == [5, 0]


def test_a_wrong_layout_is_refused_and_the_field_is_named_at_both_ends(machine):
    manager = machine.manager(world_size=2)
    rank = machine.party()
    rank.do("join = RegionJoin.start(engine_id, layout(2, blocks_per_chunk=4), 1)")
    with pytest.raises(AssertionError, match=r"StartError: rank 1 .*blocks_per_chunk: 1 here, 4 there"):
        rank.do("join.wait(PATIENCE)")
    assert rank.do("join.state") == "refused"
    with pytest.raises(AssertionError, match=r"StartError: .*rank 1 was refused: .*blocks_per_chunk: 1 here, 4 there"):
        manager.do("region.wait_ready()")
    assert "blocks_per_chunk" in manager.do("gather(region, 'RankRefused')")[-1]


def test_a_rank_needs_no_name_of_the_model_it_copies_for_but_must_not_have_that_of_another(machine):
    machine.manager(world_size=2)
    rank, other = machine.party(), machine.party()
    rank.do("join = RegionJoin.start(engine_id, layout(2, model=ModelIdentity('')), 0)")
    rank.do("join.wait(PATIENCE)")
    other.do("join = RegionJoin.start(engine_id, layout(2, model=ModelIdentity('another')), 1)")
    with pytest.raises(AssertionError, match=r"model\.name"):
        other.do("join.wait(PATIENCE)")


def test_a_layout_with_many_differences_is_refused_in_one_short_line(machine):
    machine.manager()
    rank = machine.party()
    rank.do("tensors = tuple(KVTensor(f'other{i}', 0, 4096) for i in range(4))")
    rank.do("join = RegionJoin.start(engine_id, layout(tensors=tensors), 0)")
    with pytest.raises(AssertionError) as refusal:
        rank.do("join.wait(PATIENCE)")
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith("and 3 more")


def test_a_rank_that_never_comes_is_named(machine):
    manager = machine.manager(world_size=3, options="start_deadline=0.3")
    machine.rank(1, 3)
    with pytest.raises(AssertionError, match=r"StartError: .*of 3 ranks these did not join within .* s: 0, 2"):
        manager.do("region.wait_ready()")
    assert manager.do("region.all_joined") is False


def test_a_rank_that_comes_late_is_still_let_in(machine):
    manager = machine.manager(options="start_deadline=0.01")
    with pytest.raises(AssertionError, match="did not join"):
        manager.do("region.wait_ready()")
    machine.rank()
    manager.do("region.wait_ready(PATIENCE)")


def test_a_rank_without_a_scheduler_gives_up_in_one_clear_line(machine):
    rank = machine.rank(wait=False, options="start_deadline=0.2")
    with pytest.raises(AssertionError, match=r"StartError: rank 0 of engine .* no scheduler answered within 0.2 s"):
        rank.do("join.wait(PATIENCE)")
    assert rank.do("join.state") == "refused"


def test_waiting_for_a_rank_may_be_shorter_than_its_deadline(machine):
    rank = machine.rank(wait=False)
    with pytest.raises(AssertionError, match=r"no scheduler let it in within 0\.1 s"):
        rank.do("join.wait(0.1)")
    assert rank.do("join.state") == "joining"
    machine.manager()
    rank.do("join.wait(PATIENCE)")


def test_a_second_rank_of_the_same_number_is_refused_with_the_first_ones_process(machine):
    manager = machine.manager(world_size=2)
    first = machine.rank(0, 2)
    second = machine.rank(0, 2, wait=False)
    with pytest.raises(AssertionError, match=f"process {first.pid} has joined as this rank already"):
        second.do("join.wait(PATIENCE)")
    with pytest.raises(AssertionError, match="rank 0 was refused"):
        manager.do("region.wait_ready()")
    assert first.do("join.state") == "ready"


def test_a_refused_extra_rank_does_no_harm_once_all_are_there(machine):
    manager = machine.manager()
    machine.rank()
    extra = machine.rank(wait=False)
    with pytest.raises(AssertionError, match="refused"):
        extra.do("join.wait(PATIENCE)")
    manager.do("region.wait_ready()")


def test_a_rank_out_of_range_is_refused(machine):
    machine.manager(world_size=2)
    rank = machine.rank(2, 2, wait=False)
    with pytest.raises(AssertionError, match="no such rank: expected 0 to 1"):
        rank.do("join.wait(PATIENCE)")


def test_another_version_of_the_handshake_is_refused_in_one_line_at_both_ends(machine):
    manager = machine.manager()
    rank = machine.party()
    rank.do("import kvtiers.region.handshake as handshake\nhandshake.HANDSHAKE_VERSION = 7")
    rank.do("join = RegionJoin.start(engine_id, layout(), 0)")
    with pytest.raises(AssertionError, match=r"speaks version 7 of the handshake, the scheduler 1; install the same"):
        rank.do("join.wait(PATIENCE)")
    with pytest.raises(AssertionError, match="speaks version 7"):
        manager.do("region.wait_ready()")


def test_a_scheduler_of_another_version_is_refused_by_the_rank(machine):
    manager = machine.party()
    manager.do("import kvtiers.region.handshake as handshake, kvtiers.region.server as accept")
    manager.do("handshake.HANDSHAKE_VERSION = 7")  # it writes 7, and still takes our HELLO
    manager.do("cache = layout()\nregion = SharedOffloadRegion.create(engine_id, cache, 8 * cache.row_stride)")
    rank = machine.rank(wait=False)
    with pytest.raises(AssertionError, match="speaks version 7 of the handshake, this rank 1; install the same"):
        rank.do("join.wait(PATIENCE)")


def test_a_peer_that_sends_nonsense_is_refused_and_harms_no_rank(machine):
    manager = machine.manager()
    stranger = machine.party()
    stranger.do(
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(socket_name(engine_id, os.geteuid()))\n"
        "sock.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')"
    )
    assert stranger.do("sock.settimeout(PATIENCE)\nlen(sock.recv(100))") == 0
    machine.rank()
    manager.do("region.wait_ready()")


def test_a_hello_that_is_no_layout_is_refused(machine):
    manager = machine.manager()
    stranger = machine.party()
    stranger.do(
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(socket_name(engine_id, os.geteuid()))\n"
        "sock.settimeout(PATIENCE)\n"
        'sock.sendall(encode_message(Kind.HELLO, b\'{"rank": 0, "tensors": []}\'))'
    )
    assert "its layout cannot be read" in stranger.do("next(MessageReader().feed(sock.recv(1000))).body.decode()")
    assert "cannot be read" in manager.do("gather(region, 'RankRefused')")[-1]


def test_a_rank_of_another_release_with_the_same_version_number_is_refused_in_one_line(machine):
    manager = machine.manager()
    old = machine.party()
    old.do(
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(socket_name(engine_id, os.geteuid()))\n"
        "sock.settimeout(PATIENCE)\n"
        "hello = {'rank': 0, 'layout': json.loads(layout().to_json())}\n"
        "sock.sendall(encode_message(Kind.HELLO, json.dumps(hello).encode()))"
    )
    assert "install the same kvtiers" in old.do("next(MessageReader().feed(sock.recv(1000))).body.decode()")
    with pytest.raises(AssertionError, match="rank 0 was refused: it is of another release of kvtiers"):
        manager.do("region.wait_ready()")


def test_a_scheduler_of_another_release_with_the_same_version_number_is_one_line_for_the_rank(machine):
    old = machine.party()
    old.do("listener = listen(engine_id)\nlistener.setblocking(True)")
    rank = machine.rank(wait=False)
    old.do(
        "sock, _ = listener.accept()\n"
        "sock.recv(100_000)\n"
        "welcome = {'num_rows': 8, 'row_stride': 36864, 'map_bytes': 294912, 'populated_rows': 0, 'more': True}\n"
        "memory = os.memfd_create('old')\n"
        "socket.send_fds(sock, [encode_message(Kind.WELCOME, json.dumps(welcome).encode())], [memory])"
    )
    with pytest.raises(
        AssertionError, match=r"StartError: .*cannot be understood: .*install the same kvtiers"
    ) as error:
        rank.do("join.wait(PATIENCE)")
    assert "\n" not in str(error.value)


def test_an_engine_id_may_be_any_text(machine):
    machine.engine_id += "/ with spaces, ümläuts and much more than a socket's name has room for " + 100 * "x"
    manager = machine.manager()
    machine.rank()
    manager.do("region.wait_ready()")


def test_a_rank_that_gets_no_region_says_so_in_its_own_log(machine):
    rank = machine.party()
    rank.do(
        "import logging\n"
        "lines = []\n"
        "class Keep(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        lines.append(record.getMessage())\n"
        "logging.getLogger('kvtiers.region').addHandler(Keep())\n"
        "join = RegionJoin.start(engine_id, layout(), 3, start_deadline=0.1)\n"
        "wait_for(join, lambda s: s.state == 'refused')"
    )
    (line,) = rank.do("lines")
    assert line.startswith(
        f"rank 3 of engine {machine.engine_id!r}: offloading stays off: no scheduler answered within"
    )


def test_a_rank_that_waits_can_be_closed(machine):
    rank = machine.rank(wait=False)
    rank.do("join.close()")
    assert rank.do("join.state") == "closed"


def test_start_up_says_what_took_how_long(machine):
    manager = machine.party()
    manager.do("import logging\nlines = []\ncache = layout()")
    manager.do(
        "class Keep(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        lines.append(record.getMessage())\n"
        "log = logging.getLogger('kvtiers.region')\n"
        "log.addHandler(Keep())\n"
        "log.setLevel(logging.INFO)"
    )
    manager.do("region = SharedOffloadRegion.create(engine_id, cache, 100 * cache.row_stride)")
    machine.rank()
    manager.do("region.wait_ready()\ngather(region, 'PrefaultEnded')")
    timings = manager.do("region.timings")
    assert set(timings) == {"create", "join", "prefault", "populated_rows"}
    assert timings["populated_rows"] == 100
    logged = manager.do("'; '.join(lines)")
    for said in (
        r"100 rows of 36KiB in [\d.]+ s",
        r"all 1 ranks have joined after [\d.]+ s",
        r"pre-faulted .* in [\d.]+ s",
    ):
        assert re.search(said, logged), logged


def test_the_end_of_the_accept_thread_is_reported_to_the_waiting_thread(machine):
    manager = machine.manager()
    manager.do("def broken():\n    raise ZeroDivisionError('a bug')\nregion._server._accept = broken")
    rank = machine.rank(wait=False, options="start_deadline=1")
    with pytest.raises(
        AssertionError, match=r"StartError: .*the thread that serves its ranks ended: ZeroDivisionError"
    ):
        manager.do("region.wait_ready()")
    with pytest.raises(AssertionError, match="no scheduler answered within 1 s"):
        rank.do("join.wait(PATIENCE)")
    manager.do("region.close()")


def test_without_descriptors_no_rank_comes_in_but_those_that_are_there_are_served(machine):
    manager = machine.manager(world_size=2)
    first = machine.rank(0, world_size=2)
    manager.do("import resource\nfrom kvtiers.region import server\nserver._PAUSE_SECONDS = 3600")
    manager.do("gather(region, 'RankJoined')")
    manager.do(
        "import logging, threading\n"
        "refused = threading.Event()\n"
        "logging.getLogger('kvtiers.region').addFilter(lambda record: refused.set() or True)\n"
        "limits = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4, limits[1]))"
    )
    second = machine.rank(1, world_size=2, wait=False)
    assert manager.do("refused.wait(PATIENCE)") is True
    first.do("join.close()")
    assert "RankGone(rank=0)" in manager.do("gather(region, 'RankGone')")  # long before anything is accepted again
    manager.do("resource.setrlimit(resource.RLIMIT_NOFILE, limits)\nregion._server._listen_again = 0.0")
    manager.do("region._server._wake()")
    second.do("join.wait(PATIENCE)")
