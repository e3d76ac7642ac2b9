"""The host's program by itself, with the test in the place of the engine."""

import importlib
import json
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtiers._process import hand_over
from kvtiers._version import __version__
from kvtiers.api.config import dump_resolved
from kvtiers.host import wire
from kvtiers.host.messages import Close, Hello, LogLine, Opened
from kvtiers.host.wire import FrameReader
from kvtiers.layout.seal import seal_value
from kvtiers.plugins import load_tier

PATIENCE = 120.0  # only a hang takes so long: where many want the processors, a process takes half a minute to start
START = "from kvtiers.host.__main__ import main; main()"


@pytest.fixture
def host():
    """Start the program; return the process and our end of its socket."""
    processes, sockets = [], []

    def host(parent=None):
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("test")
        os.ftruncate(memory, 1 << 16)
        handover, its_handover = socket.socketpair()
        passed = [theirs.fileno(), its_handover.fileno()]
        arguments = [sys.executable, "-P", "-c", START, *map(str, passed), str(parent or os.getpid())]
        process = subprocess.Popen(arguments, pass_fds=passed, stderr=subprocess.PIPE)
        theirs.close()
        its_handover.close()
        with handover:
            assert hand_over(handover, [memory]) == (parent is None)
        os.close(memory)
        processes.append(process)
        sockets.append(ours)
        return process, ours

    yield host
    for ours in sockets:
        ours.close()
    for process in processes:
        process.kill()
        process.communicate()


def tier_of(options):
    """Return what a HELLO has of a tier whose values have 4,096 bytes."""
    config = load_tier("memory").config(type="memory", capacity=1 << 20, **options)
    sizes = [(4000, 4096)]
    prefix, layout_id = "test/m-0123456789abcdef01234567/", "0123456789abcdef"
    fields = {"name": "cache", "options": dump_resolved(config), "namespace": "test", "prefix": prefix}
    return {**fields, "layout_id": layout_id, "layout": "", "sizes": sizes}


def hello(**changes):
    region = {"map_bytes": 1 << 16, "nbytes": 1 << 16, "row_stride": 4096}
    fields = {
        "protocol": wire.PROTOCOL_FORMAT,
        "release": __version__,
        "log_level": 30,
        "cpus": [],
        "region": region,
        "tier": tier_of({}),
    }
    return wire.encode(Hello(json.dumps(fields | changes)))


def messages(ours, patience=PATIENCE):
    """Read to the end; return the messages."""
    reader, read = FrameReader(), []
    deadline = time.monotonic() + patience
    while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = ours.recv(1 << 16)
        if not data:
            return read
        reader.feed(data)
        read += [wire.decode_report(message) for message in reader.messages(1000)]
    raise AssertionError("it does not end")


def test_a_host_whose_engine_ended_before_it_could_follow_ends_by_itself(host):
    process, ours = host(parent=1)
    assert messages(ours) == []
    assert process.wait(PATIENCE) == 0


def test_a_host_ends_when_the_socket_does(host):
    process, ours = host()
    ours.sendall(hello())
    ours.shutdown(socket.SHUT_WR)
    assert process.wait(PATIENCE) == 0


def test_a_host_of_another_protocol_says_so_and_ends(host):
    process, ours = host()
    ours.sendall(hello(protocol=99))
    line, said = messages(ours)
    assert isinstance(line, LogLine)
    assert "restart the engine" in line.text
    assert isinstance(said, Opened)
    assert f"protocol 99, expected {wire.PROTOCOL_FORMAT}" in said.error
    assert process.wait(PATIENCE) == 1


def hello_8():
    """Return the HELLO of an engine of format 8, whose frames are `u32 length | u16 tier | message`."""
    tier = {
        "name": "cache",
        "options": {"type": "memory", "password": {"value": "s\u00e9same", "source": "config"}},
        "namespace": "prod",
        "prefix": "prod/m-0123456789abcdef01234567/",
        "layout_id": "0001020304050607",
        "sizes": [[4000, 4096], [100, 4096]],
    }
    region = {"map_bytes": 1 << 20, "nbytes": (1 << 20) - 4096, "row_stride": 4096}
    fields = {"protocol": 8, "log_level": 30, "cpus": [0, 2], "region": region, "tiers": [tier]}
    document = json.dumps(fields).encode()
    message = b"\x92\x01\xda" + struct.pack(">H", len(document)) + document
    return struct.pack("<IH", len(message), 0) + message


@pytest.mark.parametrize(
    "first",
    [
        hello_8(),
        wire.encode(Hello('{"protocol": 10, "tiers": []}')),
        wire.encode(Close(5.0)),
        b"\xff" * 64,
    ],
    ids=["another frame", "another shape", "another message", "no frame"],
)
def test_a_host_that_cannot_read_its_engines_hello_says_in_one_line_to_restart_the_engine(host, first):
    process, ours = host()
    ours.sendall(first)
    [said] = messages(ours)
    assert isinstance(said, Opened)
    [line] = process.stderr.read().decode().splitlines()
    assert line == f"no tier host: {said.error}"
    assert line.startswith(f"no tier host: ProtocolError: kvtiers' files are of {__version__} now, and the engine")
    assert line.endswith("they were replaced; restart the engine")
    assert process.wait(PATIENCE) == 1


def test_a_hello_that_is_longer_than_what_is_read_at_once_is_read_whole(host):
    process, ours = host()
    ours.sendall(hello(longer="x" * (1 << 20)) + wire.encode(Close(5.0)))
    assert process.wait(PATIENCE) == 0
    assert process.stderr.read() == b""


def test_a_host_that_cannot_map_the_region_says_so_and_ends(host):
    process, ours = host()
    region = {"map_bytes": 1 << 62, "nbytes": 1 << 62, "row_stride": 4096}
    ours.sendall(hello(region=region))
    line, said = messages(ours)
    assert isinstance(line, LogLine)
    assert "cannot map" in said.error
    assert process.wait(PATIENCE) == 1


def test_a_host_closes_within_its_time_and_without_a_word_on_stderr(host):
    process, ours = host()
    ours.sendall(hello() + wire.encode(Close(5.0)))
    assert process.wait(PATIENCE) == 0
    assert process.stderr.read() == b""


def test_the_benchmarks_find_an_engines_hosts(start, faulty, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    tier_hosts = importlib.import_module("lib.processes").tier_hosts
    assert tier_hosts() == []
    start(faulty()).until_available()
    assert len(tier_hosts()) == 1


SEAL_FOR_EVER = """
import mmap, sys
from kvtiers.layout.seal import seal_value
value = memoryview(mmap.mmap(int(sys.argv[1]), 4096))
while True:
    seal_value(value, 4000, "a/b", b"layout-1")
"""


def test_a_value_that_another_host_is_sealing_again_is_whole_at_every_moment():
    """Two tiers' hosts seal the same row, and one may be storing it while the other still seals."""
    memory = os.memfd_create("row")
    os.ftruncate(memory, 4096)
    value = memoryview(mmap.mmap(memory, 4096))
    seal_value(value, 4000, "a/b", b"layout-1")
    whole = bytes(value)
    with subprocess.Popen([sys.executable, "-c", SEAL_FOR_EVER, str(memory)], pass_fds=[memory]) as other:
        value[4000] = 1
        until = time.monotonic() + 30
        while value[4000]:
            assert time.monotonic() < until, "the other process does not seal"
        torn = sum(bytes(value[-128:]) != whole[-128:] for _ in range(500_000))
        other.kill()
    os.close(memory)
    assert torn == 0
