"""Encrypted values between rows and a store: what leaves, what comes back, under two keys, and from a hostile store."""

import hashlib
import random
import struct
import threading

import pytest
from tests.unit.encryption.keyed import random_key, ring

from kvtiers.api.keys import with_tenant
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import KeyRing, SealingKey, token_of
from kvtiers.encryption.seal import EncryptedSeal, encrypt_value
from kvtiers.host.messages import JobDone, Opened, Status, StoreJob
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.layout.seal import seal_value
from kvtiers.layout.storage_name import StorageNames, parse_name

DONE, MISSING, CORRUPT, PRESENT = Status.DONE, Status.MISSING, Status.CORRUPT, Status.PRESENT
FORGERIES = 10_000


@pytest.fixture
def pieces(kit):
    class Pieces(kit.DictStore):
        def reads_in_pieces(self, nbytes):
            return True

        def read_pieces(self, name, nbytes):
            value = self.values.get(name)
            return None if value is None or len(value) != nbytes else [value[:1000], value[1000:4050], value[4050:]]

    return Pieces


@pytest.fixture(params=["DictStore", "BatchStore", "Pieces", "OneByOne"])
def store(kit, request, pieces):
    if request.param == "Pieces":
        return pieces()
    made = getattr(kit, request.param, kit.DictStore)()
    if request.param == "OneByOne":
        made.asks_one_by_one = True
    return made


@pytest.fixture
def mover(kit):
    def make(store, keys, **options):
        options = MoverOptions([(kit.PAYLOAD, kit.VALUE)], **options)
        return ValueMover(store, kit.rows.views, options, threading.Event(), keys and EncryptedSeal("", keys))

    return make


def fill(kit, keys):
    for row, key in enumerate(keys):
        kit.rows.fill(row, key)


def poison(kit, keys):
    for row in range(len(keys)):
        kit.rows.poison(row)


def stored(kit, mover, store, keys, live):
    made = mover(store, live)
    fill(kit, keys)
    assert set(made.store(kit.run(keys)).statuses) == {DONE}
    return made


def test_what_was_stored_comes_back_and_the_rows_stay_in_clear(kit, store, keys, mover):
    made = stored(kit, mover, store, keys, ring())
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys)), "another tier may be reading them"
    poison(kit, keys)
    moved = made.load(kit.run(keys))
    assert set(moved.statuses) == {DONE}
    assert moved.nbytes == len(keys) * kit.VALUE
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))


def test_no_byte_of_a_payload_and_no_hash_of_a_prompt_leaves(kit, store, mover):
    keys = [random_key() for _ in range(4)]
    made = stored(kit, mover, store, keys, ring())
    made.probe(kit.NAMES, keys, is_prefix=True, give_up_at=float("inf"))
    made.load(kit.run(keys))
    assert sorted(store.values) == sorted(KeyedNames.of(kit.NAMES, ring().current).names(keys))
    seen = b"".join(store.values.values()).hex() + repr((store.calls, [*store.values]))
    for key in keys:
        for hidden in (key, hashlib.sha256(key).digest(), token_of(key)):
            assert not any(hidden[at : at + 6].hex() in seen for at in range(len(hidden) - 5))


def test_values_are_found_stored_and_deleted_by_their_keyed_names(kit, store, keys, mover):
    made = stored(kit, mover, store, keys[:2], ring())
    probe = {"is_prefix": True, "give_up_at": float("inf")}
    assert made.probe(kit.NAMES, keys, **probe)[:3] == [True, True, False]
    assert list(mover(store, ring()).store(kit.run(keys[:2])).statuses) in ([PRESENT] * 2, [DONE] * 2)
    assert set(made.delete(kit.run(keys[:1])).statuses) == {DONE}
    assert made.probe(kit.NAMES, keys, **probe)[0] is False
    assert len(store.values) == 1


def test_values_of_tenants_stand_under_their_names_and_are_each_their_own(kit, store, keys, mover):
    blue, red = ([with_tenant(key, tenant) for key in keys[:2]] for tenant in ("blue", "red"))
    made = stored(kit, mover, store, blue, ring())
    assert all(name.startswith("test/t-blue/") for name in store.values)
    poison(kit, blue)
    assert set(made.load(kit.run(red)).statuses) == {MISSING}
    names = KeyedNames.of(kit.NAMES, ring().current)
    store.values[names.name(red[0])] = store.values[names.name(blue[0])]
    assert list(made.load(kit.run(red)).statuses) == [CORRUPT, MISSING], "a value of another tenant's name"
    assert set(made.load(kit.run(blue)).statuses) == {DONE}
    assert all(kit.rows.holds(row, key) for row, key in enumerate(blue))


def test_while_two_keys_live_values_of_both_are_found_and_the_newer_one_is_written(kit, store, keys, mover):
    stored(kit, mover, store, keys[:3], ring(1))
    rotated = mover(store, ring(2, previous=1))
    for is_prefix in (True, False):
        found = rotated.probe(kit.NAMES, keys, is_prefix=is_prefix, give_up_at=float("inf"))
        assert found == [True, True, True, False]
    kit.rows.fill(0, keys[3])
    assert rotated.store(kit.run(keys[3:])).statuses[0] == DONE
    poison(kit, keys)
    assert set(rotated.load(kit.run(keys)).statuses) == {DONE}
    assert all(kit.rows.holds(row, key) for row, key in enumerate(keys))
    ids = sorted(parse_name(name).key_id for name in store.values)
    assert ids == sorted([ring(1).current.id] * 3 + [ring(2).current.id])
    poison(kit, keys)
    after = mover(store, ring(2))
    assert list(after.load(kit.run(keys)).statuses) == [MISSING, MISSING, MISSING, DONE], "the old key is gone"
    assert set(rotated.delete(kit.run(keys)).statuses) == {DONE}
    assert not store.values, "under both names"


def test_a_plainly_sealed_value_is_never_accepted_and_an_encrypted_one_not_without_its_key(kit, store, keys, mover):
    plain = mover(store, None)
    fill(kit, keys)
    assert set(plain.store(kit.run(keys)).statuses) == {DONE}
    under_keyed = KeyedNames.of(kit.NAMES, ring().current)
    for key in keys:
        value = memoryview(bytearray(kit.payload(key).ljust(kit.VALUE, b"\0")))
        seal_value(value, kit.PAYLOAD, under_keyed.name(key), kit.NAMES.layout_id)
        store.values[under_keyed.name(key)] = bytes(value)
    poison(kit, keys)
    assert set(mover(store, ring()).load(kit.run(keys)).statuses) == {MISSING}
    assert set(mover(store, ring(2)).load(kit.run(keys)).statuses) == {MISSING}
    assert all(kit.rows.is_poisoned(row) for row in range(len(keys)))
    assert set(plain.load(kit.run(keys)).statuses) == {DONE}, "as they are, without encryption"


def test_after_a_bump_encrypted_values_have_other_names_and_seals(kit, keys, mover):
    store = kit.DictStore()
    stored(kit, mover, store, keys, ring())
    options = MoverOptions([(kit.PAYLOAD, kit.VALUE)])
    seal = EncryptedSeal("0123456789abcdef", ring())
    bumped = ValueMover(store, kit.rows.views, options, threading.Event(), seal)
    assert set(bumped.load(kit.run(keys)).statuses) == {MISSING}
    assert set(bumped.store(kit.run(keys)).statuses) == {DONE}
    assert set(bumped.load(kit.run(keys)).statuses) == {DONE}
    assert len({parse_name(name).fingerprint for name in store.values}) == 2


# -- a hostile store


class Hostile:
    """Makes forgeries: an attacker without a live key who has all values that were ever stored, and makes others."""

    def __init__(self, kit, keys, live, seed):
        self.kit = kit
        self.random = random.Random(seed)
        self.names = [KeyedNames.of(kit.NAMES, key) for key in live.all]
        # A key of its own; a retired one; a live one for another namespace; values of another model.
        stranger, retired, elsewhere = SealingKey(b"s" * 31 + b"t", "test"), ring(9).current, ring_of("other", 1)
        other_model = StorageNames("test/model-" + "f" * 24 + "/", bytes.fromhex("f" * 16))
        self.live = {
            name: self.encrypted(names, key) for names in self.names for key in keys for name in [names.name(key)]
        }
        self.old = [
            self.encrypted(names, key)
            for key in keys
            for names in (
                KeyedNames.of(kit.NAMES, stranger),
                KeyedNames.of(kit.NAMES, retired),
                KeyedNames.of(kit.NAMES, elsewhere),
                KeyedNames.of(other_model, live.current),
            )
        ]
        self.stranger = stranger
        self.kinds = [
            self.flipped, self.flipped_in_the_seal, self.swapped, self.of_another_key, self.resealed, self.plain,
            self.plain_with_this_seal, self.spliced, self.with_seal_of_another, self.with_fields_changed, self.cut,
            self.extended, self.rubbish, self.shifted,
        ]  # fmt: skip

    def encrypted(self, names, key, payload=None, name=None):
        value = memoryview(bytearray(self.kit.VALUE))
        payload = memoryview(payload if payload is not None else self.kit.payload(key))
        encrypt_value([payload], value, name or names.name(key), names.layout_id, names.key)
        return bytes(value)

    def forge(self, name):
        """Return what the store gives instead of this name's value."""
        forged = self.random.choice(self.kinds)(name, bytearray(self.live[name]))
        return forged if forged != self.live[name] else self.flipped(name, bytearray(self.live[name]))

    def other(self, name):
        return self.random.choice([value for other, value in self.live.items() if other != name])

    def flip(self, value, first, last):
        for _ in range(self.random.choice([1, 1, 1, 2, 30])):
            value[self.random.randrange(first, last)] ^= 1 << self.random.randrange(8)
        return bytes(value)

    def flipped(self, name, value):
        return self.flip(value, 0, self.kit.VALUE)

    def flipped_in_the_seal(self, name, value):
        return self.flip(value, self.kit.PAYLOAD, self.kit.VALUE)

    def swapped(self, name, value):
        return self.other(name)

    def of_another_key(self, name, value):
        return self.random.choice(self.old)

    def resealed(self, name, value):
        """With a key of its own, under this very name, and the key id that is asked for."""
        names = KeyedNames.of(self.kit.NAMES, self.stranger)
        forged = bytearray(self.encrypted(names, b"", bytes(self.kit.PAYLOAD), name))
        forged[-32:-28] = value[-32:-28]
        return bytes(forged)

    def plain(self, name, value):
        value[: self.kit.PAYLOAD] = self.random.randbytes(self.kit.PAYLOAD)
        seal_value(memoryview(value), self.kit.PAYLOAD, name, self.kit.NAMES.layout_id)
        return bytes(value)

    def plain_with_this_seal(self, name, value):
        return bytes(self.kit.PAYLOAD) + bytes(value[self.kit.PAYLOAD :])

    def spliced(self, name, value):
        at = self.random.randrange(1, self.kit.VALUE)
        return bytes(value[:at]) + self.other(name)[at:]

    def with_seal_of_another(self, name, value):
        first, last = self.random.choice([(-64, -28), (-28, -16), (-16, self.kit.VALUE), (-28, self.kit.VALUE)])
        value[first:last] = self.other(name)[first:last]
        return bytes(value)

    def with_fields_changed(self, name, value):
        at, form = self.random.choice([(8, "<I"), (12, "<I"), (16, "<Q")])
        struct.pack_into(form, value, self.kit.VALUE - 64 + at, self.random.choice([0, 1, 2, 3, 64, 96, 4096, 2**31]))
        return bytes(value)

    def cut(self, name, value):
        return bytes(value[self.random.randrange(1, self.kit.VALUE) :])

    def extended(self, name, value):
        return bytes(value) + self.random.randbytes(self.random.randrange(1, 5000))

    def rubbish(self, name, value):
        return self.random.choice(
            [bytes(self.kit.VALUE), b"\xff" * self.kit.VALUE, self.random.randbytes(self.kit.VALUE)]
        )

    def shifted(self, name, value):
        by = self.random.randrange(1, self.kit.PAYLOAD)
        return bytes(value[by : self.kit.PAYLOAD] + value[:by] + value[self.kit.PAYLOAD :])


def ring_of(scope, number):
    return SealingKey(bytes([number]) * 31 + b"\0", scope)


def test_of_ten_thousand_forgeries_none_is_accepted(kit, mover):
    """Also not in part: no byte of one reaches a row. What is cut or extended reaches us at a value's length, too."""

    class Store(kit.DictStore):
        def read_into(self, name, dst):
            forged = self.values.get(name)
            if forged is None:
                return 0
            dst[:] = forged[-len(dst) :].ljust(len(dst), b"\0")
            return len(dst)

        def delete(self, names):
            """Keep them: it is hostile."""

    keys = [kit.key(number) for number in range(16)]
    live = ring(1, previous=2)
    hostile, store = Hostile(kit, keys, live, seed=20261127), Store()
    made = mover(store, live)
    forged = accepted = 0
    while forged < FORGERIES:
        for names in hostile.names:
            store.values = {name: hostile.forge(name) for name in names.names(keys)}
            statuses = made.load(kit.run(keys)).statuses
            forged += len(keys)
            accepted += statuses.count(DONE)
            assert not accepted, [hex(status) for status in statuses]
    assert forged >= FORGERIES
    assert all(kit.rows.is_poisoned(row) for row in range(len(keys)))
    store.values = {name: hostile.live[name] for name in hostile.names[0].names(keys)}
    assert set(made.load(kit.run(keys)).statuses) == {DONE}, "the control: the very values are accepted"


# -- a pool, which reads the keys


def test_a_pool_whose_key_cannot_be_had_says_so_in_one_line_and_opens_when_it_can(kit, tmp_path, keys, log_lines):
    file, opened = tmp_path / "kv.key", []
    store = kit.DictStore()
    pool, events = kit.pool(lambda: opened.append(1) or store, encryption={"key": {"file": str(file)}})
    [first] = events.wait(Opened)[:1]
    assert first.error == f"encryption.key.file: cannot read {str(file)!r}: No such file or directory"
    assert not opened, "the store is not touched before there is a key"
    file.write_bytes(bytes(range(200, 232)))
    file.chmod(0o644)
    events.wait(Opened, having=lambda event: not event.error)
    assert "encrypted: key " in log_lines("encrypted: key ")
    assert f"can read {file} (mode 0644); chmod 600 it" in log_lines("every user of this machine")
    fill(kit, keys)
    pool.submit(StoreJob(1, is_load=False, keys=keys, rows=range(len(keys))))
    assert set(events.wait(JobDone)[0].statuses) == {DONE}
    assert all(parse_name(name).key_id for name in store.values)


def test_two_live_keys_are_never_the_same():
    with pytest.raises(Exception, match="the same key"):
        KeyRing(ring().current, ring().current)
