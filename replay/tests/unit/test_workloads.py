"""The workload that is made up on the spot, and how requests of any workload come."""

import hashlib
import io
import os
import pathlib
import subprocess
import sys
from itertools import pairwise

import pytest

from kvtiers_replay.agent_workload import agent_workload
from kvtiers_replay.code_workload import CODE_TOKENS_PER_BLOCK, code_workload
from kvtiers_replay.rag_workload import rag_workload
from kvtiers_replay.workload import Arrivals, ReplayRequest, Workload, infinite_hits


def blocks_of(workload) -> list[tuple[bytes, ...]]:
    return [tuple(request.block_hashes) for request in workload.requests]


def test_the_same_seed_makes_the_same_requests_and_another_seed_others() -> None:
    assert blocks_of(code_workload(40, seed=3)) == blocks_of(code_workload(40, seed=3))
    assert blocks_of(code_workload(40, seed=3)) != blocks_of(code_workload(40, seed=4))


def test_more_requests_begin_with_the_same_ones() -> None:
    assert blocks_of(code_workload(30))[:20] == blocks_of(code_workload(20))


MADE_UP = pytest.mark.parametrize(
    ("made_up", "digest"),
    [(agent_workload, "e5d3c7ea857952c6"), (rag_workload, "a2a65d2627400996")],
)


@MADE_UP
def test_agents_and_retrieval_are_the_same_for_a_seed_and_begin_alike(made_up, digest) -> None:
    workload = made_up(60, seed=7)
    assert blocks_of(made_up(90, seed=7))[:60] == blocks_of(workload)
    assert blocks_of(made_up(60, seed=8)) != blocks_of(workload)
    content = [(request.arrival, request.num_tokens, request.output_tokens) for request in workload.requests]
    made = hashlib.sha256(repr(content).encode())
    for blocks in blocks_of(workload):
        made.update(b"".join(blocks))
    assert made.hexdigest()[:16] == digest


@MADE_UP
def test_their_requests_come_in_order_and_their_blocks_are_full(made_up, digest) -> None:
    workload = made_up(400)
    arrivals = [request.arrival for request in workload.requests]
    assert arrivals == sorted(arrivals)
    for request in workload.requests:
        assert len(request.block_hashes) == request.num_tokens // workload.tokens_per_block
        assert request.output_tokens > 0
    before_of: dict[bytes, bytes] = {}
    for blocks in blocks_of(workload):
        for before, block in pairwise(blocks):
            assert before_of.setdefault(block, before) == before


def test_agents_come_back_to_nearly_all_and_retrieval_to_little_but_the_system_prompt() -> None:
    def repeated(workload: Workload) -> float:
        return sum(infinite_hits(workload)) / sum(map(len, blocks_of(workload)))

    assert repeated(agent_workload(1500)) > 0.9
    assert 0.3 < repeated(rag_workload(1500)) < 0.55


def test_conversations_grow_turn_by_turn_and_share_documents() -> None:
    workload = code_workload(120)
    known: set[bytes] = set()
    repeated = 0
    for request in workload.requests:
        assert len(request.block_hashes) == request.num_tokens // CODE_TOKENS_PER_BLOCK
        repeated += len(known.intersection(request.block_hashes))
        known.update(request.block_hashes)
    references = sum(len(request.block_hashes) for request in workload.requests)
    assert 0.5 < repeated / references < 0.99
    prefixes = {request.block_hashes[-2:] for request in workload.requests}
    assert len(prefixes) > 100  # nearly every turn ends in text of its own


def test_a_hash_stands_for_the_whole_prefix() -> None:
    before_of: dict[bytes, bytes] = {}
    for blocks in blocks_of(code_workload(60)):
        assert len(set(blocks)) == len(blocks)
        for before, block in pairwise(blocks):
            assert before_of.setdefault(block, before) == before


def test_it_is_the_same_in_every_release_of_python_whatever_the_order_of_its_sets() -> None:
    made = hashlib.sha256(b"".join(block for blocks in blocks_of(code_workload(60, seed=7)) for block in blocks))
    assert made.hexdigest() == "ba33cbd888650daaf79dcec52b013314b403f34f26daa57614cc88be942c1073"
    script = (
        "from kvtiers_replay.code_workload import code_workload as w; print(w(9).requests[8].block_hashes[-1].hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert said == {code_workload(9).requests[8].block_hashes[-1].hex() + "\n"}


def test_it_reads_no_file(monkeypatch) -> None:
    def refuse(*_arguments, **_options):
        raise AssertionError("a file is read")

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr(pathlib.Path, "open", refuse)
    assert code_workload(5).requests


def test_an_infinite_cache_hits_every_prefix_that_came_before_but_never_a_whole_prompt() -> None:
    prompts = [(33, "ab"), (32, "ab"), (48, "abc"), (40, "xb"), (0, ""), (8, "")]
    workload = Workload("w", 16, [ReplayRequest(tokens, [c.encode() for c in blocks]) for tokens, blocks in prompts])
    assert infinite_hits(workload) == [0, 1, 2, 0, 0, 0]


def test_requests_come_at_their_times_and_as_much_faster_as_is_wished() -> None:
    now = 100.0
    requests = [(ReplayRequest(1, [], arrival), 0) for arrival in (20.0, 20.0, 26.0)]
    arrivals = Arrivals(requests, speed=3.0, first=20.0, clock=lambda: now)
    assert [arrivals.take(), arrivals.take(), arrivals.take()] == [*requests[:2], None]
    now = 101.9
    assert arrivals.take() is None
    assert not arrivals.exhausted
    now = 102.0
    assert arrivals.take() is requests[2]
    assert arrivals.exhausted
    assert arrivals.take() is None


def test_without_a_speed_all_requests_are_there_at_once() -> None:
    requests = [(ReplayRequest(1, [], arrival), 0) for arrival in (20.0, 9000.0)]
    arrivals = Arrivals(requests)
    assert [arrivals.take(), arrivals.take()] == requests
    assert arrivals.exhausted
