import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.region.handshake import (
    HandshakeError,
    Kind,
    MessageReader,
    decode_progress,
    encode_message,
    encode_progress,
    peer_credentials,
    peer_pidfd,
    plain_id,
    socket_name,
)


def test_the_header_that_all_versions_share_is_as_written_down():
    assert encode_message(Kind.REFUSED, b"why") == b"kvtR" + struct.pack("<HHI", 1, 2, 3) + b"why"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=200)), max_size=8),
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
)
def test_messages_arrive_whole_however_the_stream_is_cut(messages, cuts):
    stream = b"".join(encode_message(kind, body) for kind, body in messages)
    reader, got, position = MessageReader(), [], 0
    for length in cuts * (len(stream) + 1):
        got += reader.feed(stream[position : position + length])
        position += length
        if position >= len(stream):
            break
    assert [(message.kind, message.body) for message in got] == messages


@pytest.mark.parametrize(
    "stream",
    [b"GET / HTTP/1.1\r\n\r\n", b"kvtR" + struct.pack("<HHI", 1, 1, 1 << 31)],
    ids=["another protocol", "an absurd length"],
)
def test_nonsense_is_refused(stream):
    with pytest.raises(HandshakeError):
        list(MessageReader().feed(stream))


@given(st.integers(0, 2**64 - 1), st.sampled_from([(False, False), (True, False), (True, True)]))
def test_progress_survives_the_wire(rows, end):
    (message,) = MessageReader().feed(encode_progress(rows, *end))
    assert decode_progress(message.body) == (rows, *end)


@given(st.text(), st.integers(0, 2**32 - 1))
def test_a_socket_name_fits_whatever_the_engine_id_is(engine_id, uid):
    name = socket_name(engine_id, uid).encode("ascii")
    assert name.startswith(b"\0kvtiers-")
    assert len(name) <= 108


@given(st.text(), st.text())
def test_two_engine_ids_never_share_a_name(one, other):
    assert (plain_id(one) == plain_id(other)) == (one == other)


def test_the_kernel_says_who_is_at_the_other_end():
    import os

    left, right = socket.socketpair()
    with left, right:
        assert peer_credentials(left) == (os.getpid(), os.geteuid())
        pidfd = peer_pidfd(left)
        assert pidfd is not None
        os.close(pidfd)


def test_a_peer_that_has_ended_is_known_as_gone():
    import os
    import subprocess
    import sys

    left, right = socket.socketpair()  # credentials of a pair are its maker's
    left.close()
    right.close()
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind("")
        listener.listen()
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({listener.getsockname()!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
        peer, _ = listener.accept()
        with peer:
            try:
                pidfd = peer_pidfd(peer)
            except ProcessLookupError:
                return
            # Newer kernels keep a record of a process that has ended: then its pidfd is ready at once.
            import select

            assert select.select([pidfd], [], [], 0)[0] == [pidfd]
            os.close(pidfd)
