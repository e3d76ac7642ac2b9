"""The recording of an engine's requests: whole lines, keyed hashes, within its bounds, and never in the way."""

import json
import logging
import os
import stat
import threading

import pytest

from kvtiers.layout.tenants import Tenants
from kvtiers.recorder import Recorder
from kvtiers_replay.trace import read_trace

BLOCKS = [bytes([number]) * 32 for number in range(40)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_a_line_of_a_mooncake_trace_for_its_owner_alone(path) -> None:
    recorder = Recorder(path, 1 << 20, 512, clock=lambda: 100.0)
    recorder.request(100.25, 1100, 1130, [BLOCKS[:2]])
    recorder.request(101.5, 1024, 1024, [BLOCKS[:2]])
    recorder.close(60)
    first, second = lines(path)
    assert list(first) == ["timestamp", "input_length", "output_length", "hash_ids"]
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (250, 1100, 30)
    assert len(first["hash_ids"]) == 3  # the last stands for the 76 tokens that are not a full block
    assert second["hash_ids"] == first["hash_ids"][:2]
    assert all(0 <= number < 2**53 for number in first["hash_ids"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_equal_prompts_have_other_ids_in_another_recording_and_no_hash_stands_in_the_file(path) -> None:
    for _ in range(2):
        recorder = Recorder(path, 1 << 20, 16)
        recorder.request(0.0, 32, 32, [BLOCKS[1:3]])
        recorder.close(60)
    other = path.with_name("trace-1.jsonl")
    ids, others = lines(path)[0]["hash_ids"], lines(other)[0]["hash_ids"]
    assert not set(ids) & set(others)
    for block in BLOCKS[1:3]:
        for size in (6, 7, 8):
            assert str(int.from_bytes(block[:size], "little")) not in path.read_text()


def test_blocks_of_another_size_are_said_and_only_the_prompts_blocks_count(path) -> None:
    recorder = Recorder(path, 1 << 20, 64, group=1)
    recorder.request(0.0, 130, 400, [[], BLOCKS[:6]])
    recorder.close(60)
    (line,) = lines(path)
    assert line["tokens_per_block"] == 64
    assert len(line["hash_ids"]) == 3
    workload = read_trace(path)
    assert workload.tokens_per_block == 64
    assert len(workload.requests[0].block_hashes) == 2


def test_blocks_that_are_not_full_are_equal_to_no_other(path) -> None:
    recorder = Recorder(path, 1 << 20, 16)
    for _ in range(2):
        recorder.request(0.0, 40, 40, [BLOCKS[:2]])
    recorder.close(60)
    first, second = (line["hash_ids"] for line in lines(path))
    assert first[:2] == second[:2]
    assert len({*first, *second}) == 4


def test_nothing_is_made_before_the_first_request(path) -> None:
    Recorder(path, 1 << 20, 16).close(60)
    assert not path.exists()


def test_at_max_bytes_it_ends_with_a_whole_line_and_says_so(path, caplog) -> None:
    recorder = Recorder(path, 1000, 16)
    for _ in range(50):
        recorder.request(0.0, 320, 320, [BLOCKS[:20]])
    with caplog.at_level(logging.WARNING, "kvtiers.record"):
        recorder.close(60)
    assert path.stat().st_size <= 1000
    assert len(lines(path)) == recorder.recorded >= 1
    assert "max_bytes is reached" in caplog.text
    assert f"after {recorder.recorded} requests" in caplog.text


def test_a_disk_that_is_full_leaves_no_half_line(path, caplog, monkeypatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: 7 if path.stat().st_size > 200 else None]))
    recorder = Recorder(path, 1 << 20, 16)
    for _ in range(20):
        recorder.request(0.0, 48, 48, [BLOCKS[:3]])
    recorder.close(60)
    assert 1 < len(lines(path)) < 20
    assert "no space left" in caplog.text


@pytest.mark.parametrize("where", ["no/such/folder/trace.jsonl", "link.jsonl"])
def test_a_file_that_cannot_be_made_is_one_line_in_the_log_and_no_more(tmp_path, caplog, where) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "elsewhere")
    recorder = Recorder(tmp_path / where, 1 << 20, 16)
    for _ in range(3):
        recorder.request(0.0, 48, 48, [BLOCKS[:3]])
    recorder.close(60)
    assert not (tmp_path / "elsewhere").exists()  # a link is not followed: the recording has another name
    if where.startswith("no"):
        assert len(caplog.records) == 1
        assert "cannot be written: No such file or directory" in caplog.text


def test_when_writing_is_slow_requests_are_dropped_and_counted_without_a_wait(path, caplog, monkeypatch) -> None:
    goes_on = threading.Event()
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: goes_on.wait() and write(file, data))
    recorder = Recorder(path, 1 << 20, 16, most_waiting=50)
    for _ in range(100):
        recorder.request(0.0, 160, 160, [BLOCKS[:10]])
    assert recorder.dropped == 96, "of eleven blocks each, four fit"
    goes_on.set()
    recorder.close(60)
    assert len(lines(path)) == recorder.recorded == 100 - recorder.dropped
    assert f"{recorder.dropped} requests are missing" in caplog.text


def test_recordings_side_by_side_have_files_of_their_own(path) -> None:
    recorders = [Recorder(path, 1 << 20, 16) for _ in range(4)]
    for _ in range(20):
        for recorder in recorders:
            recorder.request(0.0, 48, 48, [BLOCKS[:3]])
    for recorder in recorders:
        recorder.close(60)
    files = sorted(path.parent.iterdir())
    assert len(files) == 4
    assert [len(lines(file)) for file in files] == [20] * 4


def test_hints_are_columns_and_a_session_has_an_id_of_the_recordings_own(path) -> None:
    recorder = Recorder(path, 1 << 20, 512)
    said = {"session": "alice-1", "session_ends": True, "expects_turn_in": 2.5, "kv_load_tiers": ["s3"]}
    recorder.request(0.0, 512, 530, [BLOCKS[:1]], {"session": "alice-1"})
    recorder.request(1.0, 1024, 1030, [BLOCKS[:2]], said)
    recorder.request(2.0, 512, 512, [BLOCKS[5:6]], {"session": 7, "session_ends": "yes"})
    recorder.close(60)
    first, second, third = lines(path)
    assert set(first) - {"session"} == set(third) == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert first["session"] == second["session"]
    assert (second["session_ends"], second["expects_turn_in"]) == (True, 2.5)
    assert "alice" not in path.read_text()
    assert "s3" not in path.read_text()
    requests = read_trace(path).requests
    assert [request.params.get("session") for request in requests] == [first["session"], first["session"], None]
    assert requests[1].params == {"session": first["session"], "session_ends": True, "expects_turn_in": 2.5}
    assert [request.output_tokens for request in requests] == [18, 6, 0]


def test_a_tenant_is_a_column_by_an_id_of_the_recordings_own_and_is_replayed_as_one(path) -> None:
    recorder = Recorder(path, 1 << 20, 512)
    for tenant in ("blue", "red", "blue", 7):
        recorder.request(0.0, 512, 530, [BLOCKS[:1]], {"kvtiers_tenant": tenant})
    recorder.close(60)
    columns = [line.get("tenant") for line in lines(path)]
    assert columns[0] == columns[2] != columns[1]
    assert columns[3] is None
    assert "blue" not in path.read_text()
    requests = read_trace(path).requests
    assert [Tenants("prod").of(request.params) for request in requests] == [*columns[:3], ""]
    first, other, same, none = (request.block_hashes for request in requests)
    assert first == same
    assert len({first[0], other[0], none[0]}) == 3
