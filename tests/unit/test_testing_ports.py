"""Ports for servers that tests start."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.testing.ports import _Ports, free_port

PROCESS = """
import sys
from kvtiers.testing.ports import free_port
print(*(free_port() for _ in range(60)), flush=True)
sys.stdin.read()
"""


def test_a_port_that_cannot_be_given_now_can_be_given_later(monkeypatch):
    def refused(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("kvtiers.testing.ports._is_free", refused)
        with pytest.raises(OSError, match="Too many open files"):
            free_port()
    assert free_port()


def test_a_forked_process_gets_none_of_its_parents_ports():
    free_port()
    (reader, writer), (until, end) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.write(writer, str(free_port()).encode())
        os.read(until, 1)  # its ports are its own until it ends
        os._exit(0)
    given = int(os.read(reader, 100))
    ours = [free_port() for _ in range(60)]
    os.write(end, b"x")
    os.waitpid(child, 0)
    assert given not in ours
    for descriptor in (reader, writer, until, end):
        os.close(descriptor)


def test_where_clients_may_get_these_ports_that_is_said(monkeypatch, tmp_path):
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr("kvtiers.testing.ports._CLIENTS", tmp_path / "range")
    with pytest.raises(RuntimeError, match="begins at 1024: clients could be given the ports"):
        _Ports().free()


def test_no_two_processes_get_the_same_port_and_no_client_gets_one():
    here = [free_port() for _ in range(60)]
    others = [
        subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        given = here + [int(port) for other in others for port in other.stdout.readline().split()]
    finally:
        for other in others:
            other.communicate()
    assert len(set(given)) == 180
    assert max(given) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
