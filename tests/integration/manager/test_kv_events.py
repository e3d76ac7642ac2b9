"""KV events of a whole engine: what a subscriber gets of each thing that happens to a chunk."""

import json
import subprocess
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from tests.kv_event_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber

from kvtiers._log_queue import flush_logs
from kvtiers.api import ConfigError, block_hash_of
from kvtiers.client import open_client
from kvtiers.config import EventsConfig
from kvtiers.kv_events.naming import GroupFacts
from kvtiers.kv_events.publisher import EventPublisher
from kvtiers.layout.cache_layout import ModelIdentity
from kvtiers.testing.ports import free_port
from kvtiers.tiering.command_queue import Command
from kvtiers.types import ChunkBlocks, OffloadEvent

EXAMPLE = Path(__file__).parents[3] / "examples" / "kv_events.py"
EVENTS = {"endpoint": "tcp://127.0.0.1:0", "bind": True, "replay_endpoint": "tcp://127.0.0.1:0", "hashes": "bytes"}


def memory(**more):
    return {"type": "memory", "capacity": "4MiB", "io": "thread", **more}


@pytest.fixture
def published():
    """All events of a publisher from this batch on, once so many batches are published as its owner has handed over."""
    made = []

    def of(publisher, first=0):
        report = publisher.report()
        made.append(Subscriber(report["endpoint"]))
        for _ in range(1000):
            batches = made[-1].replay(report["replay_endpoint"], first)
            if max(batches, default=first - 1) + 1 >= report["next_batch"]:
                return [event for number in sorted(batches) for event in batches[number].events]
        pytest.fail("not all that was handed over is published")

    yield of
    for subscriber in made:
        subscriber.close()


def in_short(events):
    return [
        (type(event).__name__, len(event.block_hashes), event.medium, event.locality, event.ownership)
        if not isinstance(event, AllBlocksCleared)
        else ("AllBlocksCleared",)
        for event in events
    ]


def blocks_by_place(events):
    counts = Counter()
    for what, blocks, *place in in_short(events):
        counts[what, *place] += blocks
    return counts


def test_a_chunk_s_whole_life_is_published_with_medium_locality_and_tier(start, keys, published, tmp_path):
    fs = {"type": "fs", "path": str(tmp_path), "capacity": "1GiB", "io": "thread"}
    shared = {"shared": {"locality": "REMOTE", "medium": "SHARED_STORAGE"}}
    engine = start(fs, memory(name="shared"), rows=32, events={**EVENTS, "tiers": shared})
    for start_of in range(0, 32, 4):
        engine.store(keys(32)[start_of : start_of + 4])
    cpu, disk, below = ("CPU", "LOCAL", None), ("STORAGE", "LOCAL", "fs"), ("SHARED_STORAGE", "REMOTE", "shared")
    stored = published(engine.manager.publisher)
    assert in_short(stored)[0] == ("BlockStored", 4, *cpu)
    assert blocks_by_place(stored) == {("BlockStored", *place): 32 for place in (cpu, disk, below)}
    assert stored[0].block_hashes == [block_hash_of(key) for key in keys(4)]

    first = engine.manager.publisher.report()["next_batch"]
    engine.store(keys(2, "other"))
    events = published(engine.manager.publisher, first)
    counts = blocks_by_place(events)
    assert (counts["BlockRemoved", *cpu], counts["BlockStored", *cpu]) == (2, 2)
    evicted = {block_hash_of(key) for key in keys(32)} & set(events[0].block_hashes)
    assert len(evicted) == 2

    first = engine.manager.publisher.report()["next_batch"]
    assert engine.load(keys(32)) == 32
    engine.settle()
    counts = blocks_by_place(published(engine.manager.publisher, first))
    assert counts["BlockStored", *cpu] == counts["BlockRemoved", *cpu] == 2, "two were loaded from a tier"


def test_a_clear_and_other_weights_are_published(start, published, keys):
    engine = start(memory(), events=EVENTS)
    engine.store(keys(2))
    engine.manager.commands.post(command := Command(engine.manager.chunk_commands.clear))
    engine.step_until(lambda: not engine.manager.commands.waiting)
    assert command.answer(0) == {"cleared_chunks": 2}
    engine.manager.set_weights_version("w2")
    assert in_short(published(engine.manager.publisher)) == [
        ("BlockStored", 2, "CPU", "LOCAL", None),
        ("BlockStored", 2, "STORAGE", "LOCAL", "memory"),
        ("AllBlocksCleared",),
        ("AllBlocksCleared",),
    ]


def test_a_chunk_that_cannot_be_had_from_a_tier_is_removed_from_it(start, keys, published, tmp_path):
    fs = {"type": "fs", "path": str(tmp_path), "capacity": "1GiB", "io": "thread"}
    engine = start(fs, events=EVENTS)
    engine.store(wanted := keys(3))
    engine.forget()
    for path in tmp_path.rglob("*"):
        if any(key.hex() in path.name for key in wanted):
            path.write_bytes(bytes(path.stat().st_size))
    first = engine.manager.publisher.report()["next_batch"]
    assert engine.load(wanted) == 0
    engine.settle()
    events = published(engine.manager.publisher, first)
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert {(event.medium, event.ownership) for event in removed} == {("STORAGE", "fs")}
    assert {each for event in removed for each in event.block_hashes} == {block_hash_of(key) for key in wanted}


def test_what_an_engine_says_of_a_chunk_is_published_with_it(start, keys, published):
    engine = start(events=EVENTS)
    (key,) = keys(1)
    engine.manager.describe([ChunkBlocks(key, [block_hash_of(key)], b"before", range(16), "alice")])
    engine.store([key])
    (event,) = published(engine.manager.publisher)
    assert (event.parent_block_hash, event.token_ids, event.block_size) == (b"before", list(range(16)), 16)
    assert event.lora_name == "alice"


def test_the_figures_and_the_status_count_what_was_published(start, keys, published):
    engine = start(memory(), events=EVENTS)
    engine.store(keys(3))
    published(engine.manager.publisher)
    stats = engine.manager.stats()
    assert stats["engine"]["event_chunks"] == stats["events"]["chunks"] == 6
    assert stats["engine"]["event_batches"] == stats["events"]["batches"] >= 2
    assert stats["engine"]["dropped_event_chunks"] == 0
    assert stats["engine"]["replayed_event_batches"] >= 2


def test_without_the_option_nothing_of_zmq_is_imported_and_the_cost_is_none(start, keys):
    engine = start(memory())
    engine.store(keys(1))
    assert engine.manager.publisher is None
    code = "import sys, kvtiers; kvtiers.open_manager; kvtiers.open_client; print('zmq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_an_engine_without_the_libraries_says_what_to_install(start, monkeypatch):
    monkeypatch.setattr("kvtiers.kv_events.open.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        start(memory(), events=EVENTS)
    assert caught.value.problems == ["events: needs pyzmq: pip install 'kvtiers[events]'"]


def test_two_engines_on_one_endpoint_the_second_one_serves_without_events(start, keys, caplog):
    first = start(memory(), events=EVENTS)
    taken = first.manager.publisher.report()["endpoint"]
    second = start(memory(), events={**EVENTS, "endpoint": taken})
    flush_logs(60)
    lines = [record.getMessage() for record in caplog.records if record.name == "kvtiers.events"]
    assert len(lines) == 1
    assert lines[0].startswith(f"events: {taken}: it is in use")
    second.store(keys(4))
    second.forget()
    assert second.load(keys(4)) == 4
    assert second.manager.stats()["events"]["error"]
    assert not first.manager.stats()["events"]["error"]


ENGINE = """
import json, sys
import kvtiers
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
layout = CacheLayout(ModelIdentity("m", weights="w"), (KVGroup("g", 16),), (KVTensor("t", 0, 4000),))
config = {"version": 1, "primary": {"capacity": "1MiB"}, "events": json.loads(sys.argv[1])}
manager = kvtiers.open_manager(config, layout)
print(json.dumps(dict(manager.publisher.report())), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["tcp", "abstract"])
def test_a_killed_engine_leaves_nothing_and_the_next_one_has_its_endpoints(kind, tmp_path):
    port = free_port()
    endpoints = (
        {"endpoint": f"tcp://127.0.0.1:{port}", "bind": True, "replay_endpoint": None}
        if kind == "tcp"
        else {"endpoint": f"ipc://@kvtiers-{tmp_path.name}", "replay_endpoint": f"ipc://@kvtiers-{tmp_path.name}-again"}
    )
    for _ in range(2):
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(endpoints)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            env={"PATH": "", "TMPDIR": str(tmp_path)},
        )
        try:
            report = json.loads(engine.stdout.readline())
            assert report["error"] == ""
            subscriber = Subscriber(report["endpoint"])  # a connection, so that there is something to leave behind
            subscriber.close()
        finally:
            engine.kill()
            engine.wait(30)
            engine.stdin.close()
            engine.stdout.close()
        assert not list(tmp_path.iterdir())


def test_the_example_says_what_a_router_sees():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=300, check=True)
    assert [line.split(":")[1].strip() for line in done.stdout.splitlines()] == [
        "nothing is anywhere",
        "20 in CPU LOCAL, 20 in STORAGE LOCAL memory",
        "nothing is anywhere",
        "20 in CPU LOCAL",
    ]


def test_the_example_s_subscriber_sees_a_gap_and_asks_again_or_starts_over(start, keys):
    example = the_example()
    engine = start(rows=8, events={**EVENTS, "hashes": "int", "buffer_steps": 4})
    publisher = engine.manager.publisher
    report = publisher.report()
    subscriber, index = example.Subscriber(report["endpoint"], report["replay_endpoint"]), example.Index()

    def follow():
        while subscriber.next < publisher.report()["next_batch"]:
            for event in subscriber.replay():
                index.apply(event)

    def there():
        return {number for found in index.blocks.values() for number in found}

    engine.store(keys(1, "a"))
    engine.store(keys(1, "b"))
    follow()
    assert there() == {hash_number(key) for name in "ab" for key in keys(1, name)}
    for number in range(6):
        engine.store(keys(1, f"c{number}"))
    follow()
    assert there() == {hash_number(key) for number in range(2, 6) for key in keys(1, f"c{number}")}, "the rest is lost"
    for _ in range(2000):
        engine.manager.reset_cache()
        for event in subscriber.events(0.01):
            index.apply(event)
        if subscriber.next == publisher.report()["next_batch"] and not there():
            break
    else:
        pytest.fail("the clear does not come")
    subscriber.close()


def test_the_example_s_subscriber_starts_over_with_an_engine_that_was_started_again(keys):
    example = the_example()
    port = free_port()
    config = EventsConfig(endpoint=f"tcp://127.0.0.1:{port}", bind=True, replay_endpoint="tcp://127.0.0.1:0")
    subscriber, index = example.Subscriber(config.endpoint, "tcp://127.0.0.1:1"), example.Index()
    for name in "ab":
        publisher = EventPublisher(config, [GroupFacts(0, 16, "full_attention")], [])
        subscriber.replay_endpoint = publisher.report()["replay_endpoint"]
        for _ in range(2000):
            publisher.take([OffloadEvent(keys(3, name), removed=False)])
            for event in subscriber.events(0.01):
                index.apply(event)
            if index.blocks["CPU", "LOCAL", ""] == {hash_number(key) for key in keys(3, name)}:
                break
        else:
            pytest.fail(f"the index is {index.blocks}")
        for _ in range(500 if name == "a" else 0):  # so that the next one's numbers are lower when they are seen
            publisher.take([OffloadEvent(keys(3, name), removed=False)])
        for event in subscriber.events(0.5):
            index.apply(event)
        publisher.close(1.0)
    subscriber.close()


def the_example():
    spec = spec_from_file_location("kv_events_example", EXAMPLE)
    spec.loader.exec_module(example := module_from_spec(spec))
    return example


def hash_number(key):
    return int.from_bytes(block_hash_of(key), "big") & ((1 << 64) - 1)


def test_a_client_publishes_what_tiers_have_stored_and_removed(published):
    config = {"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [memory(required=True)], "events": EVENTS}
    with open_client(config, ModelIdentity("m", weights="w"), 4096) as client:
        assert client.put([b"one", b"two"], [b"x" * 4096, b"y" * 4096]).stored == [True, True]
        assert client.delete([b"one"]) == [True]
        stored, removed = published(client._driver.publisher)
        assert isinstance(stored, BlockStored)
        assert (set(stored.block_hashes), stored.medium, stored.ownership) == ({b"one", b"two"}, "STORAGE", "memory")
        assert isinstance(removed, BlockRemoved)
        assert removed.block_hashes == [b"one"]
        assert client.stats()["events"]["chunks"] == 3
