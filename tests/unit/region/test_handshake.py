import contextlib
import os
import select
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.region import handshake
from kvtiers.region.handshake import Kind, peer_credentials, peer_pidfd, plain_id, socket_name


def test_what_all_formats_share_is_as_written_down():
    assert Kind.HELLO.message(b'{"format": 2}') == b'\1{"format": 2}'
    assert Kind.REFUSED.message(b"why") == b"\2why"


@given(st.text(), st.integers(0, 2**32 - 1))
def test_a_socket_name_fits_whatever_the_engine_id_is(engine_id, uid):
    name = socket_name(engine_id, uid).encode("ascii")
    assert name.startswith(b"\0kvtiers-")
    assert len(name) <= 108


@given(st.text(), st.text())
def test_two_engine_ids_never_share_a_name(one, other):
    assert (plain_id(one) == plain_id(other)) == (one == other)


@pytest.fixture(params=["SO_PEERPIDFD", "before Linux 6.5"])
def _kernel(request, monkeypatch):
    if request.param != "SO_PEERPIDFD":
        monkeypatch.setattr(handshake, "_SO_PEERPIDFD", 9999)


@pytest.mark.usefixtures("_kernel")
def test_the_kernel_says_who_is_at_the_other_end():
    left, right = socket.socketpair()
    with left, right:
        assert peer_credentials(left) == (os.getpid(), os.geteuid())
        pidfd = peer_pidfd(left)
        assert pidfd is not None
        os.close(pidfd)


@pytest.mark.usefixtures("_kernel")
def test_a_peer_that_has_ended_is_known_as_gone():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        connect = f"s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect({listener.getsockname()!r})"
        subprocess.run([sys.executable, "-c", f"import socket; {connect}"], check=True)
        peer, _ = listener.accept()
        with peer, contextlib.suppress(ProcessLookupError):
            pidfd = peer_pidfd(peer)
            # Newer kernels keep a record of a process that has ended: then its pidfd is ready at once.
            assert select.select([pidfd], [], [], 0)[0] == [pidfd]
            os.close(pidfd)
