"""What the offload scheduler says of chunks for KV events: each once, before its store, with its request's tokens."""

import pytest

from .harness import TOKENS, Bench, layout_of


class Listener:
    """An ``EventSide`` that keeps what it is given, in order."""

    def __init__(self):
        self.heard = []

    def describe(self, chunks):
        self.heard += chunks

    def take(self, changes):
        self.heard += [key for change in changes for key in change.keys]

    def cleared(self):
        self.heard.append("cleared")


@pytest.fixture
def bench():
    bench = Bench(layout_of())
    bench.manager._event_sides = (Listener(),)
    bench.scheduler._describes = bench.manager.wants_descriptions
    return bench


@pytest.fixture
def heard(bench):
    return bench.manager._event_sides[0].heard


def test_each_chunk_is_described_once_before_its_event(bench, heard):
    request = bench.request("a", 3 * TOKENS + 1)
    object.__setattr__(request, "token_ids", list(range(3 * TOKENS + 1)))
    bench.serve(request)
    described, events = heard[:3], heard[3:]
    hashes = request.block_hashes[0]
    assert [chunk.hashes for chunk in described] == [[each] for each in hashes]
    assert [chunk.parent for chunk in described] == [None, *hashes[:2]]
    assert [list(chunk.tokens) for chunk in described] == [
        list(range(start, start + TOKENS)) for start in (0, TOKENS, 2 * TOKENS)
    ]
    assert sorted(events) == sorted(chunk.key for chunk in described)


def test_a_request_without_tokens_is_described_by_its_hashes(bench, heard):
    bench.serve(bench.request("a", TOKENS))
    assert list(heard[0].tokens) == []
    assert heard[0].hashes


def test_what_is_only_looked_up_is_described_too_and_again_after_a_reset(bench, heard):
    request = bench.request("a", 2 * TOKENS + 1)
    bench.lookup(request)
    assert len(heard) == 2
    bench.scheduler.reset_cache()
    bench.lookup(request)
    assert heard[2] == "cleared"
    assert [chunk.key for chunk in heard[3:]] == [chunk.key for chunk in heard[:2]]


def test_without_events_nothing_is_described():
    bench = Bench(layout_of())
    assert not bench.manager.wants_descriptions
    assert not bench.scheduler._describes
