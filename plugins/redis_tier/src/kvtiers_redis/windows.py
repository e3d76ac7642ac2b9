"""Windows: pipelined requests on one connection, with a bounded number of bytes in flight.

Rows go out of the shared region and replies come into it directly. While the replies of a large window are read the
next requests are already with the server: it is asked for more when half of the window is left. A small window goes out
whole, when the one before is done: other connections keep the server busy meanwhile, and every turn has its price.
With several servers, the exchanges take turns, so that all servers have work.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

from kvtiers_redis.link import SHORTEST_STATUS, Link, ReplyError

__all__ = ["Answer", "Exchange", "ask", "command", "commands", "read_values", "to_the_end", "write_values"]

Answer: TypeAlias = bool | int | str | Exception | None
"""The result of one key: the server's reply, the error instead of it, or that a value is not kept (``NotKept``)."""

Exchange: TypeAlias = Generator[None, None, list[Answer]]
"""Talks to one server and returns the answers. Stops where requests have been sent whose replies may take a while."""

_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_MOST_REQUESTS = 256  # in one window
_SHORTEST_ANSWER_TO_SET = len(b"+OK\r\n")  # or "$-1"; errors are longer
_LEAST_TURN = 512 << 10  # bytes of values that go out together, if there are as many

_Requests: TypeAlias = Callable[[int, int], Sequence[bytes | memoryview]]
"""The bytes to send for the keys from the first index to before the second."""

_Read: TypeAlias = Callable[[int, int, int], list[Answer]]
"""Take replies from the first index on, at least one, none from the last index on. Those to before the second have to
come before there is anything to send."""


def command(*words: bytes) -> bytes:
    """Return a request of these words."""
    return b"*%d\r\n" % len(words) + _words(words)


def commands(word: bytes, keys: Sequence[bytes], *options: bytes) -> list[bytes]:
    """Return a request for each key: the word, the key, the options."""
    head = b"*%d\r\n$%d\r\n%b\r\n" % (2 + len(options), len(word), word)
    tail = b"\r\n" + _words(options)
    return [b"%b$%d\r\n%b%b" % (head, len(key), key, tail) for key in keys]


def read_values(
    link: Link,
    requests: Sequence[bytes],
    dsts: Sequence[Sequence[memoryview]],
    *,
    window: int,
    asking: bool = False,
) -> Exchange:
    """Send requests that are answered by values, and take each into the start of its ``dst``. Answers: the lengths."""

    def read(first: int, pending: int, _: int) -> list[Answer]:
        return [*link.read_values(dsts[first:pending])]

    sizes = [sum(map(len, views)) for views in dsts]
    return _exchange(link, _lines(requests, asking), read, sizes=sizes, window=window, asking=asking)


def write_values(
    link: Link,
    keys: Sequence[bytes],
    srcs: Sequence[Sequence[memoryview]],
    *,
    options: Sequence[bytes],
    window: int,
    asking: bool = False,
) -> Exchange:
    """Send a SET for each key and value, with these options. Answers: "OK", None (left as it is, by NX), an error."""
    sizes = [sum(map(len, views)) for views in srcs]
    words = (_ASKING if asking else b"") + b"*%d\r\n$3\r\nSET" % (3 + len(options))
    heads = [
        b"%b\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, size) for key, size in zip(keys, sizes, strict=True)
    ]
    tail = b"\r\n" + _words(options)

    def requests(first: int, end: int) -> list[bytes | memoryview]:
        parts = list[bytes | memoryview]()
        for head, views in zip(heads[first:end], srcs[first:end], strict=True):
            parts += (head, *views, tail)
        return parts

    read = _statuses(link, _SHORTEST_ANSWER_TO_SET)
    return _exchange(link, requests, read, sizes=sizes, window=window, asking=asking)


def ask(link: Link, requests: Sequence[bytes], *, asking: bool = False) -> Exchange:
    """Send requests that are answered in a line each."""
    sizes = [0] * len(requests)
    return _exchange(link, _lines(requests, asking), _statuses(link), sizes=sizes, window=0, asking=asking)


def to_the_end(exchanges: Sequence[Exchange]) -> list[list[Answer]]:
    """Run all exchanges to the end, each in its turn; return the answers of each."""
    answers: list[list[Answer]] = [[] for _ in exchanges]
    in_flight = [*enumerate(exchanges)]
    while in_flight:
        for index, exchange in in_flight[:]:
            try:
                next(exchange)
            except StopIteration as end:
                answers[index] = end.value
                in_flight.remove((index, exchange))
    return answers


def _words(words: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def _lines(requests: Sequence[bytes], asking: bool) -> _Requests:
    between = _ASKING if asking else b""
    return lambda first, end: [between + between.join(requests[first:end])]


def _statuses(link: Link, shortest: int = SHORTEST_STATUS) -> _Read:
    def read(first: int, pending: int, end: int) -> list[Answer]:
        return [*link.read_statuses(pending - first, end - first, shortest)]

    return read


def _exchange(
    link: Link, requests: _Requests, read: _Read, *, sizes: Sequence[int], window: int, asking: bool
) -> Exchange:
    """Send all requests and read all replies, in order, with at most ``window`` bytes of values in flight."""
    link.begin()
    refill = max(0, window - max(window // 2, _LEAST_TURN))  # this few bytes are in flight when more are sent
    answers: list[Answer] = []
    count, sent, done, flying = len(sizes), 0, 0, 0
    while done < count:
        if sent < count and flying <= refill:
            first, most = sent, min(count, done + _MOST_REQUESTS)
            while sent < most and (flying + sizes[sent] <= window or sent == done):
                flying += sizes[sent]
                sent += 1
            if sent > first:
                link.send(requests(first, sent))
                left = link.seconds_left
                yield
                link.begin(left)
        pending, flying_then = done + 1, flying - sizes[done]
        while pending < sent < count and flying_then > refill:
            pending, flying_then = pending + 1, flying_then - sizes[pending]
        answers += _behind_asking(link, read, done) if asking else read(done, pending if sent < count else count, sent)
        flying -= sum(sizes[done : len(answers)])
        done = len(answers)
    return answers


def _behind_asking(link: Link, read: _Read, index: int) -> list[Answer]:
    refusal = link.read_status()
    answers = read(index, index + 1, index + 1)
    return [refusal] if isinstance(refusal, ReplyError) else answers
