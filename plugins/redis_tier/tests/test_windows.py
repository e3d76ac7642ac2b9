"""Requests ahead of their replies: how many are asked for at once, and whose each reply is."""

import contextlib
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_links import SECONDS, Rows, linked, read_all, value_reply, write_all

from kvtiers_redis.link import Link, ReplyError


@contextlib.contextmanager
def reading(count: int, nbytes: int, window: int):
    """Give the far end of a link on which so many values are read, a function that waits for requests, and the answers.

    The far end has to answer; the function waits until so many requests have come in all, and sees that no more come.
    """
    near, far = socket.socketpair()
    outcome: list[object] = []
    seen = b""

    def asked(number: int) -> None:
        nonlocal seen
        far.settimeout(SECONDS)
        while seen.count(b"GET") < number:
            seen += far.recv(1 << 16)
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(1)
        far.settimeout(SECONDS)
        assert seen.count(b"GET") == number

    with contextlib.closing(near), contextlib.closing(far):
        rows = Rows([nbytes] * count)
        work = lambda: outcome.append(read_all(Link(near, SECONDS), rows, window))  # noqa: E731
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield far, asked, outcome
        thread.join(SECONDS)


def test_no_more_than_a_window_is_asked_for_ahead_and_more_when_half_of_it_is_left():
    value = value_reply(bytes(600_000))
    with reading(10, 600_000, window=2_000_000) as (far, asked, outcome):
        asked(3)
        far.sendall(value)
        asked(3)
        far.sendall(value)
        asked(5)
        far.sendall(value * 8)
    assert outcome == [[600_000] * 10]


def test_a_small_window_is_asked_for_as_a_whole_when_the_one_before_has_come():
    value = value_reply(bytes(1000))
    with reading(10, 1000, window=3000) as (far, asked, outcome):
        asked(3)
        far.sendall(value * 2)
        asked(3)
        far.sendall(value)
        asked(6)
        far.sendall(value * 7)
    assert outcome == [[1000] * 10]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([b"+OK\r\n", b"+OK\r\n", b"$-1\r\n", b"-OOM full\r\n", b":0\r\n"]), min_size=1, max_size=40
    ),
    st.integers(1, 3000),
    st.data(),
)
def test_however_replies_to_writes_are_cut_each_is_that_writes_own(texts, window, data):
    stream = b"".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    with linked(*pieces) as link:
        answers = write_all(link, len(texts), 100, window)
    said = [answer.code if isinstance(answer, ReplyError) else answer for answer in answers]
    assert said == [{b"+": "OK", b"$": None, b"-": "OOM", b":": 0}[text[:1]] for text in texts]


def test_replies_that_are_fewer_than_what_was_asked_for_are_given_up_in_time():
    with linked(b"+OK\r\n" * 3, close=False, seconds=0.2) as link, pytest.raises(TimeoutError):
        write_all(link, 4, 100, window=1000)
