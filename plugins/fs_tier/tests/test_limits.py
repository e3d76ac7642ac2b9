"""The limits record: a process whose limits differ from those of the last writer says so, and so does a check."""

import json
import os
import time
from dataclasses import replace

import pytest

from kvtiers_fs.config import FsConfig
from kvtiers_fs.slab.store import SlabStore
from kvtiers_fs.store import FsStore


@pytest.fixture(params=["files", "slab"])
def shared(request, folder, slab_folder, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    shared = folder if request.param == "files" else slab_folder
    shared.waits = replace(shared.waits, look=0.0)
    return shared


def said(caplog):
    return [line for line in caplog.messages if "began to write to it" in line]


def wait_for(caplog, count):
    until = time.monotonic() + 60
    while len(said(caplog)) < count:
        assert time.monotonic() < until, caplog.messages
        time.sleep(0.01)


def differs(store):
    return [finding for finding in store.diagnose(4096) if "began to write to it" in finding.text]


def test_a_start_whose_limits_differ_from_the_last_writers_says_both_in_one_line(shared, value, caplog, monkeypatch):
    first = shared.open("1GiB", max_age="1d")
    first.write("ns/m/a", value(1))
    second = shared.open("64MiB", min_free="1MiB")
    wait_for(caplog, 1)
    [line] = said(caplog)
    assert line.startswith(f"{shared.path}: the process on node-7 that began to write to it at 20")
    assert "UTC has capacity 1GiB, max_age 1d, min_free 0B, this process has capacity 64MiB, max_age none" in line
    assert line.endswith("so that the strictest hold for all; give all processes that share the directory the same")
    second._evictor.round()
    assert len(said(caplog)) == 1
    [finding] = differs(second)
    assert finding.level == "warning"
    assert "capacity 1GiB" in finding.text
    assert "capacity 64MiB" in finding.text
    assert differs(first) == []
    second.write("ns/m/b", value(1))
    first._evictor.round()
    wait_for(caplog, 2)
    assert "has capacity 64MiB, max_age none, min_free 1MiB, this process has capacity 1GiB" in said(caplog)[1]
    assert differs(second) == []
    assert json.loads((shared.path / ".limits").read_text())["capacity"] == 64 << 20


def test_equal_limits_a_reader_and_what_only_core_writes_say_nothing(shared, value, caplog):
    shared.open("1GiB").write("ns/m/a", value(1))
    shared.open("1GiB").write("ns/m/b", value(1))
    reader = shared.open("2GiB", read_only=True)
    assert differs(reader) == []
    probing = shared.open("1GiB", mode="0640", group=str(os.getegid()))
    for name in ("_check/ns/probe", "ns/_epoch"):
        probing.write(name, value(1))
    assert json.loads((shared.path / ".limits").read_text())["mode"] == "0600"
    wait_for(caplog, 1)
    assert "has mode 0600, group -1, this process has mode 0640" in said(caplog)[0]
    assert "what the one writes may be closed to the other's user" in said(caplog)[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[" * 4000,
        b"[]",
        b"{}",
        b'{"host": "x", "time": 1e300, "capacity": 5}',
        b'{"host": "x", "time": "now", "capacity": 5}',
        b'{"host": "x", "time": 5, "capacity": "much", "mode": "0777", "max_age": [1], "min_free": null}',
        b"\xff" * 9000,
    ],
)
def test_a_record_that_says_nothing_is_none(folder, value, content):
    store = folder.open()
    store.write("ns/m/a", value(1))
    (folder.path / ".limits").write_bytes(content)
    assert differs(store) == []


def test_a_record_of_anything_is_one_line_of_plain_text(folder, caplog):
    folder.open()
    (folder.path / ".limits").write_text(json.dumps({"host": "a\nb\x1b[2J" * 90, "time": 5, "capacity": 1e300}))
    text = folder.stores[0]._limits.difference()
    assert text.isprintable()
    assert len(text) < 1000


@pytest.mark.parametrize("kind", [FsStore, SlabStore])
def test_a_directory_whose_record_cannot_be_written_takes_values(kind, tmp_path, value):
    layout = "files" if kind is FsStore else "slab"
    store = kind(FsConfig(type="fs", path=tmp_path / "v", capacity="64MiB", min_free=0, layout=layout))
    (tmp_path / "v" / ".limits").mkdir()
    store.write("ns/m/a", value(1))
    assert store.exists(["ns/m/a"]) == [True]
    store.close()
    assert [path.name for path in (tmp_path / "v").glob(".tmp-*")] == []
