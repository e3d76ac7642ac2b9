"""The reader of replies: whatever a server sends, and however it arrives, no byte lands in the wrong row."""

import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_links import POISON, SECONDS, Rows, linked, pair, read_all, value_reply, write_all

from kvtiers_redis.link import GarbageReply, Link, ReplyError
from kvtiers_redis.windows import ask, command, to_the_end


# What may come for one key: the value itself, one of another length, none, an error.
@st.composite
def replies(draw):
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=8))
    texts, kinds = [], []
    for size in sizes:
        kind = draw(st.sampled_from(["value", "value", "other", "absent", "error"]))
        content = draw(st.binary(min_size=size, max_size=size))
        if kind == "other":
            content = draw(st.binary(max_size=700).filter(lambda other, size=size: len(other) != size))
        text = {"absent": b"$-1\r\n", "error": b"-ERR no\r\n"}.get(kind, value_reply(content))
        texts.append(text)
        kinds.append((kind, content))
    return sizes, kinds, texts


@settings(max_examples=300, deadline=None)
@given(replies(), st.integers(1, 2000), st.sampled_from(["tcp", "unix"]), st.data())
def test_however_replies_are_cut_each_value_lands_in_its_row_and_nothing_else(case, window, over, data):
    sizes, kinds, texts = case
    stream = b"".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    rows = Rows(sizes)
    with linked(*pieces, over=over) as link:
        answers = read_all(link, rows, window)
    for i, ((kind, content), answer) in enumerate(zip(kinds, answers, strict=True)):
        if kind == "value":
            assert answer == sizes[i]
            assert rows.content(i) == content
        elif kind == "error":
            assert isinstance(answer, ReplyError)
        elif kind == "other" and 0 < len(content) < sizes[i]:
            assert answer == len(content)
            assert rows.content(i) == content + bytes([POISON]) * (sizes[i] - len(content))
            continue
        else:
            assert answer == 0
        if kind != "value":
            assert rows.content(i) == bytes([POISON]) * sizes[i], "a row that got no value was written to"
    assert set(rows.guards()) == {POISON}


@pytest.mark.parametrize("over", ["tcp", "tls"])
def test_a_window_may_be_split_at_every_byte(over):
    sizes = [100, 100, 7, 100]
    contents = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    stream = value_reply(contents[0]) + b"$-1\r\n" + value_reply(b"another length") + value_reply(contents[3])
    for cut in range(1, len(stream)):
        rows = Rows(sizes)
        with linked(stream[:cut], stream[cut:], over=over) as link:
            assert read_all(link, rows) == [100, 0, 0, 100], cut
        assert (rows.content(0), rows.content(3)) == (contents[0], contents[3])
        assert set(rows.guards()) == {POISON}


@pytest.mark.parametrize("over", ["tcp", "unix", "tls"])
def test_a_window_may_come_byte_by_byte(over):
    rows = Rows([50, 50])
    stream = value_reply(b"a" * 50) + value_reply(b"b" * 50)
    with linked(*[bytes([byte]) for byte in stream], over=over) as link:
        assert read_all(link, rows) == [50, 50]
    assert (rows.content(0), rows.content(1)) == (b"a" * 50, b"b" * 50)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_stream_that_ends_early_is_an_error_and_never_a_value(data):
    sizes = [200, 200]
    stream = value_reply(b"a" * 200) + value_reply(b"b" * 200)
    end = data.draw(st.integers(0, len(stream) - 1))
    rows = Rows(sizes)
    with linked(stream[:end]) as link, pytest.raises(ConnectionError):
        read_all(link, rows)
    assert set(rows.guards()) == {POISON}


@settings(max_examples=500, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_an_error_or_a_miss_and_writes_nothing_outside_the_rows(garbage):
    rows = Rows([64, 64])
    with linked(garbage) as link:
        try:
            answers = read_all(link, rows)
        except OSError:
            answers = []
    assert 64 not in answers or b"$64\r\n" in garbage
    assert set(rows.guards()) == {POISON}


NO_VALUE = [b"+OK", b":1", b"*1\r\n$1\r\na", b"$abc", b"$-2", b"$ 64", b"$+64", b"$99999999999", b""]


@pytest.mark.parametrize(
    "reply", [*(line + b"\r\n" for line in NO_VALUE), b"$64\n", b"$64\r\n" + b"x" * 64 + b"xx", b"x" * 5000]
)
@pytest.mark.parametrize("over", ["tcp", "tls"])
def test_what_is_no_reply_to_a_read_ends_the_connection(reply, over):
    more = b"$64\r\n" + b"y" * 64 + b"\r\n"
    with linked(reply, more, over=over) as link, pytest.raises((GarbageReply, ConnectionError)):
        read_all(link, Rows([64, 64]))


@pytest.mark.parametrize("reply", [b"$2\r\nOK\r\n", b":x\r\n", b":\r\n", b"*0\r\n", b"?\r\n"])
def test_what_is_no_reply_to_a_question_ends_the_connection(reply):
    with linked(reply) as link, pytest.raises(GarbageReply):
        to_the_end([ask(link, [command(b"EXISTS", b"a")])])


def test_a_value_of_another_length_that_is_larger_than_all_buffers_goes_by():
    rows = Rows([4096])
    with linked(value_reply(bytes(3_000_000)), b"+next\r\n") as link:
        assert read_all(link, rows) == [0]
        link.begin()
        assert link.read_status() == "next"
    assert rows.content(0) == bytes([POISON]) * 4096


def test_an_error_in_the_middle_of_a_window_of_writes_is_that_writes_own():
    with linked(b"+OK\r\n-OOM full\r\n$-1\r\n+OK\r\n") as link:
        answers = write_all(link, 4, 100, window=150)
    assert (answers[0], answers[2], answers[3]) == ("OK", None, "OK")
    assert isinstance(answers[1], ReplyError)
    assert answers[1].code == "OOM"


@pytest.mark.parametrize(("over", "buffer"), [("tcp", 0), ("tcp", 16384), ("unix", 0)])
def test_large_values_come_whole_however_little_the_kernel_holds_of_them(over, buffer):
    """A wait for more than the connection's buffer can hold would last for ever."""
    sizes = [9_000_000, 600_000, 1 << 20]
    contents = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    stream = b"".join(map(value_reply, contents))
    pieces = [stream[at : at + 300_000] for at in range(0, len(stream), 300_000)]
    rows = Rows(sizes)
    with linked(*pieces, over=over, buffer=buffer) as link:
        assert read_all(link, rows) == sizes
    assert [rows.content(i) for i in range(3)] == contents
    assert set(rows.guards()) == {POISON}


def unread_bytes(connected: socket.socket) -> int:
    return struct.unpack("i", fcntl.ioctl(connected, termios.FIONREAD, bytes(4)))[0]


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_no_more_is_waited_for_than_the_rest_of_a_value_and_then_for_as_little_as_ever(over):
    near, far = pair(over)
    stream, rows = value_reply(b"a" * 100_000), Rows([100_000])

    def serve() -> None:
        far.sendall(stream[:40_000])
        while unread_bytes(near):  # the reader has a part of the value, and waits for the rest
            time.sleep(0)
        far.sendall(stream[40_000:])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with contextlib.closing(near), contextlib.closing(far):
        link = Link(near, SECONDS)
        assert read_all(link, rows) == [100_000]
        thread.join(SECONDS)
        far.sendall(b"+next\r\n")
        while not unread_bytes(near):
            time.sleep(0)
        assert not link.is_idle()
        link.begin()
        assert link.read_status() == "next"
    assert rows.content(0) == b"a" * 100_000


@pytest.mark.parametrize("over", ["tcp", "unix", "tls"])
def test_a_server_that_goes_away_in_the_middle_of_a_large_value_is_noticed_at_once(over):
    with linked(b"$1000000\r\n" + bytes(400_000), over=over) as link, pytest.raises(ConnectionError):
        read_all(link, Rows([1_000_000]))


@pytest.mark.parametrize("over", ["tcp", "unix", "tls"])
def test_a_server_that_stops_in_the_middle_of_a_large_value_is_given_up_in_time(over):
    part = b"$1000000\r\n" + bytes(400_000)
    with linked(part, over=over, close=False, seconds=0.5) as link, pytest.raises(TimeoutError):
        read_all(link, Rows([1_000_000]))


@pytest.mark.parametrize("over", ["tcp", "tls"])
def test_a_server_that_never_answers_is_given_up_in_time(over):
    with linked(close=False, seconds=0.2, over=over) as link, pytest.raises(TimeoutError):
        read_all(link, Rows([64]))


@pytest.mark.parametrize("over", ["tcp", "tls"])
def test_a_server_that_stops_in_the_middle_of_a_value_is_given_up_in_time(over):
    with linked(b"$64\r\nhalf", close=False, seconds=0.2, over=over) as link, pytest.raises(TimeoutError):
        read_all(link, Rows([64]))


@pytest.mark.parametrize("over", ["tcp", "unix", "tls"])
def test_a_server_that_says_a_byte_now_and_then_is_given_up_all_the_same(over):
    near, far = pair(over)
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            far.sendall(b"$100000\r\n")
            while not stop.wait(0.02):
                far.sendall(b"x")

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            read_all(Link(near, 0.3), Rows([100_000]))
    finally:
        stop.set()
        thread.join(SECONDS)
        near.close()
        far.close()


@pytest.mark.parametrize("over", ["tcp", "tls"])
def test_a_server_that_takes_bytes_ever_so_slowly_is_given_up_in_time(over):
    near, far = pair(over)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    stop, taken = threading.Event(), 0

    def sip() -> None:
        nonlocal taken
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                taken += len(far.recv(16 << 10))

    thread = threading.Thread(target=sip, daemon=True)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            write_all(Link(near, 0.3), 64, 64 << 10, window=4 << 20)
        assert taken < 2 << 20, "it would have been taken to the end"
    finally:
        stop.set()
        thread.join(SECONDS)
        near.close()
        far.close()


def test_a_server_that_takes_nothing_is_given_up_in_time():
    near, far = socket.socketpair()
    with contextlib.closing(near), contextlib.closing(far), pytest.raises(TimeoutError):
        write_all(Link(near, 0.2), 1, 8 << 20, window=1)


def test_a_link_with_something_to_say_or_closed_is_not_idle():
    near, far = socket.socketpair()
    with contextlib.closing(near):
        link = Link(near, SECONDS)
        assert link.is_idle()
        far.sendall(b"+late\r\n")
        assert not link.is_idle()
        link.begin()
        assert link.read_status() == "late"
        assert link.is_idle()
        far.close()
        assert not link.is_idle()


@pytest.mark.parametrize("reply", [b"_\r\n", b"+\r\n", b":0\r\n", b"$-1\r\n"])
def test_the_shortest_replies_are_not_waited_for_longer_than_it_takes(reply):
    listener = socket.create_server(("127.0.0.1", 0))  # the mark that is waited for is nothing to a UNIX socket
    with listener, socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
        far.sendall(8 * reply)
        link = Link(near, SECONDS)
        link.begin()
        statuses = link.read_statuses(8, 8)
    assert len(statuses) == 8
    assert len(set(statuses)) == 1
