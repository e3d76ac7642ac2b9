"""The publisher over real sockets: order, numbers, replays, and everything that a subscriber or an endpoint may do."""

import contextlib
import threading

import pytest
import zmq
from tests.kv_event_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber

from kvtiers.api import make_offload_key
from kvtiers.config import EventsConfig
from kvtiers.kv_events.naming import GroupFacts
from kvtiers.kv_events.publisher import EventPublisher
from kvtiers.kv_events.sockets import EventSockets
from kvtiers.kv_events.wire import END_OF_REPLAY
from kvtiers.testing.ports import free_port
from kvtiers.types import ChunkBlocks, OffloadEvent

GROUPS = [GroupFacts(0, 4, "full_attention")]


def key(number):
    return make_offload_key(number.to_bytes(8, "big"), 0)


def stored(*numbers):
    return OffloadEvent([key(number) for number in numbers], removed=False)


@pytest.fixture
def opened(request):
    made = []

    def open_(*, rank=0, **options):
        options = {"endpoint": "tcp://127.0.0.1:0", "bind": True, "replay_endpoint": "tcp://127.0.0.1:0"} | options
        made.append(EventPublisher(EventsConfig(**options), GROUPS, [], rank))
        return made[-1]

    yield open_
    for publisher in made:
        publisher.close(1.0)


@pytest.fixture
def subscribed():
    made = []

    def subscribe(publisher, **options):
        made.append(Subscriber(publisher.report()["endpoint"], publisher.report()["topic"], **options))
        made[-1].wait_until_subscribed(publisher)
        return made[-1]

    yield subscribe
    for subscriber in made:
        subscriber.close()


def hold(publisher, monkeypatch, send=None):
    """Keep the publisher's thread where it sends a batch, by default a clear; return what lets it go on."""
    go_on, holds = threading.Event(), threading.Event()
    publish = publisher._sockets.publish

    def held(number, batch):
        holds.set()
        go_on.wait(60)
        publish(number, batch)

    monkeypatch.setattr(publisher._sockets, "publish", held)
    (send or publisher.cleared)()
    assert holds.wait(60)
    return go_on


def test_batches_come_in_order_under_their_topic_each_with_the_next_number(opened, subscribed):
    publisher = opened(topic="kv@pod@model")
    subscriber = subscribed(publisher)
    first = publisher.report()["next_batch"]
    for number in range(50):
        publisher.take([stored(number)])
    got = [subscriber.receive() for _ in range(50)]
    assert [number for number, _ in got] == list(range(first, first + 50))
    assert [batch.events[0].block_hashes for _, batch in got] == [[number] for number in range(50)]
    assert subscriber.topic == b"kv@pod@model"


def test_what_changes_in_one_step_is_one_batch_and_a_large_one_is_cut(opened, subscribed):
    publisher = opened()
    subscriber = subscribed(publisher)
    publisher.take([stored(1, 2), OffloadEvent([key(1)], removed=True)])
    _, batch = subscriber.receive()
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved]
    publisher.take([stored(*range(1300))])
    sizes = [len(subscriber.receive()[1].events[0].block_hashes) for _ in range(3)]
    assert sizes == [512, 512, 276]


def test_a_missed_batch_is_sent_again_on_demand(opened, subscribed):
    publisher = opened()
    subscriber = subscribed(publisher)
    first = publisher.report()["next_batch"]
    for number in range(10):
        publisher.take([stored(number)])
    for _ in range(10):
        subscriber.receive()
    found = subscriber.replay(publisher.report()["replay_endpoint"], first + 4)
    assert list(found) == list(range(first + 4, first + 10))
    assert [batch.events[0].block_hashes for batch in found.values()] == [[number] for number in range(4, 10)]
    assert publisher.report()["replayed_batches"] == 6


def test_no_more_is_kept_for_replays_than_the_config_says(opened, subscribed):
    by_number, by_bytes = opened(buffer_steps=3), opened(buffer_bytes="2KiB")
    for publisher, most in ((by_number, 3), (by_bytes, 20)):
        subscriber = subscribed(publisher)
        first = publisher.report()["next_batch"]
        for number in range(100):
            publisher.take([stored(number)])
        for _ in range(100):
            subscriber.receive()
        found = subscriber.replay(publisher.report()["replay_endpoint"], 0)
        assert 3 <= len(found) <= most
        assert max(found) == first + 99


def test_between_two_looks_at_the_queue_a_bounded_part_of_the_replays_is_sent():
    ports = {"endpoint": "tcp://127.0.0.1:0", "bind": True, "replay_endpoint": "tcp://127.0.0.1:0"}
    # ROUTER drops what is beyond that many messages to one client: all of the 20 answers wait there, if need be.
    sockets = EventSockets(EventsConfig(**ports, buffer_steps=20_000), 0)
    with contextlib.ExitStack() as closing:
        closing.callback(sockets.close, 0.0)
        asking = closing.enter_context(closing.enter_context(zmq.Context()).socket(zmq.DEALER))
        asking.linger = 0
        asking.set_hwm(0)
        asking.connect(sockets.replay_endpoint)
        for number in range(1000):
            sockets.publish(number, b"batch")
        for _ in range(20):
            asking.send_multipart([b"", (400).to_bytes(8, "big")])
        got, ends = [], 0
        while ends < 20:
            before = sockets.replayed
            sockets.wait(0.01)
            assert sockets.replayed - before <= 64
            sockets.publish(1000, b"later, and no part of an answer that has begun")
            while asking.poll(0):
                _, _, number, _ = asking.recv_multipart()
                ends += number == END_OF_REPLAY
                got.append(int.from_bytes(number, "big", signed=True))
    assert got[:601] == [*range(400, 1000), -1]
    assert len([number for number in got if number >= 0]) >= 20 * 400


def test_requests_for_a_replay_that_make_no_sense_are_ignored(opened, subscribed):
    publisher = opened()
    subscriber = subscribed(publisher)
    asking = subscriber.context.socket(zmq.DEALER)
    asking.linger = 0
    asking.connect(publisher.report()["replay_endpoint"])
    for frames in ([b""], [b"", b"x" * 9], [b"", b"", b""], [b"a", b"b", b"c", b"d"]):
        asking.send_multipart(frames)
    publisher.take([stored(1)])
    assert subscriber.receive()[1].events[0].block_hashes == [1]
    assert subscriber.replay(publisher.report()["replay_endpoint"], publisher.report()["next_batch"]) == {}
    asking.close()


def test_of_too_many_that_wait_the_oldest_are_dropped_counted_and_a_gap_in_the_numbers(opened, subscribed, monkeypatch):
    publisher = opened(max_waiting=10)
    subscriber = subscribed(publisher)
    go_on = hold(publisher, monkeypatch)
    first = publisher.report()["next_batch"]
    for number in range(100):
        publisher.take([stored(number)])
    assert publisher.report()["dropped_chunks"] == 90
    assert publisher.report()["waiting_blocks"] == 10
    go_on.set()
    _, cleared = subscriber.receive()  # of holding it
    assert isinstance(cleared.events[0], AllBlocksCleared)
    got = [subscriber.receive() for _ in range(10)]
    assert [number for number, _ in got] == list(range(first + 90, first + 100))
    assert [batch.events[0].block_hashes for _, batch in got] == [[number] for number in range(90, 100)]


def test_what_left_in_batches_that_were_dropped_is_kept_no_longer(opened, subscribed, monkeypatch):
    publisher = opened(max_waiting=25)
    subscriber = subscribed(publisher)
    keys = [key(number) for number in range(10)]
    publisher.describe([ChunkBlocks(each, [bytes([number])]) for number, each in enumerate(keys)])
    publisher.take([OffloadEvent(keys, removed=False)])
    while not isinstance(subscriber.receive()[1].events[0], BlockStored):
        pass
    assert len(publisher._table._resident) == 10
    go_on = hold(publisher, monkeypatch, lambda: publisher.take([stored(99)]))
    publisher.take([OffloadEvent(keys, removed=True)])
    publisher.take([stored(*range(100, 120))])
    assert publisher.report()["dropped_chunks"] == 10
    go_on.set()
    held, after = subscriber.receive(), subscriber.receive()
    assert after[0] - held[0] == 2, "a gap"
    assert not publisher._table._resident
    assert {block for _, _, block in publisher._table._holders} == {99, *range(100, 120)}, "those that are there now"


def test_a_clear_is_never_dropped(opened, subscribed, monkeypatch):
    publisher = opened(max_waiting=3)
    subscriber = subscribed(publisher)
    go_on = hold(publisher, monkeypatch)
    publisher.take([stored(1, 2)])
    publisher.cleared()
    for number in (9, 10, 11, 12):
        publisher.take([stored(number)])
    go_on.set()
    subscriber.receive()
    _, batch = subscriber.receive()
    assert [type(event) for event in batch.events] == [AllBlocksCleared, BlockStored]
    assert batch.events[1].block_hashes == [10]
    assert publisher.report()["dropped_chunks"] == 3


def test_without_a_subscriber_nothing_is_kept_beyond_the_replay_buffer(opened):
    publisher = opened(buffer_steps=5)
    for number in range(1000):
        publisher.take([stored(number)])
    last = Subscriber(publisher.report()["endpoint"])
    last.wait_until_subscribed(publisher)
    assert publisher.report()["dropped_chunks"] == publisher.report()["waiting_blocks"] == 0
    assert len(last.replay(publisher.report()["replay_endpoint"], 0)) == 5
    last.close()


def test_a_slow_subscriber_loses_batches_and_sees_the_gap_while_another_gets_all(opened, subscribed):
    publisher = opened(hwm=100)
    slow, quick = subscribed(publisher, hwm=1), subscribed(publisher, hwm=100_000)
    while slow.socket.poll(50):
        slow.socket.recv_multipart()
    count, tokens = 3000, range(4000)  # more than the kernel's buffers hold for the slow one
    publisher.describe([ChunkBlocks(key(0), [key(0)[:-4]], None, tokens)])
    first = publisher.report()["next_batch"]
    got = []
    for _ in range(count):
        publisher.take([stored(0)])
        got.append(quick.receive()[0])
    assert got == list(range(first, first + count))
    numbers = []
    while slow.socket.poll(200):
        numbers.append(int.from_bytes(slow.socket.recv_multipart()[1], "big"))
    assert numbers == sorted(numbers)
    assert len(numbers) < count
    assert publisher.report()["dropped_chunks"] == 0


def test_an_endpoint_in_use_is_one_line_and_the_engine_runs_on(opened, subscribed, caplog):
    first = opened()
    taken = first.report()["endpoint"]
    second = opened(endpoint=taken)
    assert caplog.text.count("\n") == 1
    assert f"events: {taken}: it is in use" in caplog.text
    second.take([stored(1)])
    second.cleared()
    second.describe([ChunkBlocks(key(1), [b"1"])])
    second.close(1.0)
    assert "in use" in second.report()["error"]
    subscriber = subscribed(first)
    first.take([stored(1)])
    assert subscriber.receive()[1].events[0].block_hashes == [1]


@pytest.mark.parametrize("where", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_cannot_be_had_is_one_line_that_names_it(opened, caplog, where):
    publisher = opened(**{where: "tcp://192.0.2.1:5557"})
    assert caplog.text.count("\n") == 1
    assert "tcp://192.0.2.1:5557: Cannot assign requested address" in caplog.text
    assert publisher.report()["error"]


def test_a_replay_endpoint_that_is_taken_leaves_the_first_socket_free(opened):
    first = opened()
    port = free_port()
    second = opened(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=first.report()["replay_endpoint"])
    assert second.report()["error"]
    assert not opened(endpoint=f"tcp://127.0.0.1:{port}").report()["error"]


def _free_pair():
    """Return a port that is free, as is the next one."""
    port, following = free_port(), free_port()
    while following != port + 1:
        port, following = following, free_port()
    return port


def test_data_parallel_ranks_have_ports_of_their_own_as_in_vllm(opened, subscribed):
    port = _free_pair()
    ranks = [opened(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None, rank=rank) for rank in (0, 1)]
    assert [rank.report()["endpoint"] for rank in ranks] == [f"tcp://127.0.0.1:{port + rank}" for rank in (0, 1)]
    subscriber = subscribed(ranks[1])
    ranks[1].take([stored(1)])
    assert subscriber.receive()[1].data_parallel_rank == 1


def test_an_abstract_socket_leaves_no_file(opened, subscribed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publisher = opened(endpoint=f"ipc://@kvtiers-test-{tmp_path.name}", bind=None)
    subscriber = subscribed(publisher)
    publisher.take([stored(1)])
    assert subscriber.receive()[1].events[0].block_hashes == [1]
    assert not list(tmp_path.iterdir())


def test_it_connects_to_a_router_that_has_bound_its_end(opened):
    context = zmq.Context()
    router = context.socket(zmq.SUB)
    router.subscribe("")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    publisher = opened(endpoint=f"tcp://127.0.0.1:{port}", bind=None)
    for _ in range(1000):
        publisher.take([stored(1)])
        if router.poll(20):
            break
    else:
        pytest.fail("nothing came")
    context.destroy(linger=0)


def test_what_waits_is_sent_before_the_end(opened, subscribed, monkeypatch):
    publisher = opened()
    subscriber = subscribed(publisher)
    for number in range(200):
        publisher.take([stored(number)])
    publisher.close(10.0)
    got = [subscriber.receive()[1].events[0].block_hashes for _ in range(200)]
    assert got == [[number] for number in range(200)]
    publisher.take([stored(1)])  # ignored


def test_no_call_of_the_engines_thread_waits_for_the_publishers(opened, monkeypatch):
    publisher = opened(max_waiting=1000)
    go_on = hold(publisher, monkeypatch)
    calls = threading.Thread(target=lambda: [publisher.take([stored(number)]) for number in range(5000)])
    calls.start()
    calls.join(50)
    assert not calls.is_alive()
    assert publisher.report()["waiting_blocks"] == 1000
    go_on.set()
