"""What servers hold, asked for a page at a time and not faster than they are to be asked."""

import re
import time
from collections.abc import Iterator, Sequence

from kvtiers.api import StoreEntry
from kvtiers_redis.link import ReplyError
from kvtiers_redis.routing import as_error
from kvtiers_redis.servers import Server
from kvtiers_redis.windows import ask, command, to_the_end

__all__ = ["list_values"]

_PAGE_KEYS = 1000


def list_values(servers: Sequence[Server], key_prefix: bytes, prefix: str, *, rate: int) -> Iterator[StoreEntry]:
    """Yield the values under names that start with ``prefix``, each once; at most ``rate`` keys a second are looked at.

    A scan may name a key twice, and one that moves between two servers is found on both: what was yielded is
    remembered, by its hash. The server knows no time of writing.

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
