"""Many requests on one connection before their replies, a bounded number of bytes at a time.

Rows go out of the shared region and replies come into it directly. While replies are read the next requests are
already with the server: it is asked for more when half a window is left.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvtiers_redis.link import Link, ReplyError

__all__ = ["Answer", "ask", "command", "read_values", "write_values"]

Answer: TypeAlias = bool | int | str | Exception | None
"""What became of one key: what the server says, or why it says nothing."""

_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_MOST_REQUESTS = 256  # in one window, and far fewer buffers than one sendmsg may have


def command(*words: bytes) -> bytes:
    """Return a request of these words."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def read_values(
    link: Link, requests: Sequence[bytes], dsts: Sequence[memoryview], *, window: int, asking: bool = False
) -> list[Answer]:
    """Send requests that are answered by values, and take each into its ``dst``."""

    def read(index: int) -> Answer:
        return link.read_value(dsts[index])

    return _exchange(
        link, len(requests), lambda i: [requests[i]], read, sizes=[*map(len, dsts)], window=window, asking=asking
    )


def write_values(
    link: Link,
    keys: Sequence[bytes],
    srcs: Sequence[memoryview],
    *,
    options: Sequence[bytes],
    window: int,
    asking: bool = False,
) -> list[Answer]:
    """Send a SET for each key and value, with these options. Answers: "OK", None (left as it is, by NX), an error."""
    words = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
    tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in options)

    def request(index: int) -> list[bytes | memoryview]:
        key, src = keys[index], srcs[index]
        return [words + b"$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(src)), src, tail]

    def read(_: int) -> Answer:
        return link.read_status()

    return _exchange(link, len(keys), request, read, sizes=[*map(len, srcs)], window=window, asking=asking)


def ask(link: Link, requests: Sequence[bytes], *, asking: bool = False) -> list[Answer]:
    """Send requests that are answered in a line each."""

    def read(_: int) -> Answer:
        return link.read_status()

    return _exchange(
        link, len(requests), lambda i: [requests[i]], read, sizes=[0] * len(requests), window=0, asking=asking
    )


def _exchange(
    link: Link,
    count: int,
    request: Callable[[int], Sequence[bytes | memoryview]],
    read: Callable[[int], Answer],
    *,
    sizes: Sequence[int],
    window: int,
    asking: bool,
) -> list[Answer]:
    """Send all requests and take all replies, in order, with at most ``window`` bytes of values under way."""
    link.begin()
    answers: list[Answer] = []
    sent = flying = 0
    while len(answers) < count:
        if sent < count and flying <= window // 2:
            parts: list[bytes | memoryview] = []
            while sent < count and (flying + sizes[sent] <= window or sent == len(answers)):
                if sent - len(answers) == _MOST_REQUESTS:
                    break
                parts += [_ASKING, *request(sent)] if asking else request(sent)
                flying += sizes[sent]
                sent += 1
            if parts:
                link.send(parts)
        refusal = link.read_status() if asking else None
        answer = read(len(answers))
        answers.append(refusal if isinstance(refusal, ReplyError) else answer)
        flying -= sizes[len(answers) - 1]
    return answers
