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


HELLO = "hello = {'format': FORMAT, 'rank': 0, 'layout': json.loads(layout().to_json())}"


def test_no_hello_whatsoever_harms_the_scheduler(machine):
    manager = machine.manager()
    manager.do("import time\nclock = time.pthread_getcpuclockid(region._server._thread.ident)")
    began = manager.do("time.clock_gettime(clock)")
    stranger = machine.party()
    stranger.do(
        "def ask(message):\n"
        "    with connected(engine_id) as sock:\n"
        "        sock.send(message)\n"
        "        answer = sock.recv(9999)\n"
        "        return [answer[0] == Kind.REFUSED, answer[1:].decode()]"
    )
    stranger.do(HELLO)
    for message, reason in (
        ("b'GET / HTTP/1.1'", "does not begin with a HELLO"),
        ("Kind.GOODBYE.message()", "does not begin with a HELLO"),
        ("Kind.HELLO.message()", "cannot be read"),
        ("Kind.HELLO.message(b'[]')", "cannot be read"),
        ("Kind.HELLO.message(b'[' * 100000)", "cannot be read"),
        ("Kind.HELLO.message(b'[' + b'1,' * 100_000 + b'1]')", "cannot be read"),
        ("""Kind.HELLO.message(b'{"rank": 0, "tensors": []}')""", "cannot be read"),
        ("""Kind.HELLO.message(b'{"format": 2, "rank": "\\ud800", "layout": {}}')""", "cannot be read"),
        ("Kind.HELLO.message(json.dumps(hello | {'layout': 'x'}).encode())", "is not the scheduler's"),
    ):
        was_refused, text = stranger.do(f"ask({message})")
        assert was_refused, message
        assert reason in text
    for change in (
        "world_size=10**9",
        "world_size=10**9, tensors=[]",
        "blocks_per_chunk=-1",
        "groups=[{}] * 5000",
        "tensors=[{'page_bytes': []}]",
        "model=None",
        "more=[[[[0]]]]",
    ):
        changed = f"hello | {{'layout': hello['layout'] | dict({change})}}"
        was_refused, text = stranger.do(f"ask(Kind.HELLO.message(json.dumps({changed}).encode()))")
        assert was_refused, change
        assert "its cache layout is not the scheduler's" in text
    machine.rank()
    manager.do("region.wait_ready(PATIENCE)")
    assert manager.do("time.clock_gettime(clock)") - began < 1.0, "processor time of the engine's side"


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


def test_a_rank_of_another_format_is_refused_in_one_line_at_both_ends(machine):
    manager = machine.manager()
    rank = machine.party()
    rank.do("import kvtiers.region.client as client\nclient.FORMAT = 7")
    rank.do("join = RegionJoin.start(engine_id, layout(), 0)")
    with pytest.raises(AssertionError, match=r"its format is 7, the scheduler's 2; install the same kvtiers"):
        rank.do("join.wait(PATIENCE)")
    with pytest.raises(AssertionError, match="its format is 7"):
        manager.do("region.wait_ready()")


def test_memory_of_another_shape_is_refused_by_the_rank(machine):
    manager = machine.manager()
    manager.do("region._server._state._words[1] = 4096")
    with pytest.raises(AssertionError, match="offers memory of another shape"):
        machine.rank()


def test_a_layout_that_no_message_can_take_is_one_line(machine):
    machine.manager()
    rank = machine.party()
    rank.do("tensors = tuple(KVTensor('x' * 200 + str(i), 0, 4096) for i in range(2000))")
    rank.do("join = RegionJoin.start(engine_id, layout(tensors=tensors), 0)")
    with pytest.raises(AssertionError, match=r"StartError: .*its cache layout is too large for a message"):
        rank.do("join.wait(PATIENCE)")


def test_a_rank_can_read_the_regions_state_and_not_write_it(machine):
    manager = machine.manager()
    rank = machine.rank()
    with pytest.raises(AssertionError, match="cannot modify read-only memory"):
        rank.do("join._region_state._words[0] = 1")
    with pytest.raises(AssertionError, match="Permission denied"):
        manager.do("import mmap\nmmap.mmap(os.dup(region._server._state.fd), 4096)")


def test_a_rank_without_descriptors_for_the_memory_says_so(machine):
    machine.manager()
    rank = machine.party()
    rank.do(
        "import resource\n"
        "from kvtiers.region import client\n"
        "def say_hello(join, sock, real=RegionJoin._say_hello):\n"
        "    real(join, sock)\n"
        "    used = max(int(fd) for fd in os.listdir('/proc/self/fd')) + 1\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "RegionJoin._say_hello = say_hello\n"
        "join = RegionJoin.start(engine_id, layout(), 0)"
    )
    with pytest.raises(AssertionError, match=r"no descriptor is to be had .* raise the limit of open files"):
        rank.do("join.wait(PATIENCE)")


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
    manager.do("def broken(peer):\n    raise ZeroDivisionError('a bug')\nregion._server._receive = broken")
    rank = machine.rank(wait=False, options="start_deadline=1")
    with pytest.raises(
        AssertionError, match=r"StartError: .*the thread that serves its ranks ended: ZeroDivisionError"
    ):
        manager.do("region.wait_ready()")
    with pytest.raises(AssertionError, match="no scheduler answered within 1 s"):
        rank.do("join.wait(PATIENCE)")
    manager.do("region.close()")


def test_without_descriptors_no_rank_comes_in_but_those_that_are_there_are_served(machine):
    manager = machine.manager(world_size=2, options="prefault='off'")  # to reap its program takes descriptors
    first = machine.rank(0, world_size=2)
    manager.do("gather(region, 'RankJoined')")
    manager.do(
        "import logging, resource, threading\n"
        "lines, refused = [], threading.Event()\n"
        "def note(record):\n"
        "    lines.append(record.getMessage())\n"
        "    refused.set()\n"
        "    return True\n"
        "logging.getLogger('kvtiers.region').addFilter(note)\n"
        "limits = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4, limits[1]))"
    )
    second = machine.rank(1, world_size=2, wait=False)
    assert manager.do("refused.wait(PATIENCE)") is True
    first.do("join.close()")
    assert "RankGone(rank=0)" in manager.do("gather(region, 'RankGone')")
    assert len(manager.do("lines")) == 1, "that there is none is said once"
    manager.do("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
    second.do("join.wait(PATIENCE)")
