"""A request's keys: vLLM's block hashes, and what else decides the KV of this very request.

vLLM hashes an adapter's name and path, not its files. So the key of a request with an adapter is derived from vLLM's
hash and a digest of the files, that of a salted one from the hash and the salt, each with a tag of its own: whatever
an adapter is called, it never meets a salt, another adapter, or a request without either.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtiers.api import OffloadKey, make_offload_key

__all__ = ["REQUEST_KEY_FORMAT", "GroupKeys", "RequestKeys", "derive_hash"]

REQUEST_KEY_FORMAT = 1
"""Another number is another key: stored under an adapter or a salt, a value of another format is a miss."""
_ADAPTER, _SALT = (f"kvtiers {what} {REQUEST_KEY_FORMAT}\0".encode() for what in ("adapter", "salt"))
_GROUP_BYTES = 4  # vLLM's key ends with the number of its group


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """How one group's keys come about. ``index``: the group's place in the layout. ``whole_prefix``: full attention."""

    index: int
    hashes_per_chunk: int
    whole_prefix: bool


def derive_hash(block_hash: bytes, adapter: bytes, salt: str) -> bytes:
    """Return the hash for a request with this adapter (a digest of its files) and salt; empty: it has none."""
    if adapter:
        block_hash = hashlib.sha256(_ADAPTER + hashlib.sha256(adapter).digest() + block_hash).digest()
    if salt:
        block_hash = hashlib.sha256(_SALT + hashlib.sha256(salt.encode()).digest() + block_hash).digest()
    return block_hash


class RequestKeys:
    """One request's keys. ``groups``: by vLLM's number of each group. ``hashes``: vLLM's list, which grows."""

    def __init__(self, groups: Mapping[int, GroupKeys], hashes: Sequence[bytes], adapter: bytes, salt: str) -> None:
        self._groups = groups
        self._hashes = hashes
        self._adapter = adapter
        self._salt = salt
        self._own: dict[bytes, OffloadKey] = {}
        self._prefixes: dict[int, list[OffloadKey]] = {
            number: [] for number, group in groups.items() if group.whole_prefix
        }
        self._places: dict[OffloadKey, int] = {}

    def of(self, key: bytes) -> OffloadKey:
        """Return our key for one of vLLM's."""
        own = self._own.get(key)
        if own is None:
            group = self._groups[int.from_bytes(key[-_GROUP_BYTES:], "big")]
            derived = derive_hash(key[:-_GROUP_BYTES], self._adapter, self._salt)
            own = self._own[key] = make_offload_key(derived, group.index)
        return own

    def place(self, key: bytes) -> int | None:
        """Return how many chunks of its group precede this one; None if it is not looked up from the head on."""
        number = int.from_bytes(key[-_GROUP_BYTES:], "big")
        if number not in self._prefixes:
            return None
        self._follow(number)
        return self._places.get(self.of(key))

    def prefixes(self) -> Iterator[Sequence[OffloadKey]]:
        """Yield the keys so far of each group that is looked up from the head on."""
        for number, prefix in self._prefixes.items():
            self._follow(number)
            yield prefix

    def _follow(self, number: int) -> None:
        """Make the keys of what vLLM has hashed since."""
        prefix, every = self._prefixes[number], self._groups[number].hashes_per_chunk
        while (end := (len(prefix) + 1) * every) <= len(self._hashes):
            next_key = self.of(bytes(self._hashes[end - 1]) + number.to_bytes(_GROUP_BYTES, "big"))
            self._places[next_key] = len(prefix)
            prefix.append(next_key)

    def following(self, key: bytes, place: int) -> Sequence[OffloadKey]:
        """Return the keys of this one's group from this place on."""
        return self._prefixes[int.from_bytes(key[-_GROUP_BYTES:], "big")][place:]
