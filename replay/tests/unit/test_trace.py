"""Traces: what a good line becomes, and what is said about a bad one."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers_replay.trace import chain_hashes, read_trace


def line(tokens: int, ids: list, timestamp: int = 0) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": tokens, "output_length": 9, "hash_ids": ids}) + "\n"


GOOD = line(1500, [0, 1, 2], 2500) + "\n" + line(1024, [0, 7], 2600)


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_only_full_blocks_are_replayed_and_the_name_does_not_decide_how_it_is_read(tmp_path, pack) -> None:
    path = tmp_path / "some_trace"
    path.write_bytes(pack(GOOD.encode()))
    workload = read_trace(path)
    first, second = workload.requests
    assert (first.num_tokens, len(first.block_hashes), first.arrival) == (1500, 2, 2.5)
    assert (second.num_tokens, len(second.block_hashes)) == (1024, 2)
    assert (workload.name, workload.tokens_per_block, workload.longest) == ("some_trace", 512, 2)


def test_equal_hashes_mean_equal_whole_prefixes() -> None:
    assert chain_hashes([1, 2, 3])[:2] == chain_hashes([1, 2, 4])[:2]
    assert chain_hashes([1, 2, 3])[2] != chain_hashes([1, 2, 4])[2]
    assert chain_hashes([5, 2])[1] != chain_hashes([1, 2])[1]


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path) -> None:
    whole = read_trace_of(tmp_path, GOOD)
    for length in range(1, len(GOOD.splitlines()[-1])):
        assert len(read_trace_of(tmp_path, GOOD + line(1024, [0, 7], 2600)[:length])) == len(whole) == 2


def read_trace_of(folder, text: str):
    (folder / "cut.jsonl").write_text(text)
    return read_trace(folder / "cut.jsonl").requests


def test_requests_come_in_the_order_of_their_arrival(tmp_path) -> None:
    requests = read_trace_of(tmp_path, line(1024, [0, 1], 9) + line(512, [2], 3))
    assert [request.arrival for request in requests] == [0.003, 0.009]


def test_blocks_of_another_size_are_read_and_must_be_the_same_throughout(tmp_path) -> None:
    small = '{"timestamp": 0, "input_length": 40, "hash_ids": [1, 2, 3], "tokens_per_block": 16}\n'
    assert len(read_trace_of(tmp_path, small)[0].block_hashes) == 2
    with pytest.raises(ConfigError, match="'tokens_per_block' is 512, expected that of the first line, 16"):
        read_trace_of(tmp_path, small + GOOD)


@pytest.mark.parametrize(
    ("tokens", "ids", "said"),
    [
        (500, 8, "'hash_ids' has 8 entries, but 500 tokens are 1 block of 512 tokens ('tokens_per_block'); are they"),
        (500, 7, 'are they of 64? Then put "tokens_per_block": 64 into its lines, or give --tokens-per-block 64'),
        (12_000, 750, "but 12000 tokens are 24 blocks of 512 tokens ('tokens_per_block'); are they of 16?"),
        (5_000, 50, "; are they of 100?"),
        (1024, 1, "'hash_ids' has 1 entry, but 1024 tokens are 2 blocks of 512 tokens ('tokens_per_block'); are they"),
        (1024, 0, "'hash_ids' has 0 entries, but 1024 tokens are 2 blocks of 512 tokens ('tokens_per_block')"),
    ],
)  # fmt: skip
def test_blocks_of_another_size_are_never_taken_for_ours_but_named(tmp_path, tokens, ids, said) -> None:
    """Ids that are cut to fewer and longer blocks made 99.7 % hits of 31.9 %."""
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + line(tokens, list(range(ids))) + GOOD)
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{path}:4: ")
    assert said in problem


def test_the_size_of_blocks_may_be_given_and_must_be_what_lines_say(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line(500, list(range(8))))
    found = read_trace(path, tokens_per_block=64)
    assert (found.tokens_per_block, len(found.requests[0].block_hashes)) == (64, 7)
    path.write_text('{"input_length": 40, "hash_ids": [1, 2, 3], "tokens_per_block": 16}\n')
    assert read_trace(path, tokens_per_block=16).tokens_per_block == 16
    with pytest.raises(ConfigError, match="'tokens_per_block' is 16, but --tokens-per-block 64 was given"):
        read_trace(path, tokens_per_block=64)


@pytest.mark.parametrize("units", [1e3, 1e6, 1e9])
def test_times_since_1970_are_read_in_the_unit_that_their_size_says(tmp_path, units) -> None:
    begin = 1_764_000_000
    lines = line(512, [1], int(begin * units)) + line(512, [2], int((begin + 60) * units))
    first, second = read_trace_of(tmp_path, lines)
    assert second.arrival - first.arrival == pytest.approx(60)


def test_hints_and_the_length_of_the_answer_are_read_where_they_are(tmp_path) -> None:
    with_hints = {"input_length": 512, "hash_ids": [1], "output_length": 40, "session": "s", "session_ends": True}
    lines = [json.dumps(fields) for fields in (with_hints, {"input_length": 512, "hash_ids": [2]})]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    first, second = read_trace(tmp_path / "t.jsonl").requests
    assert (first.params, first.output_tokens) == ({"session": "s", "session_ends": True}, 40)
    assert (second.params, second.output_tokens) == ({}, 0)


def test_only_the_wanted_requests_are_read(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + "this is never reached\n")
    assert len(read_trace(path, limit=2).requests) == 2


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("{", "this is no JSON"),
        ("[1]", "a JSON list, not an object"),
        ("{}", "'input_length' is missing, not a whole number of 0 or more"),
        (line(-1, []), "'input_length' is -1, not a whole number of 0 or more"),
        (line(True, []), "'input_length' is True"),
        ('{"input_length": 1024}', "'hash_ids' is missing"),
        (line(1024, [[]]), "'hash_ids' is not a list of ids"),
        (line(600, [1, 2], timestamp=-4), "'timestamp' is -4, not whole milliseconds of 0 or more"),
        (line(600, [1, 2], timestamp=61.114), "'timestamp' is 61.114, not whole milliseconds of 0 or more"),
    ],
)
def test_a_malformed_line_is_one_clear_line_with_file_and_number(tmp_path, bad, text) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + bad + "\n")
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{path}:4: ")
    assert text in problem
    assert problem.endswith("; expected a line of a Mooncake trace")
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read the trace: No such file or directory"),
        (b"", "the trace has no request with a full block of 512 tokens"),
        (line(100, [0]).encode(), "the trace has no request with a full block"),
        (gzip.compress(GOOD.encode() * 999, mtime=0)[:-20], "cannot read the trace: "),
        (gzip.compress(GOOD.encode(), mtime=0)[:12] + b"\xff" * 30, "cannot read the trace: "),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_line(tmp_path, content, text) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{path}: {text}")
    assert "\n" not in problem


@settings(deadline=None, max_examples=200)
@given(noise=st.binary(max_size=60), at=st.integers(0, len(GOOD)), cut=st.integers(0, 40))
def test_no_damage_to_a_trace_is_more_than_a_config_error(tmp_path_factory, noise, at, cut) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "trace"
    good = GOOD.encode()
    path.write_bytes(good[:at] + noise + good[at + cut :])
    try:
        read_trace(path)
    except ConfigError as error:
        assert len(error.problems) == 1  # noqa: PT017 -- either outcome is right, a third is not
