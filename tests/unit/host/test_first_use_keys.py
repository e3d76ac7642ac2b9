"""Keys of tenants that the config does not list: read at the first use, a few kept, and never another one's."""

import base64
import os
import random
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.encryption.keyed import NAMES, key
from tests.unit.secondary.conftest import wait_until

from kvtiers.api import ConfigError, make_offload_key, tenant_of
from kvtiers.api.keys import with_tenant
from kvtiers.encryption import key_source, keyed_names
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import KeyRing
from kvtiers.host import first_use_keys
from kvtiers.host.first_use_keys import FirstUseKeys
from kvtiers.host.messages import JobDone, Opened, Probed, Status, StoreJob
from kvtiers.layout.storage_name import parse_name

DONE, MISSING, REFUSED = Status.DONE, Status.MISSING, Status.REFUSED


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Here a busy machine is no reason for a miss."""
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 60.0)


@pytest.fixture
def folder(tmp_path):
    """Write the keys of these tenants into the folder of one kind; return the config that reads them."""

    def write(*tenants, kind="key"):
        (tmp_path / kind).mkdir(exist_ok=True)
        for tenant in tenants:
            file = tmp_path / kind / f"{tenant}.key"
            file.write_bytes(base64.b64encode(os.urandom(32)))
            file.chmod(0o600)
        return {"file": str(tmp_path / kind / "{tenant}.key")}

    return write


@pytest.fixture
def namespace_key(tmp_path):
    file = tmp_path / "all.key"
    file.write_bytes(os.urandom(31) + b"\0")
    file.chmod(0o600)
    return {"file": str(file)}


@pytest.fixture
def keys_of(namespace_key):
    def make(each_other, pauses=(0.0, 0.0), most=1024, **listed):
        sources = {"key": namespace_key, "tenants": listed | {"*": each_other}}
        config = EncryptionConfig.model_validate(sources)
        return FirstUseKeys(config, "test", open_keys(config, "test"), "disk", pauses, most)

    return make


@pytest.fixture
def gates(monkeypatch):
    """Have each attempt to read a key of these tenants wait for a permit; return the permits, and who was read.

    A tenant's first attempt fails if its name begins with "bad".
    """
    permits, read, failed = defaultdict(lambda: threading.Semaphore(0)), [], set()

    def wait(config, namespace, tenant):
        read.append(tenant)
        if tenant.startswith("bad") and tenant not in failed:
            failed.add(tenant)
            raise ConfigError("no key")
        if tenant in permits:
            assert permits[tenant].acquire(timeout=60)
        return open_keys(config, namespace, tenant)

    monkeypatch.setattr(first_use_keys, "open_keys", wait)
    return permits, read


@pytest.fixture
def opened(monkeypatch):
    """Count the tenants whose keys are read."""
    read = []

    def note(config, namespace, tenant):
        read.append(tenant)
        return open_keys(config, namespace, tenant)

    monkeypatch.setattr(first_use_keys, "open_keys", note)
    return read


def chunk(tenant, number=1):
    return make_offload_key(bytes([number]) * 32, 0, tenant)


def ids(ring, *tenants):
    return [None if (own := ring.of(tenant)) is None else own.current.id for tenant in tenants]


def await_ring(keys, *tenants):
    """Use them until their keys are there; return the ring."""
    of_all = [chunk(tenant) for tenant in tenants]
    wait_until(lambda: keys.ring_of(of_all).missing.isdisjoint(tenants), f"the keys of {tenants}")
    return keys.ring_of(of_all)


def end(keys):
    """Close them, and wait for their threads, which end by themselves."""
    keys.close()
    for thread in threading.enumerate():
        if thread.name == "kvtiers-disk-first-use-keys":
            thread.join(60)
            assert not thread.is_alive()


def test_each_tenant_has_its_own_key_and_one_without_is_alone_without_the_tier(kit, folder, namespace_key, log_lines):
    encryption = {"key": namespace_key, "tenants": {"*": {"key": folder("blue", "green")}}}
    store = kit.DictStore()
    pool, events = kit.pool(store, encryption=encryption)
    assert not events.wait(Opened)[0].error
    mixed = [with_tenant(kit.key(number), tenant) for number, tenant in enumerate(["blue", "red", "", "green"])]
    for row, each in enumerate(mixed):
        kit.rows.fill(row, each)
    pool.submit(StoreJob(1, is_load=False, keys=mixed, rows=range(4)))
    assert list(events.wait(JobDone)[0].statuses) == [DONE, REFUSED, DONE, DONE]
    line = log_lines("is without this tier")
    assert "encryption.tenants.*.key.file: cannot read" in line
    assert "tenant 'red' is without this tier until its key can be read, and no other one is" in line
    assert {parse_name(name).tenant for name in store.values} == {"blue", "", "green"}
    assert len({parse_name(name).key_id for name in store.values}) == 3, "none has the namespace's but who has none"
    pool.probe(2, mixed, is_prefix=False)
    assert list(events.wait(Probed)[0].answers) == [True, False, True, True]
    for row in range(4):
        kit.rows.poison(row)
    pool.submit(StoreJob(3, is_load=True, keys=mixed, rows=range(4)))
    assert list(events.wait(JobDone, 2)[1].statuses) == [DONE, MISSING, DONE, DONE]
    assert [kit.rows.holds(row, mixed[row]) for row in (0, 2, 3)] == [True] * 3
    assert kit.rows.is_poisoned(1)


def test_a_key_that_comes_later_is_read_at_a_use_after_its_pause(keys_of, folder):
    keys = keys_of({"key": folder()})
    for _ in range(3):
        assert keys.ring_of([chunk("blue")]).missing == {"blue"}
    folder("blue")
    while (ring := keys.ring_of([chunk("blue")])).missing:  # each use has one attempt made, which it does not wait for
        pass
    assert ids(ring, "blue") != ids(ring, "")
    patient = keys_of({"key": folder()}, pauses=(1e9, 1e9))
    assert patient.ring_of([chunk("red")]).missing == {"red"}
    folder("red")
    assert patient.ring_of([chunk("red")]).missing == {"red"}, "its pause is not over"
    end(keys)
    end(patient)


def test_what_is_listed_and_what_has_no_tenant_needs_no_reading(keys_of, folder, opened, namespace_key):
    keys = keys_of({"key": folder("blue")}, red={"key": namespace_key})
    assert keys.ring_of([chunk(""), chunk("red")]).missing == {"red"}, "which its own reader adds"
    assert opened == []
    assert keys.ring_of([chunk("blue"), chunk("blue", 2)]).missing == {"red"}
    assert opened == ["blue"]
    end(keys)


def test_the_least_recently_used_key_is_forgotten_and_a_run_goes_on_with_what_it_has(keys_of, folder, opened):
    keys = keys_of({"key": folder("a", "b", "c")}, most=2)
    of_a = keys.ring_of([chunk("a")])
    keys.ring_of([chunk("b")])
    keys.ring_of([chunk("a")])
    keys.ring_of([chunk("c")])
    assert opened == ["a", "b", "c"]
    keys.ring_of([chunk("a"), chunk("c")])
    assert opened == ["a", "b", "c"]
    keys.ring_of([chunk("b")])
    keys.ring_of([chunk("a")])
    assert opened == ["a", "b", "c", "b", "a"]
    assert len(keys._kept) == 2
    [names] = KeyedNames.of_ring(NAMES, of_a)
    assert names.has_name(chunk("a")), "also when it is forgotten"
    assert parse_name(names.name(chunk("a"))).key_id == ids(keys.ring_of([chunk("a")]), "a")[0]
    end(keys)


def test_with_many_threads_no_tenant_ever_has_another_one_s_key(keys_of, folder):
    tenants = [f"t{number}" for number in range(12)]
    source = {"key": folder(*tenants)}
    keys = keys_of(source, most=3)
    config = EncryptionConfig.model_validate({"key": {"env": "X"}, "tenants": {"*": source}})
    right = {tenant: open_keys(config, "test", tenant).current.id for tenant in tenants}
    assert len(set(right.values())) == 12

    def use(seed):
        chance = random.Random(seed)
        for _ in range(40):
            some = chance.sample(tenants, 2)
            while (ring := keys.ring_of([chunk(tenant) for tenant in some])).missing:  # more come than can be read
                assert all(ids(ring, each)[0] in {None, right[each]} for each in some)
            assert ids(ring, *some) == [right[tenant] for tenant in some]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))
    end(keys)


def test_a_tenant_whose_key_does_not_come_keeps_no_other_one_waiting(keys_of, tmp_path):
    pipe, raw = tmp_path / "pipe", base64.b64encode(os.urandom(32))
    os.mkfifo(pipe)
    program = f'test "$KVTIERS_TENANT" = slow && exec cat {pipe}; echo {raw.decode()}'
    keys = keys_of({"key": {"command": ["sh", "-c", program]}})
    assert keys.ring_of([chunk("slow")]).missing == {"slow"}, "while the command waits for who writes into the pipe"
    await_ring(keys, "quick")
    assert keys.ring_of([chunk("slow")]).missing == {"slow"}
    pipe.write_bytes(raw)
    await_ring(keys, "slow")
    end(keys)


def test_after_its_end_none_is_read(keys_of, folder, opened):
    keys = keys_of({"key": folder("blue")})
    end(keys)
    assert keys.ring_of([chunk("blue")]).missing == {"blue"}
    assert opened == []


def test_a_previous_key_is_read_where_a_tenant_has_one(keys_of, folder):
    keys = keys_of({"key": folder("blue", "red"), "previous": folder("blue", kind="old")})
    ring = keys.ring_of([chunk("blue"), chunk("red")])
    assert [len(ring.of(tenant).all) for tenant in ("blue", "red")] == [2, 1]
    assert ring.has_two
    assert not keys.ring_of([chunk("red")]).has_two
    end(keys)
    silent = keys_of({"key": folder("blue"), "previous": {"command": ["true"]}})
    assert len(await_ring(silent, "blue").of("blue").all) == 1
    end(silent)
    failing = keys_of({"key": folder("blue"), "previous": {"command": ["false"]}})
    assert failing.ring_of([chunk("blue")]).missing == {"blue"}
    wait_until(lambda: failing._failed)
    assert failing.ring_of([chunk("blue")]).missing == {"blue"}, "whether there is one is not known"
    end(failing)


@pytest.mark.parametrize(
    "tenant", ["../all", "a/../../all", "..", "a..b", ".hidden", "a/b", "/etc/passwd", "A", "a\0b"]
)
def test_no_name_leads_out_of_the_folder(folder, namespace_key, tenant, monkeypatch):
    monkeypatch.setattr(key_source, "read_key", lambda source, *_: pytest.fail(source.file))
    config = EncryptionConfig.model_validate({"key": namespace_key, "tenants": {"*": {"key": folder()}}})
    with pytest.raises(ConfigError, match="cannot be used"):
        open_keys(config, "test", tenant)


def test_a_ring_whose_other_tenants_have_their_own_never_gives_them_the_namespace_s():
    ring = KeyRing(key(1), tenants=["red"], others_have_own=True)
    assert [ring.of(tenant) for tenant in ("red", "blue")] == [None, None]
    assert ring.of("") is ring
    more = ring.with_tenants({"blue": KeyRing(key(2)), "green": None})
    assert more.of("blue").current.is_same(key(2))
    assert [more.of("green"), more.of("white"), more.missing] == [None, None, {"red", "green"}]


def test_a_value_read_while_a_listed_key_is_added_is_there_or_missing():
    ring, own = KeyRing(key(1), tenants=["red"], others_have_own=True), KeyRing(key(2))

    class AddedMeanwhile(dict):
        """The key comes when the tenants have been copied, before anything else is."""

        def __iter__(self):
            return super().__iter__()  # so that a copy asks for each value

        def __getitem__(self, tenant):
            found = super().__getitem__(tenant)
            if found is None:
                ring.add(tenant, own)
            return found

    ring._tenants = AddedMeanwhile(ring._tenants)
    more = ring.with_tenants({"blue": KeyRing(key(3))})
    assert not ring.missing
    assert more.of("red") is own or more.missing == {"red"}


def test_a_tenant_for_which_no_thread_could_be_started_is_read_at_its_next_use(keys_of, folder, monkeypatch, log_lines):
    start, refused = threading.Thread.start, []

    def start_some(thread):
        if thread.name == "kvtiers-disk-first-use-keys" and len(refused) < 3:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 1e9)  # for ever, if nothing reads it
    keys = keys_of({"key": folder("blue")})
    for _ in range(3):
        assert keys.ring_of([chunk("blue")]).missing == {"blue"}
    assert not keys.ring_of([chunk("blue")]).missing
    assert "can't start new thread; tried again at a use (2 so far)" in log_lines("(2 so far)")
    assert len(refused) == 3
    end(keys)


def test_no_use_waits_for_a_command_or_behind_other_tenants(keys_of, folder, gates, monkeypatch):
    permits, _ = gates
    of_command = keys_of({"key": {"command": ["true"]}})
    began = time.monotonic()
    tenants = [f"t{number}" for number in range(50)]
    for tenant in tenants:
        permits[tenant] = threading.Semaphore(0)
        assert of_command.ring_of([chunk(tenant)]).missing
        assert time.monotonic() - began < 45, "no wait of 60 s"
    for tenant in tenants:
        permits[tenant].release()
    end(of_command)
    monkeypatch.setattr(first_use_keys, "_MOST_THREADS", 1)
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 0.0)
    keys = keys_of({"key": folder("a", "b")})
    permits["a"] = threading.Semaphore(0)
    assert keys.ring_of([chunk("a")]).missing
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 60.0)
    assert keys.ring_of([chunk("b")]).missing, "the one thread is busy"
    assert time.monotonic() - began < 45, "no wait of 60 s"
    permits["a"].release()
    await_ring(keys, "a", "b")
    end(keys)


def test_many_new_tenants_whose_files_hang_are_waited_for_as_long_as_one(keys_of, folder, gates, monkeypatch):
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(first_use_keys, "_MOST_THREADS", 40)
    permits, _ = gates
    tenants = [f"t{number}" for number in range(40)]
    keys = keys_of({"key": folder(*tenants)})
    for tenant in tenants:
        permits[tenant] = threading.Semaphore(0)
    began = time.monotonic()
    for tenant in tenants:
        assert keys.ring_of([chunk(tenant)]).missing
    assert time.monotonic() - began < 4, "of 40 waits one or two"
    for tenant in tenants:
        permits[tenant].release()
    end(keys)


def test_hanging_retries_leave_half_of_the_threads_to_new_tenants(keys_of, folder, gates):
    permits, read = gates
    bad = [f"bad{number}" for number in range(16)]
    keys = keys_of({"key": folder("new", *bad)})
    for tenant in bad:
        permits[tenant] = threading.Semaphore(0)
    for _ in range(2):
        keys.ring_of([chunk(tenant) for tenant in bad])
        wait_until(lambda: len(keys._failed) == 16 or len(read) == 20)
    assert not keys.ring_of([chunk("new")]).missing
    assert len(keys._retries) + keys._retrying == 16
    assert keys._retrying <= 4
    for tenant in bad:
        permits[tenant].release()
    await_ring(keys, *bad)
    end(keys)


def test_a_first_attempt_goes_before_retries_that_wait(keys_of, folder, gates, monkeypatch):
    monkeypatch.setattr(first_use_keys, "_MOST_THREADS", 2)
    monkeypatch.setattr(first_use_keys, "_MOST_RETRYING", 2)
    permits, read = gates
    keys = keys_of({"key": folder("bad1", "bad2", "bad3", "new")})
    bad = ["bad1", "bad2", "bad3"]
    for tenant in bad:
        permits[tenant] = threading.Semaphore(0)
    keys.ring_of([chunk(tenant) for tenant in bad])
    wait_until(lambda: len(keys._failed) == 3)
    keys.ring_of([chunk(tenant) for tenant in bad])
    wait_until(lambda: sorted(read[3:]) == ["bad1", "bad2"])
    assert keys.ring_of([chunk("new")]).missing
    permits["bad1"].release()
    await_ring(keys, "new")
    permits["bad3"].release()
    await_ring(keys, "bad3")
    assert read[5:] == ["new", "bad3"]
    permits["bad2"].release()
    end(keys)


def test_a_retry_has_a_thread_while_new_tenants_keep_coming(keys_of, folder, gates, monkeypatch):
    monkeypatch.setattr(first_use_keys, "_MOST_THREADS", 1)
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 0.0)
    permits, read = gates
    keys = keys_of({"key": folder("bad", "new1", "new2", "new3")})
    permits["new1"] = threading.Semaphore(0)
    keys.ring_of([chunk("bad")])
    wait_until(lambda: keys._failed)
    keys.ring_of([chunk("new1")])
    wait_until(lambda: "new1" in read)
    keys.ring_of([chunk(tenant) for tenant in ("new2", "bad", "new3")])
    permits["new1"].release()
    await_ring(keys, "bad", "new2", "new3")
    assert read == ["bad", "new1", "bad", "new3", "new2"], "new3 is the one used last"
    end(keys)


def test_names_that_are_made_up_push_out_no_key_and_no_pause(keys_of, folder, opened):
    keys = keys_of({"key": folder("good")}, pauses=(1e9, 1e9), most=2)
    keys.ring_of([chunk("good")])
    made_up = [f"m{number}" for number in range(8)]
    for _ in range(2):
        for tenant in made_up:
            assert keys.ring_of([chunk(tenant)]).missing
    assert not keys.ring_of([chunk("good")]).missing
    assert opened == ["good", *made_up]
    end(keys)


def test_failures_are_bounded_by_the_least_recently_used(keys_of, folder, opened, monkeypatch):
    monkeypatch.setattr(first_use_keys, "_MOST_FAILED", 2)
    keys = keys_of({"key": folder()}, pauses=(1e9, 1e9))
    for tenant in ("a", "b", "a", "c", "a", "b"):
        keys.ring_of([chunk(tenant)])
    assert opened == ["a", "b", "c", "b"]
    assert sorted(keys._failed) == ["a", "b"]
    end(keys)


def test_a_tenant_that_is_being_read_is_not_read_twice(keys_of, folder, gates, monkeypatch):
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 0.0)
    permits, read = gates
    keys = keys_of({"key": folder("a", "b", "c")}, most=1)
    permits["a"] = threading.Semaphore(0)
    keys.ring_of([chunk("a")])
    await_ring(keys, "b")
    await_ring(keys, "c")
    keys.ring_of([chunk("a")])
    await_ring(keys, "b")
    assert read.count("a") == 1
    permits["a"].release()
    await_ring(keys, "a")
    end(keys)


def test_one_key_for_several_tenants_is_a_line_of_the_log(keys_of, folder, namespace_key, tmp_path, log_lines):
    source = {"key": folder("blue", "red", "green", "white")}
    keys = keys_of(source, red={"key": {"file": str(tmp_path / "key" / "red.key")}})
    keys._ring.add("red", open_keys(keys._config, "test", "red"))
    files = {tenant: tmp_path / "key" / f"{tenant}.key" for tenant in ("blue", "red", "green", "white")}
    files["green"].write_bytes(files["red"].read_bytes())
    await_ring(keys, "blue", "green")
    assert "tenant 'green' and tenant 'red' have the same key" in log_lines("(1 so far)")
    files["white"].write_bytes(Path(namespace_key["file"]).read_bytes())
    await_ring(keys, "white")
    assert "tenant 'white' and requests without a tenant have the same key" in log_lines("(2 so far)")
    end(keys)
    printed = base64.b64encode(os.urandom(32)).decode()
    careless = keys_of({"key": {"command": ["echo", printed]}})
    await_ring(careless, "one")
    await_ring(careless, "two")
    assert "tenant 'two' and tenant 'one' have the same key" in log_lines("tenant 'two'")
    end(careless)


def test_a_prefix_is_looked_up_by_the_tenant_of_its_first_key(kit, folder, namespace_key, monkeypatch):
    asked = []

    def note(key):
        asked.append(key)
        return tenant_of(key)

    monkeypatch.setattr(first_use_keys, "tenant_of", note)
    monkeypatch.setattr(keyed_names, "tenant_of", note)
    store = kit.DictStore()
    tenants = {"*": {"key": folder("blue")}, "listed": {"key": folder()}}
    pool, events = kit.pool(store, encryption={"key": namespace_key, "tenants": tenants})
    assert not events.wait(Opened)[0].error
    for tenant in ("red", "blue"):
        asked.clear()
        pool.probe(1, [with_tenant(kit.key(number), tenant) for number in range(1000)], is_prefix=True)
        events.wait(Probed)
        assert not any(events.wait(Probed)[-1].answers)
        assert len(asked) < 10


def test_behind_a_flood_of_names_whose_files_hang_a_tenant_in_use_is_read_next_and_the_first_of_them_is_too(
    keys_of, folder, gates, monkeypatch
):
    permits, read = gates
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 0.0)
    flood = [f"flood{number}" for number in range(40)]
    keys = keys_of({"key": folder("good", *flood)})
    for tenant in flood:
        permits[tenant]
    for tenant in flood[:8]:
        keys.ring_of([chunk(tenant)])
    wait_until(lambda: len(read) == 8)
    for tenant in (*flood[8:24], "good", *flood[24:], "good"):  # which is in use; the others are not
        keys.ring_of([chunk(tenant)])
    for tenant in read[:2]:
        permits[tenant].release()
    await_ring(keys, "good")
    wait_until(lambda: len(read) >= 10)
    assert flood[8] in read[8:12]
    for tenant in flood:
        permits[tenant].release()
    await_ring(keys, *flood)
    end(keys)


@pytest.mark.parametrize(("names_a_second", "seconds"), [(20, 60), (100, 13), (500, 5)])
def test_while_a_flood_of_names_goes_on_a_tenant_used_each_second_has_its_turn(
    keys_of, monkeypatch, names_a_second, seconds
):
    """No threads and no clock: eight readers are simulated that each need 2 s, and the tenant is never used last."""
    monkeypatch.setattr(FirstUseKeys, "_start_thread", lambda keys: None)
    keys = keys_of({"key": {"command": ["true"]}}, pauses=(1e9, 1e9))
    began = 70 * names_a_second  # as many wait then as may
    reading = deque()
    for tick in range(began + seconds * names_a_second + 1):
        while reading and reading[0][0] <= tick:
            keys._fail(reading.popleft()[1], "no key")
        if tick >= began and (tick - began) % names_a_second == 0:
            keys.ring_of([chunk("good")])
        keys.ring_of([chunk(f"flood{tick}")])
        while len(reading) < 8 and keys._first:
            reading.append((tick + 2 * names_a_second, keys._take()))
            if reading[-1][1].tenant == "good":
                return
    pytest.fail(f"not read within {seconds} s")


def test_of_more_names_than_may_wait_the_one_used_longest_ago_is_left_out_until_its_next_use(
    keys_of, folder, gates, monkeypatch
):
    permits, read = gates
    monkeypatch.setattr(first_use_keys, "_WAIT_SECONDS", 0.0)
    hanging = [f"hanging{number}" for number in range(8)]
    waiting = [f"waiting{number}" for number in range(4)]
    keys = keys_of({"key": folder("good", *hanging, *waiting)})
    for tenant in hanging:
        permits[tenant]
        keys.ring_of([chunk(tenant)])
    wait_until(lambda: len(read) == 8)
    monkeypatch.setattr(first_use_keys, "_MOST_WAITING", 4)
    for tenant in (*waiting, "good"):
        keys.ring_of([chunk(tenant)])
    for tenant in hanging:
        permits[tenant].release()
    wait_until(lambda: keys.ring_of([chunk("good")]).of("good") is not None)
    wait_until(lambda: set(waiting[1:]) <= set(read))
    assert waiting[0] not in read
    await_ring(keys, waiting[0])
    end(keys)
