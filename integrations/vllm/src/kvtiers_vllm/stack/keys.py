"""A request's keys: vLLM's block hashes, combined with its adapter and its salt, and its tenant.

vLLM hashes an adapter's name and path, not its files. So the key of a request with an adapter is derived from vLLM's
hash and a digest of the files, that of a salted one from the hash and the salt, each with a tag of its own: under any
name, an adapter never has the keys of a salt, of another adapter, or of a request without either.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtiers.api import OffloadKey, make_offload_key
from kvtiers.types import PromptGroup

__all__ = ["REQUEST_KEY_FORMAT", "GroupKeys", "RequestKeys", "derive_hash", "digest_of"]

REQUEST_KEY_FORMAT = 1
"""Another number is another key: stored under an adapter or a salt, a value of another format is a miss."""
_ADAPTER, _SALT = (f"kvtiers {what} {REQUEST_KEY_FORMAT}\0".encode() for what in ("adapter", "salt"))
_GROUP_BYTES = 4  # vLLM's key ends with the number of its group


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """How one group's keys are made. ``index``: the group's place in the layout. ``whole_prefix``: full attention.

    ``window``: how many tokens before a position are read there, 0 for full attention; ``ahead``: how many chunks
    behind a load have to be present, of a group of speculative decoding.
    """

    index: int
    hashes_per_chunk: int
    whole_prefix: bool
    hashes_per_block: int = 1
    window: int = 0
    tokens_per_chunk: int = 0
    ahead: int = 0


def derive_hash(block_hash: bytes, adapter: bytes, salt: bytes) -> bytes:
    """Return the hash for a request with this adapter and salt, each by its ``digest_of``; empty: it has none."""
    if adapter:
        block_hash = hashlib.sha256(_ADAPTER + adapter + block_hash).digest()
    if salt:
        block_hash = hashlib.sha256(_SALT + salt + block_hash).digest()
    return block_hash


def digest_of(what: bytes | str) -> bytes:
    """Return what stands for an adapter (a digest of its files) or a salt in each hash; empty: there is none.

    Of a salt once a request: a client writes it, and it may have megabytes, and halves of surrogate pairs.
    """
    data = what if isinstance(what, bytes) else what.encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).digest() if data else b""


class RequestKeys:
    """One request's keys. ``groups``: by vLLM's number of each group. ``hashes``: vLLM's list, which grows.

    A request with neither adapter, salt nor tenant has vLLM's own keys where its groups have the same numbers as the
    layout's: then no key is derived, and a prompt of a thousand chunks costs a tenth of a millisecond.
    """

    def __init__(
        self, groups: Mapping[int, GroupKeys], hashes: Sequence[bytes], adapter: bytes, salt: str, tenant: str = ""
    ) -> None:
        self._groups = groups
        self._tenant = tenant
        self._hashes = hashes
        self._known: set[bytes] = set()
        """The first ``_read`` hashes of vLLM's list, as they were read; ``_newest``: the last of them."""
        self._read = 0
        self._newest = b""
        self._adapter = digest_of(adapter)
        self._salt = digest_of(salt)
        self._is_plain = not (adapter or salt or tenant) and all(
            number == group.index for number, group in groups.items()
        )
        self._own: dict[bytes, OffloadKey] = {}
        self._prefixes: dict[int, list[OffloadKey]] = {number: [] for number in groups}
        self._asked = [
            PromptGroup(self._prefixes[number], group.window, group.ahead) for number, group in groups.items()
        ]
        self._shown: dict[int, list[bytes]] = {number: [] for number in self._prefixes}
        """vLLM's keys of the same chunks."""
        self._places: dict[bytes, int] = {}
        """By vLLM's key."""

    def still_hold(self) -> bool:
        """Return whether vLLM's list still begins with what was read of it, and read what it has got since.

        A hash covers all tokens before it, so the last one stands for all.
        """
        hashes, read = self._hashes, self._read
        if len(hashes) < read or (read and hashes[read - 1] != self._newest):
            return False
        if len(hashes) > read:
            self._known.update(hashes[read:])
            self._read, self._newest = len(hashes), hashes[-1]
        return True

    def are_all_of(self, keys: Collection[bytes]) -> bool:
        """Return whether each of these keys of vLLM's is that of a block as vLLM hashes it now."""
        return self.still_hold() and all(key[:-_GROUP_BYTES] in self._known for key in keys)

    def of(self, key: bytes) -> OffloadKey:
        """Return kvtiers' key for one of vLLM's."""
        if self._is_plain:
            return key
        own = self._own.get(key)
        if own is None:
            group = self._groups[int.from_bytes(key[-_GROUP_BYTES:], "big")]
            derived = derive_hash(key[:-_GROUP_BYTES], self._adapter, self._salt)
            own = self._own[key] = make_offload_key(derived, group.index, self._tenant)
        return own

    def of_all(self, keys: Collection[bytes]) -> list[OffloadKey]:
        """Return kvtiers' keys for these of vLLM's."""
        return list(keys) if self._is_plain else [self.of(key) for key in keys]

    def place(self, key: bytes) -> int | None:
        """Return how many chunks of its group precede this one; None if it is no chunk of whole blocks."""
        self._follow(int.from_bytes(key[-_GROUP_BYTES:], "big"))
        return self._places.get(key)

    def group_of(self, key: bytes) -> GroupKeys:
        """Return how the keys of this one's group are made."""
        return self._groups[int.from_bytes(key[-_GROUP_BYTES:], "big")]

    def prefixes(self) -> Iterator[Sequence[OffloadKey]]:
        """Yield the keys so far of each group that is looked up from the head on."""
        self.still_hold()
        for number, group in self._groups.items():
            if group.whole_prefix:
                self._follow(number)
                yield self._prefixes[number]

    def groups(self) -> list[PromptGroup]:
        """Return the keys so far of all groups, as a tiering manager is asked about them."""
        self.still_hold()
        for number in self._groups:
            self._follow(number)
        return self._asked

    def needed(self, computed: int, end: int) -> list[bytes]:
        """Return vLLM's keys of the chunks that a load of the tokens from ``computed`` to ``end`` needs."""
        found: list[bytes] = []
        for number, group in self._groups.items():
            tokens = max(1, group.tokens_per_chunk)
            first = max(computed, end - group.window) if group.window else computed
            found += self._shown[number][first // tokens : -(-end // tokens) + group.ahead] if end > computed else ()
        return found

    def _follow(self, number: int) -> None:
        """Make the keys of the blocks that vLLM has hashed since."""
        prefix, every = self._prefixes[number], self._groups[number].hashes_per_chunk
        if (len(prefix) + 1) * every > len(self._hashes):
            return
        suffix = number.to_bytes(_GROUP_BYTES, "big")
        shown = [bytes(last) + suffix for last in self._hashes[(len(prefix) + 1) * every - 1 :: every]]
        self._places.update(zip(shown, range(len(prefix), len(prefix) + len(shown)), strict=True))
        self._shown[number] += shown
        prefix += self.of_all(shown)
