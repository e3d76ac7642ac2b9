"""Tenants with keys of their own: what one has is a miss for all others, its key alone gives it back, and it can go.

An engine's keys are here a ring (``ring_with``): number 1 is the namespace's, and tenants have those that are given.
"""

import base64
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.encryption.keyed import NAMES, key, ring

from kvtiers.api import ConfigError, make_offload_key
from kvtiers.api.keys import with_tenant
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import KeyRing
from kvtiers.encryption.seal import EncryptedSeal, decrypt_value, encrypt_value
from kvtiers.encryption.tenant_keys import TenantKeyReader
from kvtiers.host.messages import JobDone, Opened, Probed, Status, StoreJob
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.layout.seal import SealVerdict
from kvtiers.layout.storage_name import parse_name

DONE, MISSING, CORRUPT, REFUSED = Status.DONE, Status.MISSING, Status.CORRUPT, Status.REFUSED
FOREVER = {"give_up_at": float("inf")}


def ring_with(missing=(), **tenants):
    """The namespace's key, and those of tenants: a number, or a ring."""
    made = KeyRing(key(1), tenants=[*tenants, *missing])
    for tenant, own in tenants.items():
        made.add(tenant, own if isinstance(own, KeyRing) else ring(own))
    return made


@pytest.fixture(params=["DictStore", "BatchStore", "OneByOne"])
def store(kit, request):
    made = getattr(kit, request.param, kit.DictStore)()
    if request.param == "OneByOne":
        made.asks_one_by_one = True
    return made


@pytest.fixture
def engine(kit, store):
    """Make an engine's side of the store, with these keys."""

    def make(keys):
        options = MoverOptions([(kit.PAYLOAD, kit.VALUE)])
        return ValueMover(store, kit.rows.views, options, threading.Event(), EncryptedSeal("", keys))

    return make


@pytest.fixture
def of(kit):
    """The keys of the same two chunks as a tenant has them."""
    return lambda tenant: [with_tenant(kit.key(number), tenant) for number in range(2)]


def put(kit, engine, keys):
    for row, each in enumerate(keys):
        kit.rows.fill(row, each)
    return list(engine.store(kit.run(keys)).statuses)


def got(kit, engine, keys):
    """What a load says of each, after it has been compared with what the rows hold."""
    for row in range(len(keys)):
        kit.rows.poison(row)
    statuses = list(engine.load(kit.run(keys)).statuses)
    for row, status in enumerate(statuses):
        assert kit.rows.holds(row, keys[row]) if status == DONE else kit.rows.is_poisoned(row)
    return statuses


PARTIES = {"": 1, "blue": 2, "red": 3}


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=70), st.sampled_from([*PARTIES]), st.sampled_from([*PARTIES]), st.data())
def test_a_value_of_one_tenant_opens_under_no_other_name_and_no_other_key(block_hash, owner, other, data):
    names = KeyedNames.of_ring(NAMES, ring_with(blue=2, red=3))[0]
    own, foreign = (make_offload_key(block_hash, 0, tenant) for tenant in (owner, other))
    name, sealing = names.name(own), names.key_of(own)
    assert parse_name(name).key_id == sealing.id == key(PARTIES[owner]).id
    value = memoryview(bytearray(4096))
    encrypt_value([memoryview(block_hash)], value, name, NAMES.layout_id, sealing)
    sealed = bytes(value)
    for asked in {names.name(foreign), name}:
        for number in PARTIES.values():
            with_forged_id = bytearray(sealed)
            with_forged_id[-32:-28] = bytes.fromhex(key(number).id)
            for given_bytes in (sealed, bytes(with_forged_id)):
                value[:] = given_bytes
                verdict = decrypt_value(value, len(block_hash), asked, NAMES.layout_id, key(number))
                is_its_own = asked == name and number == PARTIES[owner]
                assert (verdict is SealVerdict.OK) == is_its_own
    value[:] = sealed
    value[data.draw(st.integers(0, 4095))] ^= data.draw(st.integers(1, 255))
    assert decrypt_value(value, len(block_hash), name, NAMES.layout_id, sealing) is not SealVerdict.OK


def test_each_tenant_has_its_own_key_and_the_others_that_of_the_namespace(kit, engine, store, of):
    ours = engine(ring_with(blue=2, red=3))
    numbers = {"": 1, "blue": 2, "red": 3, "green": 1}
    for tenant in numbers:
        assert put(kit, ours, of(tenant)) == [DONE] * 2
    ids = {(parse_name(name).tenant, parse_name(name).key_id) for name in store.values}
    assert ids == {(tenant, key(number).id) for tenant, number in numbers.items()}
    mixed = [each for tenant in numbers for each in of(tenant)]
    assert got(kit, ours, mixed) == [DONE] * 8
    assert ours.probe(NAMES, mixed, is_prefix=False, **FOREVER) == [True] * 8
    alone = engine(ring(2))
    assert got(kit, alone, of("blue")) == [DONE] * 2, "blue's own engine has its key as the only one"
    assert got(kit, alone, of("red")) == [MISSING] * 2
    assert set(ours.delete(kit.run(mixed)).statuses) == {DONE}
    assert not store.values


def test_engines_with_other_keys_neither_find_nor_read_a_tenant_s_values(kit, engine, store, of):
    assert put(kit, engine(ring_with(blue=2)), of("blue")) == [DONE] * 2
    theirs = dict(store.values)
    for keys in (ring(1), ring_with(blue=3), ring_with(red=2), ring_with(blue=ring(4, previous=1))):
        stranger = engine(keys)
        names = [names for names in KeyedNames.of_ring(NAMES, keys) if names.has_name(of("blue")[0])]
        assert not any(name in theirs for under_key in names for name in under_key.names(of("blue")))
        assert not any(stranger.probe(NAMES, of("blue"), is_prefix=True, **FOREVER))
        assert got(kit, stranger, of("blue")) == [MISSING] * 2
        for each, value in zip(of("blue"), theirs.values(), strict=True):
            store.values[names[0].name(each)] = value  # a store that gives it under the name that is asked for
        assert got(kit, stranger, of("blue")) == [CORRUPT] * 2
        store.values = dict(theirs)


def test_a_tenant_whose_key_is_gone_has_misses_and_no_other_one_has(kit, engine, store, of):
    before = engine(ring_with(blue=2, red=3))
    for tenant in ("", "blue", "red"):
        put(kit, before, of(tenant))
    there = dict(store.values)
    ours = ring_with(red=3, missing=["blue"])
    after = engine(ours)
    mixed = [*of("red"), *of("blue"), *of("")]
    assert got(kit, after, mixed) == [DONE] * 2 + [MISSING] * 2 + [DONE] * 2
    assert after.probe(NAMES, mixed, is_prefix=False, **FOREVER) == [True] * 2 + [False] * 2 + [True] * 2
    for asked in (of("blue"), [*of("red"), *of("blue")]):
        found = after.probe(NAMES, asked, is_prefix=True, **FOREVER)
        assert found == [True] * (len(asked) - 2) + [False]
    store.values.clear()
    kit.rows.fill(0, of("red")[0])
    moved = after.store(kit.run([of("red")[0], *of("blue")], overwrites=bytes([1, 1, 0])))
    assert (list(moved.statuses), moved.error) == (
        [DONE, REFUSED, REFUSED],
        "their tenant's key cannot be read; the log says why",
    )
    assert [parse_name(name).tenant for name in store.values] == ["red"], "and nothing under the namespace's key"
    assert list(after.delete(kit.run([*of("blue"), of("red")[0]])).statuses) == [REFUSED, REFUSED, DONE]
    store.values = there
    ours.add("blue", ring(2))
    assert got(kit, after, mixed) == [DONE] * 6, "its key has come"


def test_a_tenant_s_key_is_rotated_by_itself_and_may_first_have_been_the_namespace_s(kit, engine, store, of):
    put(kit, engine(ring(1)), of("blue"))
    put(kit, engine(ring_with(red=3)), of("red"))
    kit.rows.fill(0, of("")[0])
    rotating = engine(ring_with(blue=ring(2, previous=1), red=3))
    store.calls.clear()
    assert rotating.probe(NAMES, of("blue"), is_prefix=True, **FOREVER) == [True] * 2
    assert got(kit, rotating, of("blue")) == [DONE] * 2
    mixed = [*of("blue"), kit.key(9), with_tenant(kit.key(9), "red")]
    assert rotating.probe(NAMES, mixed, is_prefix=False, **FOREVER) == [True, True, False, False]
    store.calls.clear()
    assert got(kit, rotating, mixed[2:]) == [MISSING] * 2
    reads = [name for what, *names in store.calls if what == "read" for name in names]
    assert len(reads) == len(set(reads)) == 2, "only who has two keys is asked for twice"
    fresh = with_tenant(kit.key(5), "blue")
    assert put(kit, rotating, [fresh]) == [DONE]
    after = engine(ring_with(blue=2, red=3))
    assert got(kit, after, [fresh, *of("blue"), *of("red")]) == [DONE, MISSING, MISSING, DONE, DONE]
    assert set(rotating.delete(kit.run([fresh, *of("blue")])).statuses) == {DONE}
    assert {parse_name(name).tenant for name in store.values} == {"red"}


# -- a pool, which reads the keys


@pytest.fixture
def source(tmp_path):
    def make(name, raw=None):
        file = tmp_path / f"{name}.key"
        file.write_bytes(base64.b64encode(raw or os.urandom(32)))
        file.chmod(0o600)
        return {"file": str(file)}

    return make


def test_a_pool_is_open_for_all_but_the_tenant_whose_key_cannot_be_had_and_for_it_when_it_can(
    kit, source, tmp_path, of, log_lines
):
    file = tmp_path / "blue.key"
    kms = ["sh", "-c", f'test "$KVTIERS_NAMESPACE/$KVTIERS_TENANT" = test/blue && cat {file}']
    tenants = {"blue": {"key": {"command": kms}}, "red": {"key": source("red")}}
    store = kit.DictStore()
    pool, events = kit.pool(store, encryption={"key": source("all"), "tenants": tenants})
    [opened] = events.wait(Opened)
    assert not opened.error
    line = log_lines("is without this tier")
    assert "encryption.tenants.blue.key.command: 'sh' failed with exit status 1" in line
    assert "tenant 'blue' is without this tier until its key can be read, and no other one is" in line
    mixed = [*of("red"), *of("blue")]
    for row, each in enumerate(mixed):
        kit.rows.fill(row, each)
    pool.submit(StoreJob(1, is_load=False, keys=mixed, rows=range(4)))
    assert list(events.wait(JobDone)[0].statuses) == [DONE, DONE, REFUSED, REFUSED]
    source("blue.new")
    (tmp_path / "blue.new.key").rename(file)
    assert "tenant 'blue' has this tier now: key " in log_lines("has this tier now")
    pool.submit(StoreJob(2, is_load=False, keys=of("blue"), rows=[2, 3]))
    assert list(events.wait(JobDone, 2)[1].statuses) == [DONE] * 2
    pool.probe(3, mixed, is_prefix=False)
    assert list(events.wait(Probed)[0].answers) == [True] * 4
    assert len({parse_name(name).key_id for name in store.values}) == 2


@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_prefix_of_others_is_found_as_far_as_it_is_there_while_a_key_is_missing(kit, engine, of, held):
    ours = engine(ring_with(missing=["blue"]))
    keys = of("red")
    assert put(kit, ours, keys[:held]) == [DONE] * held
    found = ours.probe(NAMES, keys, is_prefix=True, **FOREVER)
    assert found == [True] * held + [False] * (len(found) - held)
    assert len(found) > held or held == len(keys)


def test_keys_at_hand_come_before_commands_and_after_its_end_none_is_read(source, monkeypatch):
    read = []

    def refuse(config, namespace, tenant):
        read.append(tenant)
        if len(read) == 6:
            reader.close()
        raise ConfigError("no key")

    monkeypatch.setattr("kvtiers.encryption.tenant_keys.open_keys", refuse)
    tenants = {name: {"key": {"command": ["false"]}} for name in "abc"} | {"here": {"key": source("here")}}
    config = EncryptionConfig.model_validate({"key": source("all"), "tenants": tenants})
    reader = TenantKeyReader(config, "test", ring_with(missing=tenants), "disk", (0.001, 0.001), threads=1)
    reader.read()
    for thread in threading.enumerate():
        if thread.name == "kvtiers-disk-keys":
            thread.join(60)
    assert read == ["here", "a", "b", "c", "here", "a"]


def test_a_tenant_whose_key_does_not_come_keeps_no_other_one_waiting(kit, source, tmp_path, of, log_lines):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    tenants = {"blue": {"key": {"command": ["cat", str(pipe)]}}}
    pool, events = kit.pool(kit.DictStore(), encryption={"key": source("all"), "tenants": tenants}, key_wait=0.01)
    assert not events.wait(Opened)[0].error, "while the command waits for who writes into the pipe"
    assert "1 of the 1 tenants that have their own" in log_lines("until their keys can be read")
    pool.submit(StoreJob(1, is_load=False, keys=of("red"), rows=range(2)))
    assert list(events.wait(JobDone)[0].statuses) == [DONE] * 2
    pipe.write_bytes(base64.b64encode(os.urandom(32)))
    assert "'blue'" in log_lines("has this tier now")


def test_the_same_key_of_two_is_one_line_in_the_log(kit, source, log_lines):
    raw = os.urandom(32)
    shared = {"blue": {"key": source("blue", raw)}, "red": {"key": source("red", raw)}}
    _, events = kit.pool(kit.DictStore(), encryption={"key": source("all"), "tenants": shared})
    assert not events.wait(Opened)[0].error
    assert "have the same key: with it, who can read one's values can read the other's" in log_lines("same key")
    line = log_lines("encrypted with keys of their own")
    assert base64.b64encode(raw).decode() not in line
    assert "'blue': key " in line
