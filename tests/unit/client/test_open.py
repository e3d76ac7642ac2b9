"""A client over tiers on threads of this process: what it refuses, what it never raises, and whose values it finds."""

import dataclasses
import hashlib
import logging
import math
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvtiers
import kvtiers.metrics
from kvtiers import ModelIdentity, open_client, request_hints
from kvtiers.api import ConfigError, StartError, make_offload_key
from kvtiers.client.open import client_layout
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor
from kvtiers.testing.running import descriptors_left_since, open_descriptors, threads_left_since

IDENTITY = ModelIdentity("m", weights="w1")
MEMORY = {"type": "memory", "capacity": "16MiB", "io": "thread"}
KEYS = [bytes([number]) * 8 for number in range(8)]


def config(*tiers, **more):
    return {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "30s", "secondary": list(tiers), **more}


@pytest.fixture
def client():
    with open_client(config(MEMORY), IDENTITY, [1000, 5000], bounce_bytes=1 << 16) as client:
        yield client


def value(seed, nbytes=1000):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def test_values_of_each_length_come_back_byte_for_byte_and_lengths_are_never_mixed_up(client):
    assert client.put(KEYS[:2], [value(1), value(2, 5000)]) == kvtiers.PutResult([True, True], {"memory": 2})
    small, large = np.zeros(1000, np.uint8), np.zeros(5000, np.uint8)
    assert client.get_into(KEYS[:2], [small, [large[:7], large[7:]]]) == [True, True]
    assert (small.tobytes(), large.tobytes()) == (value(1).tobytes(), value(2, 5000).tobytes())
    small[:], large[:] = 7, 7
    assert client.get_into(KEYS[:2], [large, small]) == [False, False]
    assert set(small) | set(large) == {7}, "what is not found keeps what it held"
    assert client.exists_prefix(KEYS[:2]) == 1
    assert client.exists_prefix(KEYS[1:2], 5000) == 1


def test_a_call_with_more_values_than_rows_moves_all_of_them(client):
    keys = [number.to_bytes(8, "big") for number in range(300)]
    values = [value(number) for number in range(300)]
    assert all(client.put(keys, values).stored)
    back = np.zeros((300, 1000), np.uint8)
    assert all(client.get_into(keys, list(back)))
    assert np.array_equal(back, values)
    assert client.exists_prefix(keys) == 300
    assert client.stats()["free_bounce_rows"] == client.stats()["bounce_rows"] == 8


def test_a_key_that_is_given_twice_in_a_call_is_moved_once_and_filled_twice(client):
    assert client.put([KEYS[0]] * 2, [value(1), value(1)]).stored == [True, True]
    back = np.zeros((2, 1000), np.uint8)
    assert client.get_into([KEYS[0]] * 2, list(back)) == [True, True]
    assert (back == value(1)).all()


def test_what_a_session_leaves_that_ends_is_not_written_and_what_is_stored_stays(client):
    assert all(client.put(KEYS[:2], [value(0), value(1)], hints=request_hints({"session": "s"})).stored)
    last = client.put(
        KEYS[:3], [value(0), value(1), value(2)], hints=request_hints({"session": "s", "session_ends": True})
    )
    assert (last.stored, last.tiers, last.error) == ([False] * 3, {}, "")
    assert client.exists(KEYS[:3]) == [True, True, False]
    assert client.put(KEYS[2:3], [value(2)]).stored == [True]  # it came back
    counts = client.stats()
    assert (counts["puts"], counts["put_values"], counts["declined_values"], counts["stored_values"]) == (3, 6, 3, 3)


@pytest.mark.parametrize(
    ("keys", "views"),
    [
        ([b"k"], [bytearray(999)]),
        ([b"k"], [[]]),
        ([b""], [bytearray(1000)]),
        (["k"], [bytearray(1000)]),
        ([7], [bytearray(1000)]),
        ([b"k" * 65_532], [bytearray(1000)]),
        ([b"k"], [None]),
        ([b"k"], []),
        ([b"k"], [np.zeros(2000, np.uint8)[::2]]),
    ],
)
def test_what_does_not_fit_is_a_result_a_count_and_a_line(client, keys, views, caplog):
    result = client.put(keys, views)
    assert (result.stored, bool(result.error)) == ([False], True)
    assert client.get_into(keys, views) == [False]
    assert client.stats()["refused_values"] == 2
    client.close()  # lines are written by a thread
    assert "client: refused" in caplog.text


def test_one_that_does_not_fit_keeps_no_other_from_being_moved(client):
    assert client.put(KEYS[:3], [value(0), b"short", value(2)]).stored == [True, False, True]
    back = np.zeros((3, 1000), np.uint8)
    assert client.get_into(KEYS[:3], [back[0], bytearray(5), back[2]]) == [True, False, True]


@pytest.mark.parametrize("wrong", [None, 7, object()])
def test_no_mistake_of_a_caller_raises(client, wrong, caplog):
    assert client.put(wrong, wrong).stored == []
    assert client.get_into(wrong, wrong) == []
    assert client.exists_prefix(wrong) == 0
    assert client.exists_prefix(KEYS, wrong) == 0
    assert client.put(KEYS[:1], [value(0)], timeout="soon").stored == [False]
    assert client.stats()["failed_calls"] == 4
    client.close()  # lines are written by a thread
    assert "client: a call failed" in caplog.text


def test_after_the_close_nothing_is_found_and_nothing_raises(client):
    client.put(KEYS, [value(0)] * 8)
    client.close()
    client.close()
    result = client.put(KEYS, [value(0)] * 8)
    assert (result.stored, result.error) == ([False] * 8, "the client is closed")
    assert client.get_into(KEYS, [bytearray(1000)] * 8) == [False] * 8
    assert client.exists_prefix(KEYS) == 0
    assert client.stats()["tiers"] == {}


def test_what_was_deleted_is_absent_in_every_length_and_can_be_put_again(client):
    client.put(KEYS[:3], [value(0), value(1), value(2, 5000)])
    client.put(KEYS[:1], [value(3, 5000)])
    assert client.delete([*KEYS[:1], b"never there", KEYS[0]]) == [True] * 3
    assert client.exists_prefix(KEYS[:1]) == client.exists_prefix(KEYS[:1], 5000) == 0
    assert client.get_into(KEYS[:3], [bytearray(1000), bytearray(1000), bytearray(5000)]) == [False, True, True]
    assert client.delete(KEYS[1:3], 1000) == [True, True]
    assert client.get_into(KEYS[1:3], [bytearray(1000), bytearray(5000)]) == [False, True]
    back = np.zeros(1000, np.uint8)
    assert client.put(KEYS[:1], [value(9)]).stored == [True]
    assert client.get_into(KEYS[:1], [back]) == [True]
    assert (back == value(9)).all(), "what was deleted is not taken for present, and is written again"
    assert client.stats()["deleted_values"] == 5


def test_values_of_a_tier_that_cannot_delete_are_not_deleted_and_the_log_says_which_tier(caplog):
    managed = {"type": "memory-async", "max_blocks": 64, "name": "mine"}
    with open_client(config(MEMORY, managed), IDENTITY, 1000, bounce_bytes=1 << 16) as client:
        assert client.put(KEYS[:2], [value(0), value(1)]).tiers == {"memory": 2, "mine": 2}
        assert client.delete(KEYS[:2]) == [False, False]
        assert client.exists(KEYS[:2]) == [True, True], "it is still there, so it is found"
        assert (client.stats()["deleted_values"], client.stats()["undeleted_values"]) == (0, 2)
    assert "2 values may not be deleted: mine moves rows by itself" in caplog.text


MISTAKES = [["k"], [7], [b""], [b"k" * 65_532], [["no", "hash"]]]


@pytest.mark.parametrize("call", ["exists_prefix", "exists", "delete"])
def test_each_call_refuses_the_same_mistakes_and_answers_for_the_rest(client, call, caplog):
    client.put(KEYS[:1], [value(0)])
    ask = getattr(client, call)
    assert ask(KEYS[:1], 7) == (0 if call == "exists_prefix" else [False])
    for (mistake,) in MISTAKES:
        assert ask([KEYS[0], mistake]) == (1 if call == "exists_prefix" else [True, False])
    assert client.stats()["refused_values"] == len(MISTAKES) + 1
    assert client.stats()["failed_calls"] == 0
    client.close()  # lines are written by a thread
    assert "client: refused a key that is not 1 to 65,531 bytes" in caplog.text
    assert "client: refused values of 7 bytes; this client's have 1000, 5000 bytes" in caplog.text


def test_a_long_key_and_the_key_that_is_its_hash_have_a_value_each(client):
    long = b"the text of a prompt, as a key of more than 43 bytes"
    short = hashlib.sha256(make_offload_key(long, 0)).digest()
    client.put([long], [value(1)])
    assert client.exists([long, short]) == [True, False]
    client.put([short], [value(2)])
    back = [bytearray(1000), bytearray(1000)]
    assert client.get_into([long, short], back) == [True, True]
    assert [bytes(one) for one in back] == [bytes(value(1)), bytes(value(2))]


def test_each_key_is_looked_up_by_itself(client):
    client.put([KEYS[1], KEYS[3]], [value(1), value(3)])
    client.put(KEYS[:1], [value(0, 5000)])
    assert client.exists([*KEYS[:4], KEYS[1], b"", b"absent"]) == [False, True, False, True, True, False, False]
    assert client.exists(KEYS[:2], 5000) == [True, False]
    assert client.exists(KEYS[:2], 7) == client.exists(KEYS[:2], timeout=0) == [False, False]
    assert client.exists(None) == []
    client.close()
    assert client.exists(KEYS[1:2]) == [False]


def test_a_clients_figures_are_exported_by_the_managers_exporter(client):
    registry = CollectorRegistry()
    kvtiers.metrics.export(client.stats, registry)
    client.put(KEYS, [value(n) for n in range(8)])
    client.get_into([*KEYS[:3], b"absent"], [bytearray(1000)] * 4)
    client.delete(KEYS[:1])

    def figure(name, **labels):
        return registry.get_sample_value(f"kvtiers_{name}", labels)

    assert [figure(f"client_{n}_total") for n in ("stored_values", "found_values", "deleted_values")] == [8, 3, 1]
    assert figure("client_bounce_rows") == figure("client_free_bounce_rows") == 8
    assert figure("tier_stored_chunks_total", tier="memory") == 8
    assert figure("tier_loaded_chunks_total", tier="memory") == 3
    assert figure("tier_loaded_bytes_total", tier="memory") == 3 * 4096
    assert figure("tier_cascade_latency_seconds_count", tier="memory") > 0
    assert figure("tier_promotion_latency_seconds_count", tier="memory") > 0
    assert figure("tier_breaker_state", tier="memory") == figure("tier_running_jobs", tier="memory") == 0
    text = generate_latest(registry).decode()
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    assert not re.search(r"# HELP kvtiers_client_\w+ A figure of the tier", text)


def test_nothing_that_is_no_key_is_deleted_and_nothing_raises(client):
    assert client.delete([b"", "text", b"fine"]) == [False, False, True]
    assert client.delete(None) == []
    assert client.delete(KEYS[:1], 77) == [False]
    assert client.delete(KEYS[:1], timeout=0) == [False]
    client.close()
    assert client.delete(KEYS[:1]) == [False]


def test_a_value_in_a_read_only_tier_stays_and_one_in_a_tier_that_cannot_delete_is_said_to_be_there(tmp_path):
    def fs(name, **more):
        return {"type": "fs", "name": name, "path": str(tmp_path / name), "io": "thread", "capacity": "1GiB", **more}

    with open_client(config(fs("one"), fs("two")), IDENTITY, 1000) as client:
        assert client.put(KEYS, [value(n) for n in range(8)]).stored == [True] * 8
    with open_client(config(fs("one"), fs("two", read_only=True)), IDENTITY, 1000) as client:
        assert client.delete(KEYS) == [True] * 8
        assert sum(client.get_into(KEYS, [bytearray(1000) for _ in KEYS])) == 8
    with open_client(config(fs("one")), IDENTITY, 1000) as client:
        assert sum(client.get_into(KEYS, [bytearray(1000) for _ in KEYS])) == 0
    with open_client(config({"type": "memory-async", "max_blocks": 64}), IDENTITY, 1000) as client:
        assert client.delete(KEYS[:1]) == [False]


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 300 * 365 * 86400.0, threading.TIMEOUT_MAX, 10**400])
def test_a_timeout_that_no_clock_reaches_is_a_long_one(timeout):
    with open_client(config(MEMORY), IDENTITY, 1000, bounce_bytes=1 << 16, deadline=timeout) as client:
        for given in (timeout, None):
            assert client.put(KEYS[:2], [value(0), value(1)], given).stored == [True, True]
            assert client.get_into(KEYS[:3], [bytearray(1000) for _ in range(3)], given) == [True, True, False]
            assert client.exists(KEYS[:3], timeout=given) == [True, True, False]
            assert client.exists_prefix(KEYS[:3], timeout=given) == 2
            assert client.prefetch(KEYS[:2], timeout=given) is not None
            assert client.delete(KEYS[:1], timeout=given) == [True]
        assert client.stats()["failed_calls"] == 0
        assert client.stats()["tiers"]
        client.close(timeout)
        assert client.stats()["failed_calls"] == 0


def test_a_timeout_that_is_no_number_is_over_at_once(client):
    assert client.put(KEYS[:1], [value(0)], timeout=math.nan).stored == [False]


def test_a_call_without_time_is_over_at_once(client):
    assert client.put(KEYS[:1], [value(0)], timeout=0).stored == [False]
    assert client.get_into(KEYS[:1], [bytearray(1000)], timeout=-1) == [False]
    assert client.exists_prefix(KEYS, timeout=0) == 0


def test_each_tier_that_takes_stores_gets_a_value_and_each_has_it_by_itself(tmp_path):
    def fs(name, **more):
        return {"type": "fs", "name": name, "path": str(tmp_path / name), "io": "thread", "capacity": "1GiB", **more}

    (tmp_path / "old").mkdir()
    with open_client(config(fs("one"), fs("two"), fs("old", read_only=True)), IDENTITY, 1000) as client:
        assert client.put(KEYS, [value(n) for n in range(8)]) == kvtiers.PutResult([True] * 8, {"one": 8, "two": 8})
    for name, found in (("one", 8), ("two", 8), ("old", 0)):
        with open_client(config(fs(name)), IDENTITY, 1000) as client:
            assert client.exists_prefix(KEYS) == found
            assert sum(client.get_into(KEYS, [bytearray(1000) for _ in KEYS])) == found


@pytest.mark.parametrize("simulate_async", [True, False])
def test_a_tier_that_moves_its_rows_by_itself_serves_a_client_too(simulate_async):
    tier = {"type": "memory-async", "max_blocks": 64, "simulate_async": simulate_async}
    with open_client(config(tier), IDENTITY, 1000) as client:
        assert client.put(KEYS, [value(n) for n in range(8)]).stored == [True] * 8
        back = np.zeros((9, 1000), np.uint8)
        assert client.exists_prefix([*KEYS, b"not there"]) == 8
        assert client.get_into([*KEYS, b"not there"], list(back)) == [True] * 8 + [False]
        assert (back[:8] == [value(n) for n in range(8)]).all()


def test_a_client_without_tiers_finds_nothing():
    with open_client(config(), IDENTITY, 1000) as client:
        assert client.put(KEYS[:1], [value(0)]) == kvtiers.PutResult([False], {}, "no tier is usable")
        assert client.get_into(KEYS[:1], [bytearray(1000)]) == [False]


def test_the_start_line_says_what_uses_the_tiers(caplog):
    caplog.set_level(logging.INFO, "kvtiers")
    with open_client(config(MEMORY), IDENTITY, 1000, bounce_bytes=1 << 16, way_in="from a test") as client:
        client.put(KEYS[:1], [value(0)])
    (line,) = [r.getMessage() for r in caplog.records if "is on" in r.getMessage()]
    assert "is on, from a test; primary none, but 64KiB of bounce rows; tiers: memory (memory) in use" in line


# -- what is refused at the opening


@pytest.mark.parametrize("admission", ["second_access", "on_eviction", "expected-reuse"])
def test_an_admission_that_needs_a_primary_is_refused(admission):
    with pytest.raises(ConfigError, match=f"^memory: admission '{admission}' needs a primary tier"):
        open_client(config({**MEMORY, "admission": admission}), IDENTITY, 1000)


@pytest.mark.parametrize("lengths", [[], 0, [1000, -1], range(1, 66)])
def test_lengths_that_cannot_be_are_refused(lengths):
    with pytest.raises(ConfigError, match="expected 1 to 64 positive numbers of bytes"):
        open_client(config(MEMORY), IDENTITY, lengths)


@pytest.mark.parametrize("more", [{"region_bytes": -1}, {"region_bytes": 4096, "region": (0, bytearray(4096))}])
def test_a_region_that_cannot_be_is_refused(more):
    descriptors = open_descriptors()
    with pytest.raises(ConfigError, match="expected a number of bytes, and none beside a region"):
        open_client(config(MEMORY), IDENTITY, 1000, **more)
    with pytest.raises(StartError, match="no shared mapping of descriptor 0"):
        open_client(config(MEMORY), IDENTITY, 1000, region=(0, bytearray(4096)))
    assert descriptors_left_since(descriptors, patience=30) == []


@pytest.mark.parametrize(("nbytes", "lines"), [(300_000, 1), (1000, 0)])
def test_a_region_that_is_not_required_is_left_out_where_it_cannot_be_mapped_or_is_of_no_use(caplog, nbytes, lines):
    memory = bytearray(nbytes)
    options = {"region": (0, memory), "region_required": False, "bounce_bytes": 1 << 20, "way_in": "in a test"}
    with open_client(config(MEMORY), IDENTITY, nbytes, **options) as client:
        assert client.put(KEYS[:1], [value(1, nbytes)]).stored == [True]
        assert client.get_into(KEYS[:1], [memory]) == [True]
        assert len(client.region) == client.stats()["direct_values"] == 0
    assert memory == value(1, nbytes).tobytes()
    found = [it.getMessage() for it in caplog.records if "is not mapped" in it.getMessage()]
    assert len(found) == lines
    assert all(line.startswith("kvtiers in a test: ") and "no shared mapping of descriptor 0" in line for line in found)


def test_what_else_stops_a_client_stops_it_with_a_region_that_is_not_required(tmp_path, caplog):
    def opened(tier, memory):
        options = {"region": (0, memory), "region_required": False}
        return open_client(config(tier, start_wait="0s"), IDENTITY, 300_000, **options)

    with pytest.raises(StartError, match="cannot be written"):
        opened(MEMORY, b"read only")
    wrong = {**MEMORY, "type": "fs", "path": str(tmp_path / "file/no"), "required": True}
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"^fs: required, but cannot be opened"):
        opened(wrong, bytearray(8))
    assert len([line for line in caplog.messages if "is not mapped" in line]) == 1, "it was opened once"


def test_the_region_stays_the_callers_when_the_client_is_closed(client):
    assert len(client.region) == 0
    with open_client(config(MEMORY), IDENTITY, 1000, bounce_bytes=1 << 16, region_bytes=5000) as other:
        mine = np.frombuffer(other.region, np.uint8)
        assert (mine.nbytes, mine.max()) == (5000, 0)
        mine[:1000] = value(1)
        assert other.put(KEYS[:1], [mine[:1000]]).stored == [True]
        assert other.get_into(KEYS[:1], [mine[2000:3000]]) == [True]
    del other
    assert (mine[2000:3000] == value(1)).all()


def test_a_required_tier_that_cannot_be_opened_stops_the_client_and_nothing_is_left(tmp_path):
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    file = tmp_path / "file"
    file.touch()
    wrong = {"type": "fs", "path": str(file / "no"), "io": "thread", "required": True, "capacity": "1MiB"}
    with pytest.raises(StartError, match=r"^fs: required, but cannot be opened"):
        open_client(config(wrong, start_wait="0s"), IDENTITY, 1000)
    assert threads_left_since(threads, patience=30) == []
    assert descriptors_left_since(descriptors, patience=30) == []


@pytest.mark.parametrize("refused", range(1, 8))
def test_a_client_whose_threads_cannot_be_started_leaves_nothing(monkeypatch, refused):
    threads, descriptors, started = set(threading.enumerate()), open_descriptors(), []
    start, caller = threading.Thread.start, threading.current_thread()

    def counted(thread):
        if threading.current_thread() is caller:
            started.append(thread)
            if len(started) == refused:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    try:
        open_client(config(MEMORY), IDENTITY, 1000, bounce_bytes=1 << 16).close()
    except RuntimeError:
        assert len(started) >= refused
    monkeypatch.undo()
    assert threads_left_since(threads, patience=30) == []
    assert descriptors_left_since(descriptors, patience=30) == []


def test_a_close_leaves_no_thread_no_descriptor_and_no_memory():
    def mappings():
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kvtiers-client")

    threads, descriptors, mapped = set(threading.enumerate()), open_descriptors(), mappings()
    with open_client(config(MEMORY), IDENTITY, 1000) as client:
        client.put(KEYS[:1], [value(0)])
        assert mappings() > mapped
    assert threads_left_since(threads, patience=30) == []
    assert descriptors_left_since(descriptors, patience=30) == []
    assert mappings() <= mapped, "an earlier test's may have been collected meanwhile"


# -- whose values are whose


def test_the_order_of_the_lengths_makes_no_difference_and_another_length_does():
    prints = [client_layout(IDENTITY, lengths).fingerprint for lengths in ([1, 2], [2, 1, 2], [1, 2, 3], [1])]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelIdentity)])
def test_every_field_of_the_identity_makes_another_fingerprint(field):
    other = dataclasses.replace(IDENTITY, **{field: 7 if field == "hash_bytes" else "other"})
    assert client_layout(other, [1000]).fingerprint != client_layout(IDENTITY, [1000]).fingerprint


def test_the_fingerprint_of_a_clients_values_stays_what_it_is():
    """Another one is a cold cache for every client."""
    layout = client_layout(IDENTITY, [1000, 5000])
    assert layout.fingerprint == "f8d48a6483ab7a737b97605f68a5fd9409222621ae49e69b2f51732e510f9ef8"
    assert [(layout.payload_bytes(group), layout.value_bytes(group)) for group in (0, 1)] == [
        (1000, 4096),
        (5000, 8192),
    ]


@pytest.mark.parametrize("name", ["g", "1000 bytes"])
def test_no_layout_of_an_engine_has_a_clients_fingerprint(name):
    engine = CacheLayout(IDENTITY, (KVGroup(name, 1),), (KVTensor("model.layers.0.self_attn", 0, 1000),))
    client = client_layout(IDENTITY, [1000])
    assert client.payload_bytes(0) == engine.payload_bytes(0)
    assert client.fingerprint != engine.fingerprint


def test_the_config_and_the_caller_name_the_same_model_or_it_does_not_start():
    with pytest.raises(ConfigError, match=r"model\.revision|model\.weights"):
        open_client(config(MEMORY, model={"name": "m", "revision": "w2"}), IDENTITY, 1000)


def test_without_weights_nothing_is_shared(tmp_path, caplog):
    tier = {"type": "fs", "path": str(tmp_path / "fs"), "io": "thread", "capacity": "16MiB", "min_free": 0}
    for found in (False, False):
        with open_client(config(tier), ModelIdentity("m"), 1000) as client:
            assert client.get_into(KEYS[:1], [bytearray(1000)]) == [found]
            assert client.put(KEYS[:1], [value(0)]).stored == [True]
    assert "nothing is shared" in caplog.text
