"""The what-if thread: beside an engine, within its share of a core and its memory, and never waited for."""

import hashlib
import threading
import time

import pytest

from kvtiers_policies.what_if.keys_only import Case, CaseTier
from kvtiers_policies.what_if.shadows import Shadows
from kvtiers_policies.what_if.what_if_thread import WhatIf

BLOCKS = [hashlib.sha256(bytes([number & 255, number >> 8])).digest() for number in range(400)]


SOON = 0.01
"""Figures at once, not each five seconds."""


def opened(rows: int = 100, core_share: float = 1.0, **more) -> WhatIf:
    now = Case(rows, "lru", (CaseTier("far", 1000),))
    return WhatIf(now, ["lru", "arc"], rows * 4096, 16, core_share=core_share, report_seconds=SOON, **more)


def runs() -> bool:
    """Whether there is such a thread: each test ends its own."""
    return any(thread.name == "kvtiers-what-if" for thread in threading.enumerate())


def wait_for(what_if: WhatIf, holds) -> dict:
    until = time.monotonic() + 60
    while not (report := what_if.report()) or not holds(report):
        assert time.monotonic() < until, report
        assert runs()
        threading.Event().wait(0.005)
    return report


def test_requests_are_served_in_every_shadow_and_reported() -> None:
    what_if = opened()
    assert what_if.report() == {}
    for _ in range(4):
        what_if.request(0.0, 50 * 16 + 3, 7, [BLOCKS[:50]], {})
    report = wait_for(what_if, lambda report: report["chunks"] == 200)
    assert report["hit_rates"]["lru"]["1"] == pytest.approx(0.75, abs=0.02)
    assert report["hit_rates"]["arc"]["8"] == pytest.approx(0.75, abs=0.02)
    assert report["adds"] == {"far": pytest.approx(0.0, abs=0.02)}
    assert (report["sampled"], report["dropped"], report["capacity"]) == (1.0, 0, 409600)
    what_if.close(60)
    assert not runs()


def test_chunks_of_several_blocks_have_the_hash_of_their_last_and_only_the_prompt_counts(monkeypatch) -> None:
    taken, take = [], Shadows.take
    monkeypatch.setattr(Shadows, "take", lambda shadows, asked: taken.append(asked) or take(shadows, asked))
    what_if = WhatIf(Case(100), ["lru"], 4096, 64, blocks_per_chunk=4, group=1, core_share=1.0, report_seconds=SOON)
    what_if.request(5.0, 128, 99, [[], BLOCKS[:40]], {"session": "a"})
    wait_for(what_if, lambda report: report["chunks"] == 2)
    what_if.close(60)
    (asked,) = taken
    assert (asked.hashes, asked.usable) == ([BLOCKS[3], BLOCKS[7]], 1), "the last token is always computed"
    assert (asked.arrival, asked.output_tokens, asked.params) == (5.0, 99, {"session": "a"})


def test_a_large_primary_has_a_small_sample_so_that_memory_is_bounded() -> None:
    what_if = opened(rows=1_000_000)
    what_if.request(0.0, 50 * 16, 0, [BLOCKS[:50]], {})
    assert wait_for(what_if, lambda _: True)["sampled"] == pytest.approx(1024 / 1_000_000)
    assert what_if._shadows._cases["lru 1"].primary == 1024
    what_if.close(60)


def test_it_sleeps_so_long_that_it_takes_its_share_of_a_core_at_most() -> None:
    what_if = opened(core_share=0.1, credit_seconds=0.0)
    begin = time.monotonic()
    for number in range(20):
        what_if.request(0.0, 50 * 16, 0, [BLOCKS[number : number + 50]], {})
    wait_for(what_if, lambda report: report["chunks"] == 1000)
    took = time.monotonic() - begin
    what_if.close(60)
    # The rest after the last request may still be to come.
    assert 0 < what_if.seconds * 0.95 <= 0.1 * took


def test_requests_that_come_faster_are_dropped_and_counted_and_the_caller_never_waits(monkeypatch) -> None:
    what_if = opened(most_waiting=100)
    begun, go_on = threading.Event(), threading.Event()

    def stuck(_shadows, _asked) -> None:
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(Shadows, "take", stuck)
    what_if.request(0.0, 50 * 16, 0, [BLOCKS[:50]], {})
    assert begun.wait(60)
    for _ in range(10):
        what_if.request(0.0, 50 * 16, 0, [BLOCKS[:50]], {})
    assert what_if.dropped == 8
    go_on.set()
    what_if.close(60)


def test_a_thread_that_is_behind_begins_again_with_half_the_sample(monkeypatch) -> None:
    what_if = opened(rows=512, most_waiting=300)
    begun, go_on = threading.Event(), threading.Event()
    take = Shadows.take

    def slow(shadows, asked):
        begun.set()
        go_on.wait(60)
        return take(shadows, asked)

    monkeypatch.setattr(Shadows, "take", slow)
    for _ in range(6):
        what_if.request(0.0, 50 * 16, 0, [BLOCKS[:50]], {})
        assert begun.wait(60)
    go_on.set()
    assert wait_for(what_if, lambda report: report["sampled"] < 1)["sampled"] == 0.5
    what_if.close(60)


def test_a_failure_ends_the_shadows_with_one_line_and_nothing_else(monkeypatch, caplog) -> None:
    what_if = opened()
    monkeypatch.setattr(Shadows, "take", lambda *_: 1 / 0)
    what_if.request(0.0, 50 * 16, 0, [BLOCKS[:50]], {})
    until = time.monotonic() + 60
    while runs():
        assert time.monotonic() < until, "it does not end"
        threading.Event().wait(0.005)
    what_if.request(0.0, 50 * 16, 0, [BLOCKS[:50]], {})
    assert what_if.dropped == 1
    what_if.close(60)
    (record,) = caplog.records
    assert record.getMessage() == "what if: the shadow caches have ended; a bug of kvtiers"
