"""Keys of tenants that the config does not list: read from files at a use, some cached, and never another one's."""

import base64
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.encryption.keyed import NAMES, key

from kvtiers.api import ConfigError, make_offload_key, tenant_of
from kvtiers.api.keys import with_tenant
from kvtiers.encryption import first_use_keys, key_source, keyed_names
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.first_use_keys import FirstUseKeys
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import KeyRing
from kvtiers.host.messages import JobDone, Opened, Probed, Status, StoreJob
from kvtiers.layout.storage_name import parse_name

DONE, MISSING, REFUSED = Status.DONE, Status.MISSING, Status.REFUSED


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
    def make(each_other, most=1024, **listed):
        sources = {"key": namespace_key, "tenants": listed | {"*": each_other}}
        config = EncryptionConfig.model_validate(sources)
        return FirstUseKeys(config, "test", open_keys(config, "test"), "disk", most)

    return make


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


def test_a_key_that_comes_later_is_read_at_the_next_use(keys_of, folder, log_lines):
    keys = keys_of({"key": folder()})
    for _ in range(3):
        assert keys.ring_of([chunk("blue")]).missing == {"blue"}
    assert "tenant 'blue' is without this tier until its key can be read" in log_lines("(2 so far)")
    folder("blue")
    ring = keys.ring_of([chunk("blue")])
    assert ids(ring, "blue") != ids(ring, "")


def test_what_is_listed_and_what_has_no_tenant_needs_no_reading(keys_of, folder, opened, namespace_key):
    keys = keys_of({"key": folder("blue")}, red={"key": namespace_key})
    assert keys.ring_of([chunk(""), chunk("red")]).missing == {"red"}, "which its own reader adds"
    assert opened == []
    assert keys.ring_of([chunk("blue"), chunk("blue", 2)]).missing == {"red"}
    assert opened == ["blue"]


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
    [names] = KeyedNames.of_ring(NAMES, of_a)
    assert names.has_name(chunk("a")), "also when it is forgotten"
    assert parse_name(names.name(chunk("a"))).key_id == ids(keys.ring_of([chunk("a")]), "a")[0]


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
            assert ids(keys.ring_of([chunk(tenant) for tenant in some]), *some) == [right[tenant] for tenant in some]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))


def test_a_previous_key_is_read_where_a_tenant_has_one(keys_of, folder, tmp_path):
    keys = keys_of({"key": folder("blue", "red"), "previous": folder("blue", kind="old")})
    ring = keys.ring_of([chunk("blue"), chunk("red")])
    assert [len(ring.of(tenant).all) for tenant in ("blue", "red")] == [2, 1]
    assert ring.has_two
    assert not keys.ring_of([chunk("red")]).has_two
    (tmp_path / "bad" / "blue.key").mkdir(parents=True)
    unreadable = keys_of({"key": folder("blue"), "previous": {"file": str(tmp_path / "bad" / "{tenant}.key")}})
    assert unreadable.ring_of([chunk("blue")]).missing == {"blue"}, "whether there is one is not known"


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


def test_names_that_are_made_up_push_out_no_key(keys_of, folder, opened):
    keys = keys_of({"key": folder("good")}, most=2)
    keys.ring_of([chunk("good")])
    made_up = [f"m{number}" for number in range(8)]
    for tenant in made_up:
        assert keys.ring_of([chunk(tenant)]).missing
    assert not keys.ring_of([chunk("good")]).missing
    assert opened == ["good", *made_up]


def test_a_key_that_is_another_s_is_a_line_of_the_log(keys_of, folder, namespace_key, tmp_path, log_lines):
    source = {"key": folder("red", "green", "white")}
    keys = keys_of(source, red={"key": {"file": str(tmp_path / "key" / "red.key")}})
    keys._ring.add("red", open_keys(keys._config, "test", "red"))
    files = {tenant: tmp_path / "key" / f"{tenant}.key" for tenant in ("red", "green", "white")}
    files["green"].write_bytes(files["red"].read_bytes())
    keys.ring_of([chunk("green")])
    assert "tenant 'green' and tenant 'red' have the same key" in log_lines("(1 so far)")
    files["white"].write_bytes(Path(namespace_key["file"]).read_bytes())
    keys.ring_of([chunk("white")])
    assert "tenant 'white' and requests without a tenant have the same key" in log_lines("(2 so far)")


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
