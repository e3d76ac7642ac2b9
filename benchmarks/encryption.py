"""The cost of encryption beside the plain seal: in one thread, and through a tier, as an engine stores and loads.

Names are made as a host makes them for a run of chunks: plain, with the namespace's key, and with a tenant's own, of
tenants that the config lists and of those that it does not.

In memory a value's plain seal, its check, its encryption and its decryption take turns with a plain copy, over a region
much larger than the processor's caches. Through the tier (`fs` over files in memory, so that no disk is what is
measured; hosts and threads as by default) a plain tier and an encrypted one take turns with the same rows. Medians.
"""

import os
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lib.results import at_least, middle_share, options_of, say

from kvtiers.api import OffloadKey, TransferJob, make_offload_key
from kvtiers.api.units import format_size
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.first_use_keys import FirstUseKeys
from kvtiers.encryption.key_source import open_keys
from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import KeyRing
from kvtiers.encryption.seal import decrypt_value, encrypt_value
from kvtiers.layout.seal import SealVerdict, check_value, seal_value
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier
from kvtiers.region.memfd import Mapping, create_memfd, map_memory
from kvtiers.secondary.placement import HostedRegion, TierHosts
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.types import RequestContext
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
ROW_BYTES = 128 << 20
NAMES = StorageNames("bench/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))
SEAL = 64
# A cipher with AES instructions, over bytes that are in no cache, is some three times a copy's work.
GOAL_SHARE_OF_COPY = 0.3
# Of files in memory: a store over a network is slower than that, encrypted or not.
GOAL_SHARE = 0.3
# A prompt of 2,000 chunks is named in half of a request's wait for a lookup (20 ms).
GOAL_NAMES = 200_000
GOAL_OF_TENANTS = 0.7
TENANTS = 100
GOAL_FROM_BYTES = 256 << 10
PATIENCE = 120.0


def in_memory(region: memoryview, nbytes: int, rounds: int, names: KeyedNames) -> dict[str, float]:
    """Return GB/s of one thread, by what it does with values of this size."""
    values = [region[at : at + nbytes] for at in range(0, len(region) - nbytes + 1, nbytes)]
    payload, target = nbytes - SEAL, memoryview(bytearray(nbytes))
    plain, keyed = NAMES.name(bytes(36)), names.name(bytes(36))
    room = [memoryview(bytearray(nbytes)) for _ in range(max(1, (64 << 20) // nbytes))]

    def copy(value: memoryview, _out: memoryview) -> None:
        target[:] = value

    def seal(value: memoryview, _out: memoryview) -> None:
        seal_value(value, payload, plain, NAMES.layout_id)

    def check(value: memoryview, _out: memoryview) -> None:
        assert check_value(value, payload, plain, NAMES.layout_id) is SealVerdict.OK

    def encrypt(value: memoryview, out: memoryview) -> None:
        encrypt_value([value[:payload]], out, keyed, NAMES.layout_id, names.key)

    def decrypt(_value: memoryview, out: memoryview) -> None:
        assert decrypt_value(out, payload, keyed, NAMES.layout_id, names.key) is SealVerdict.OK

    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for work in (copy, seal, check, encrypt, decrypt):
            over = (
                list(zip(values, room, strict=False)) if work in {encrypt, decrypt} else [(v, target) for v in values]
            )
            begin = time.perf_counter()
            for value, out in over:
                work(value, out)
            taken = time.perf_counter() - begin
            rates.setdefault(work.__name__, []).append(len(over) * nbytes / 1e9 / taken)
    return {what: statistics.median(found) for what, found in rates.items()}


def names_per_second(folder: Path, rounds: int) -> dict[str, float]:
    """Return how many storage names one thread makes in a second, by whose key, and how many tenants' keys it opens."""
    (folder / "tenants").mkdir()
    tenants = [f"tenant-{number}" for number in range(TENANTS)]
    for tenant in tenants:
        (folder / "tenants" / tenant).write_bytes(os.urandom(32))
    sources: dict[str, Any] = {"key": {"file": str(folder / "kv.key")}}
    each_other = {"*": {"key": {"file": f"{folder}/tenants/{{tenant}}"}}}
    config = EncryptionConfig.model_validate(sources | {"tenants": each_other})
    begin = time.perf_counter()
    own = {tenant: open_keys(config, "bench", tenant) for tenant in tenants}
    made = {"opened": TENANTS / (time.perf_counter() - begin)}
    listed, unlisted = KeyRing(open_keys(config, "bench").current, tenants=tenants), open_keys(config, "bench")
    for tenant, ring in own.items():
        listed.add(tenant, ring)
    reader = FirstUseKeys(config, "bench", unlisted, "bench")
    for tenant in tenants:
        reader.ring_of([make_offload_key(b"first", 0, tenant)])
    rings: dict[str, Callable[[Sequence[OffloadKey]], Sequence[StorageNames]]] = {
        "plain": lambda _keys: [NAMES],
        "keyed": lambda _keys: KeyedNames.of_ring(NAMES, listed),
        "tenants": lambda _keys: KeyedNames.of_ring(NAMES, KeyRing(listed.current)),
        "listed tenants": lambda _keys: KeyedNames.of_ring(NAMES, listed),
        "other tenants": lambda keys: KeyedNames.of_ring(NAMES, reader.ring_of(keys)),
    }
    taken: dict[str, list[float]] = {}
    for turn in range(rounds):
        for what, names_of in rings.items():
            tenant = tenants[turn % TENANTS] if "tenants" in what else ""
            keys = [make_offload_key(os.urandom(32), 0, tenant) for _ in range(2000)]
            begin = time.perf_counter()
            names_of(keys)[0].names(keys)
            taken.setdefault(what, []).append(time.perf_counter() - begin)
    return made | {what: 2000 / statistics.median(times) for what, times in taken.items()}


class Lane:
    """One tier over files in memory, plain or encrypted, whose hosts map the rows."""

    def __init__(
        self, folder: Path, fd: int, nbytes: int, encryption: EncryptionConfig | None, stack: ExitStack
    ) -> None:
        keys = None if encryption is None else open_keys(encryption, "bench").current
        self._names = NAMES if keys is None else KeyedNames.of(NAMES, keys)
        config = FsConfig(type="fs", path=folder, capacity="64GiB", min_free=0, store_queue=1 << 20)
        region = HostedRegion(fd, ROW_BYTES, ROW_BYTES, nbytes, [(nbytes - SEAL, nbytes)])
        hosts = TierHosts(region, "bench", lambda: NAMES, is_awaited=True, encryption=encryption)
        stack.callback(hosts.close, 10.0)
        self._tier = ChunkStoreTier(config, hosts.pool(config, load_tier(config.type)))
        stack.callback(self._tier.close)
        assert not (problem := self._tier.wait_open(30.0)), problem
        self._store = FsStore(config)
        stack.callback(self._store.close)
        self._jobs = iter(range(1, 1 << 30))

    def rate(self, keys: Sequence[OffloadKey], *, load: bool) -> float:
        """Return the GB/s at which the rows are stored under these keys, or loaded."""
        rows = memoryview(array("i", range(len(keys))))
        job = TransferJob(next(self._jobs), keys, rows, is_promotion=load, context=RequestContext("bench"))
        begin = time.perf_counter()
        (self._tier.submit_load if load else self._tier.submit_store)(job)
        self._tier.on_schedule_end()
        while not (results := self._tier.get_finished_jobs()):
            assert time.perf_counter() - begin < PATIENCE, "the tier has not answered"
            time.sleep(0.0002)
        taken = time.perf_counter() - begin
        assert results[0].success, results
        return ROW_BYTES / 1e9 / taken

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Delete the values of these keys."""
        self._store.delete(self._names.names(keys))


def through_a_tier(folder: Path, nbytes: int, rounds: int, encryption: EncryptionConfig) -> dict[str, Any]:
    """Return GB/s of stores and loads, plain and encrypted, and the share that is left, turn by turn."""
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        fd = create_memfd("kvtiers-bench", ROW_BYTES)
        stack.callback(os.close, fd)
        rows = map_memory(fd, ROW_BYTES, ROW_BYTES)
        np.frombuffer(rows.view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, ROW_BYTES, np.uint8)
        lanes = {
            "plain": Lane(folder / f"plain-{nbytes}", fd, nbytes, None, stack),
            "encrypted": Lane(folder / f"encrypted-{nbytes}", fd, nbytes, encryption, stack),
        }
        for turn in range(rounds + 1):
            keys = [make_offload_key(os.urandom(32), 0) for _ in range(ROW_BYTES // nbytes)]
            for load in (False, True):
                for name, lane in lanes.items():
                    rate = lane.rate(keys, load=load)
                    if turn:  # the first one touches memory for the first time
                        rates.setdefault(f"{name} {'load' if load else 'store'}", []).append(rate)
            for lane in lanes.values():
                lane.remove(keys)
    share = {way: middle_share(rates[f"encrypted {way}"], rates[f"plain {way}"]) for way in ("store", "load")}
    return {"gb_per_s": {name: statistics.median(found) for name, found in rates.items()}, "share": share}


def results(*, quick: bool) -> dict[str, Any]:
    """Return the figures of all sizes, and the goals."""
    rounds = 3 if quick else 9
    total = (128 if quick else 512) << 20
    mapping = Mapping(-1, total, total)
    np.frombuffer(mapping.view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    folder = Path(tempfile.mkdtemp(prefix="kvtiers-bench-", dir="/dev/shm"))
    try:
        file = folder / "kv.key"
        file.write_bytes(os.urandom(32))
        file.chmod(0o600)
        encryption = EncryptionConfig.model_validate({"key": {"file": str(file)}})
        names = KeyedNames.of(NAMES, open_keys(encryption, "bench").current)
        made = names_per_second(folder, 5 * rounds)
        measure: Callable[[int], dict[str, Any]] = partial(through_a_tier, folder, rounds=rounds, encryption=encryption)
        sizes: list[dict[str, Any]] = [
            {"value_bytes": size, "one_thread": in_memory(mapping.view, size, rounds, names), "tier": measure(size)}
            for size in SIZES
        ]
    finally:
        shutil.rmtree(folder)
    large = [size for size in sizes if size["value_bytes"] >= GOAL_FROM_BYTES]
    what = f"values of {format_size(GOAL_FROM_BYTES)} and more"
    goals = [
        at_least(
            f"{way}, as a share of a copy's rate, {what}",
            min(size["one_thread"][way] / size["one_thread"]["copy"] for size in large),
            GOAL_SHARE_OF_COPY,
        )
        for way in ("encrypt", "decrypt")
    ]
    goals += [
        at_least(
            f"{way} through a tier, as a share of the plain seal's, {what}",
            min(size["tier"]["share"][way] for size in large),
            GOAL_SHARE,
        )
        for way in ("store", "load")
    ]
    goals.append(at_least("keyed names a second, of one thread", made["keyed"], GOAL_NAMES))
    share = made["other tenants"] / made["keyed"]
    goals.append(
        at_least("names with keys of tenants, as a share of those with the namespace's", share, GOAL_OF_TENANTS)
    )
    return {"processors": os.cpu_count(), "names_per_second": made, "sizes": sizes, "goals": goals}


def report(found: dict[str, Any]) -> None:
    """Print the figures as two tables."""
    print(f"GB/s; {found['processors']} processors")
    print("one thread    copy  plain seal   check   encrypt  decrypt")
    for size in found["sizes"]:
        rate = size["one_thread"]
        print(
            f"  {format_size(size['value_bytes']):8}{rate['copy']:8.2f}{rate['seal']:12.2f}{rate['check']:8.2f}"
            f"{rate['encrypt']:10.2f}{rate['decrypt']:9.2f}"
        )
    made = found["names_per_second"]
    print(
        f"names a second: {made['plain']:,.0f} plain, {made['keyed']:,.0f} keyed; of tenants: {made['tenants']:,.0f} "
        f"with the namespace's key, {made['listed tenants']:,.0f} with a listed one, {made['other tenants']:,.0f} with "
        f"one of '*'; such keys opened a second: {made['opened']:,.0f}"
    )
    print("through a tier   store: plain  encrypted  share   load: plain  encrypted  share")
    for size in found["sizes"]:
        rate, share = size["tier"]["gb_per_s"], size["tier"]["share"]
        print(
            f"  {format_size(size['value_bytes']):8}{rate['plain store']:19.2f}{rate['encrypted store']:11.2f}"
            f"{share['store']:7.2f}{rate['plain load']:14.2f}{rate['encrypted load']:11.2f}{share['load']:7.2f}"
        )


def main() -> None:
    options = options_of(__doc__, "a smaller region and fewer rounds").parse_args()
    say(results(quick=options.quick), report, as_json=options.json)


if __name__ == "__main__":
    main()
