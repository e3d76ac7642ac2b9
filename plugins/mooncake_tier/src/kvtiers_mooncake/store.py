"""The store of the tier type ``mooncake``: an object a value, in the memory of the machines that form the pool.

Values move between the registered rows and the segments without a copy, several in a call.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, ClassVar

from kvtiers.api import ChunkStore, Finding, NotKept, StoreEntry, TierUnavailable
from kvtiers_mooncake.changes import Changes
from kvtiers_mooncake.client import DirectoryLock, MasterWatch, load_library, own_address, start_client
from kvtiers_mooncake.codes import ABSENT, NO_ROOM, SUPERSEDED, UNREACHABLE, Code, failure, unavailable
from kvtiers_mooncake.config import FIGURES, MooncakeConfig
from kvtiers_mooncake.listing import list_values
from kvtiers_mooncake.memory import RegisteredMemory

__all__ = ["MooncakeStore"]

# The master goes on listing what lay on a lost machine for its client_ttl (10 s): each lookup would lead to a load that
# misses. Half of that, since another machine may write the value again meanwhile: it is to be found soon then.
_UNREACHABLE_SECONDS = 5.0
_MOST_UNREACHABLE = 65_536
_NO_ROOM = "the pool has no room: its segments are full of values in use, or no process has one ('segment')"


class MooncakeStore(ChunkStore):
    """Values in Mooncake Store. Opening it starts a client, which contributes a segment if that is configured.

    ``region`` is registered with the transport for as long as the store is open.
    """

    transient_errors: ClassVar[tuple[type[Exception], ...]] = (ConnectionError, TimeoutError, TierUnavailable)
    batch_values = 32

    def __init__(
        self,
        config: MooncakeConfig,
        *,
        region: memoryview,
        read_only: bool = False,
    ) -> None:
        self._config = config
        self._read_only = read_only
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._unreachable: dict[str, float] = {}
        self._watch = MasterWatch(config)
        library = load_library(config)
        self.hostname = own_address(config)
        """The address by which other machines reach this client."""
        self._watch.reach()
        self._directory = DirectoryLock(config.offload) if config.offload is not None else None
        try:
            self._client = start_client(config, library, self.hostname)
        except BaseException:
            self._release_directory()
            raise
        try:
            self._memory = RegisteredMemory(
                region, self._client.register_buffer, self._client.unregister_buffer, direct=config.protocol == "tcp"
            )
            replicate = _replicate(config, library, self._client.get_hostname())
            self._changes = Changes(self._client, self._memory, replicate, self._answers)
        except BaseException:
            self._client.close()
            self._release_directory()
            raise

    # -- values

    def read_into(self, name: str, dst: memoryview) -> int:
        """Read the value into the start of ``dst``."""
        return self.read_many_into([name], [[dst]])[0]

    def read_many_into(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]]) -> list[int]:
        """Get all values with one call of the library, each into the start of its views.

        A value whose machine is lost is absent, whatever the master says of it.
        """
        if not names:
            return []
        self._watch.before_call()
        sizes = [sum(map(len, views)) for views in dsts]
        addresses, bring = self._memory.places(dsts, filled=False)
        codes = self._answers("get", self._client.batch_get_into([*names], addresses, sizes))
        lengths = [self._length(name, code, size) for name, code, size in zip(names, codes, sizes, strict=True)]
        for index, length in enumerate(lengths):
            if length:
                bring(index)
        return lengths

    def _length(self, name: str, code: int, size: int) -> int:
        """Return the length of the value that a read brought; ``code``: that as stored, or why there is none."""
        if 0 < code <= size:  # the library takes a buffer that is too large, and leaves the rest of it as it was
            return code
        if code >= 0:
            self._count("wrong_lengths")
        elif code == Code.INVALID_PARAMS and self._client.get_size(name) != size:
            self._count("wrong_lengths")  # a buffer that is too small
        elif code in UNREACHABLE:
            self._count("unreachable_values")
            self._remember_unreachable(name)
        elif code == Code.LEASE_EXPIRED:
            self._count("expired_reads")  # what was read may be another value's by now
        elif code not in ABSENT:
            raise failure("get", code)
        return 0

    def write(self, name: str, src: memoryview) -> None:
        """Put the value. NotKept if the pool has no room for it now."""
        [refusal] = self.write_many([name], [[src]])
        if refusal is not None:
            raise refusal

    def write_many(self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> list[NotKept | None]:
        """Put all values with one call of the library, each in place of an older one.

        NotKept where the pool had no room, or where no machine that the master chose could be reached.
        """
        if len(set(names)) < len(names):  # the later one is to stay
            return [self.write_many([name], [src])[0] for name, src in zip(names, srcs, strict=True)]
        if not names:
            return []
        self._watch.before_call()
        addresses, _ = self._memory.places(srcs, filled=True)
        codes = self._changes.put([*names], addresses, [sum(map(len, views)) for views in srcs])
        unreachable = sum(code in UNREACHABLE for code in codes)
        self._count("unreachable_values", unreachable)
        if unreachable == len(names):
            raise ConnectionError("no segment of the pool that the master chose can be reached")
        return [self._refusal(name, code) for name, code in zip(names, codes, strict=True)]

    def _refusal(self, name: str, code: int) -> NotKept | None:
        if code in NO_ROOM:
            self._count("dropped_values")
            return NotKept(_NO_ROOM)
        if code in UNREACHABLE:
            return NotKept("no segment that the master chose for it can be reached", full=False)
        if code and code not in SUPERSEDED:
            raise failure("put", code)
        with self._lock:
            self._unreachable.pop(name, None)
        return None

    def _answers(self, call: str, codes: Sequence[int]) -> list[int]:
        """Return the codes of a call; TierUnavailable if the master was not there for it."""
        if any(code in {Code.RPC_FAILED, Code.RPC_TIMEOUT} for code in codes):
            self._watch.failed()
            lost = next(code for code in codes if code in {Code.RPC_FAILED, Code.RPC_TIMEOUT})
            raise unavailable(call, lost, self._config.master_address)
        self._watch.succeeded()
        return [*codes]

    # -- names

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Ask the master for all at once; what could not be read just now is absent all the same."""
        if not names:
            return []
        self._watch.before_call()
        codes = self._answers("exists", self._client.batch_is_exist([*names]))
        now = time.monotonic()
        with self._lock:
            return [
                self._is_listed(code) and self._unreachable.get(name, 0.0) <= now
                for name, code in zip(names, codes, strict=True)
            ]

    def _is_listed(self, code: int) -> bool:
        if code < 0 and code not in ABSENT:
            raise failure("exists", code)
        return code == 1

    def delete(self, names: Sequence[str]) -> None:
        """Remove the values, also those that are being read."""
        if not names:
            return
        self._watch.before_call()
        self._changes.remove([*names])

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """Yield what the master lists, by its HTTP server; nothing of it counts as read."""
        return list_values(self._config, prefix)

    # -- the rest

    def diagnose(self, value_bytes: int) -> Sequence[Finding]:
        """Examine the master, the pool, the transport and the limits of this process."""
        # Imported here: only `kvtiers check` asks.
        from kvtiers_mooncake.diagnosis import diagnose

        return diagnose(self, self._config, value_bytes, self._memory.region_bytes, read_only=self._read_only)

    def stats(self) -> Mapping[str, float]:
        """Return the counts since the store was opened; asks neither master nor segments."""
        names = (*FIGURES,)
        with self._lock:
            counts = {name: float(self._counts[name]) for name in names}
        return counts | {
            "segment_bytes": float(self._config.segment),
            "copied_values": float(self._memory.copied),
            "removed_in_use": float(self._changes.removed_in_use),
        }

    def close(self) -> None:
        """Leave the pool: what lay in this process's own segment is lost."""
        self._memory.close()
        self._client.close()
        self._release_directory()

    def _release_directory(self) -> None:
        if self._directory is not None:
            self._directory.release()
            self._directory = None

    def _count(self, figure: str, by: int = 1) -> None:
        if by:
            with self._lock:
                self._counts[figure] += by

    def _remember_unreachable(self, name: str) -> None:
        with self._lock:
            self._unreachable.pop(name, None)
            self._unreachable[name] = time.monotonic() + _UNREACHABLE_SECONDS
            while len(self._unreachable) > _MOST_UNREACHABLE:
                del self._unreachable[next(iter(self._unreachable))]


def _replicate(config: MooncakeConfig, library: Any, segment: str) -> Any:
    """Return how values are written: copies, pins and places. ``segment``: the name of this process's own."""
    replicate = library.ReplicateConfig()
    replicate.replica_num = config.replicas
    if config.prefer_local:
        replicate.preferred_segment = segment
    replicate.data_type = library.ObjectDataType.KVCACHE
    if config.soft_pin is not None:
        replicate.soft_pin_action = library.SoftPinAction.ENABLE
        replicate.soft_pin_ttl_ms = round(config.soft_pin * 1e3)
    return replicate
