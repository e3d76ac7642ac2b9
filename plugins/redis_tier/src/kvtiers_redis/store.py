"""The store of the tier type ``redis``: a key a value, on one server or many."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from redis import exceptions as client_errors

from kvtiers.api import ChunkStore, Finding, NotKept, StoreEntry, TierUnavailable
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.link import Link, ReplyError
from kvtiers_redis.places import is_loopback
from kvtiers_redis.routing import Router, as_error
from kvtiers_redis.servers import Server, warn_of_clear_text
from kvtiers_redis.topology import open_topology
from kvtiers_redis.windows import Answer, Exchange, ask, command, commands, read_values, to_the_end, write_values

__all__ = ["RedisStore"]

_PAGE_KEYS = 1000
_FULL = "OOM"
_NO_WRITES = frozenset({"MISCONF", "NOREPLICAS"})
"""Error codes of a server that takes no writes now, and answers reads: it cannot save, or has lost its replicas."""


class RedisStore(ChunkStore):
    """Values in Redis. Opening it connects to one server at least."""

    batch_values = 32

    transient_errors: ClassVar[tuple[type[Exception], ...]] = (
        ConnectionError,
        TimeoutError,
        TierUnavailable,
        client_errors.ConnectionError,
        client_errors.TimeoutError,
    )

    def __init__(self, config: RedisConfig, *, read_only: bool = False) -> None:
        self._config = config
        self._read_only = read_only
        self._prefix = config.prefix.encode()
        ttl = [] if config.ttl is None else [b"PX", b"%d" % round(config.ttl * 1e3)]
        self._set_options = [*ttl, *([b"NX"] if config.set_nx else [])]
        self._refresh = ttl if config.refresh_ttl and not read_only else []
        self._dropped = 0
        if not config.places.tls and not all(is_loopback(host) for host, _ in config.places.addresses):
            warn_of_clear_text(config.url)
        self._topology = open_topology(config)
        self._router = Router(self._topology)
        try:
            self._topology.reach()
        except BaseException:
            self._topology.close()
            raise
        self._window = config.window_bytes(local=all(server.is_local for server in self._topology.masters()))

    # -- values

    def read_into(self, name: str, dst: memoryview) -> int:
        """Receive the value into the start of ``dst``."""
        # A release before gave records a ttl, too.
        refresh = [b"PERSIST"] if self._refresh and _is_record(name) else self._refresh
        return self._read([name], [[dst]], refresh)[0]

    def read_many_into(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]]) -> list[int]:
        """Ask for all, and receive each into the start of its views."""
        return self._read(names, dsts, self._refresh)

    def _read(self, names: Sequence[str], dsts: Sequence[Sequence[memoryview]], refresh: Sequence[bytes]) -> list[int]:
        keys = [self._key(name) for name in names]
        answers = self._get(keys, dsts, refresh)
        if None in answers:  # a server that takes no writes does not take a new ttl either
            left = [i for i, answer in enumerate(answers) if answer is None]
            plain = self._get([keys[i] for i in left], [dsts[i] for i in left], [])
            for i, answer in zip(left, plain, strict=True):
                answers[i] = answer
        return [answer if type(answer) is int else 0 for answer in answers]

    def _get(
        self, keys: Sequence[bytes], dsts: Sequence[Sequence[memoryview]], refresh: Sequence[bytes]
    ) -> list[Answer]:
        """Answers: a length; False (no value of ours); None where a ttl was to be refreshed and cannot be."""
        word = b"GETEX" if refresh else b"GET"

        def talk(link: Link, indexes: Sequence[int], asking: bool) -> Exchange:
            return read_values(
                link,
                commands(word, [keys[i] for i in indexes], *refresh),
                [dsts[i] for i in indexes],
                window=self._window,
                asking=asking,
            )

        not_refreshed = dict.fromkeys((_FULL, *_NO_WRITES)) if refresh else {}
        return self._router.ask(keys, talk, instead={"WRONGTYPE": False, **not_refreshed})

    def write(self, name: str, src: memoryview) -> None:
        """Set the value. NotKept if the server has no room, or takes no writes now."""
        [refusal] = self._write([name], [[src]], [] if _is_record(name) else self._set_options)
        if refusal is not None:
            raise refusal

    def write_many(self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]]) -> list[NotKept | None]:
        """Send all values, then read the result of each."""
        return self._write(names, srcs, self._set_options)

    def _write(
        self, names: Sequence[str], srcs: Sequence[Sequence[memoryview]], options: Sequence[bytes]
    ) -> list[NotKept | None]:
        keys = [self._key(name) for name in names]
        done = self._set(keys, srcs, options)
        if None in done:  # a value is there already, and NX has left it
            self._replace_others(keys, srcs, done)
        refusals = [_refusal(answer) for answer in done]
        self._dropped += sum(refusal is not None for refusal in refusals)
        return refusals

    def _set(
        self, keys: Sequence[bytes], srcs: Sequence[Sequence[memoryview]], options: Sequence[bytes]
    ) -> list[Answer]:
        def talk(link: Link, indexes: Sequence[int], asking: bool) -> Exchange:
            return write_values(
                link,
                [keys[i] for i in indexes],
                [srcs[i] for i in indexes],
                options=options,
                window=self._window,
                asking=asking,
            )

        return self._router.ask(keys, talk, instead={_FULL: False}, refusals=_NO_WRITES)

    def _replace_others(self, keys: Sequence[bytes], srcs: Sequence[Sequence[memoryview]], done: list[Answer]) -> None:
        """Of the values that NX has left, write those that had another length."""
        left = [i for i, answer in enumerate(done) if answer is None]
        lengths = self._ask([keys[i] for i in left], b"STRLEN")
        others = [i for i, length in zip(left, lengths, strict=True) if length != sum(map(len, srcs[i]))]
        options = [word for word in self._set_options if word != b"NX"]
        answers = self._set([keys[i] for i in others], [srcs[i] for i in others], options)
        for i, answer in zip(others, answers, strict=True):
            done[i] = answer

    # -- names

    def exists(self, names: Sequence[str]) -> Sequence[bool]:
        """Ask for all at once."""
        return [answer == 1 for answer in self._ask([self._key(name) for name in names], b"EXISTS")]

    def delete(self, names: Sequence[str]) -> None:
        """Unlink the keys; the server frees their memory later, in a thread of its own."""
        self._ask([self._key(name) for name in names], b"UNLINK", partial=False)

    def list(self, prefix: str) -> Iterator[StoreEntry]:
        """Scan every master there is now, at the bounded rate."""
        self._topology.refresh()
        return _list_values(self._topology.masters(), self._prefix, prefix, rate=self._config.scan_rate)

    def diagnose(self, value_bytes: int) -> Sequence[Finding]:
        """Examine the connection to the servers, their memory, limits and persistence."""
        # Imported here: only `kvtiers check` asks.
        from kvtiers_redis.diagnosis import diagnose

        return diagnose(self._config, self._topology.masters(), value_bytes, read_only=self._read_only)

    def stats(self) -> Mapping[str, float]:
        """Return the counts since the store was opened; asks no server."""
        return {
            "connects": sum(server.connects for server in self._topology.servers()),
            "dropped_values": self._dropped,
            "redirected_requests": self._router.redirected,
            "unreachable_values": self._router.unreachable,
        }

    def close(self) -> None:
        """Close all connections."""
        self._topology.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode("ascii")

    def _ask(self, keys: Sequence[bytes], word: bytes, *, partial: bool = True) -> Sequence[Answer]:
        def talk(link: Link, indexes: Sequence[int], asking: bool) -> Exchange:
            return ask(link, commands(word, [keys[i] for i in indexes]), asking=asking)

        return self._router.ask(keys, talk, partial=partial)


def _is_record(name: str) -> bool:
    """Return whether this is a record of core's own about a namespace, which has no ttl: it is of all its values."""
    return name.partition("/")[2].startswith("_")


def _refusal(answer: Answer) -> NotKept | None:
    """Return why a value was not kept; None: it was, or one of the same length was there."""
    if isinstance(answer, NotKept):
        return answer
    return NotKept("the server has no room") if answer is False else None


def _list_values(servers: Sequence[Server], key_prefix: bytes, prefix: str, *, rate: int) -> Iterator[StoreEntry]:
    """Yield the values under names that start with ``prefix``, each once; at most ``rate`` keys a second are looked at.

    A scan may name a key twice, and one that moves between two servers is found on both: what was yielded is
    remembered, by its hash. The server records no time of writing.

    A server that refuses to say what it has raises, since a list without its values would look whole: ReplyError, or
    TierUnavailable if that passes, as where a key moves to another server meanwhile.
    """
    pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", key_prefix + prefix.encode()) + b"*"
    seen: set[int] = set()
    for server in servers:
        cursor, pages, begin = 0, 0, time.monotonic()
        while cursor or not pages:
            cursor, keys = server.client.scan(cursor, match=pattern, count=_PAGE_KEYS)
            for key, length in _lengths(server, [key for key in keys if isinstance(key, bytes)]):
                if length and hash(key) not in seen and key.isascii():
                    seen.add(hash(key))
                    yield StoreEntry(key[len(key_prefix) :].decode(), length)
            pages += 1
            time.sleep(max(0.0, begin + pages * _PAGE_KEYS / rate - time.monotonic()))


def _lengths(server: Server, keys: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield each key with the length of its value; keys that are gone or hold no string are left out."""
    with server.link() as link:
        [answers] = to_the_end([ask(link, [command(b"STRLEN", key) for key in keys])])
    for key, answer in zip(keys, answers, strict=True):
        if isinstance(answer, ReplyError) and answer.code != "WRONGTYPE":
            raise as_error(answer)
        if type(answer) is int:
            yield key, answer
