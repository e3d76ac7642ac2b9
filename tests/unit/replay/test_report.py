"""What a replay says."""

import io
import json

from kvtiers.replay.progress import show_progress
from kvtiers.replay.report import Link, ReplayReport

TIERS = {
    "memory": {"hits": 30, "stored_bytes": 2048, "store_seconds": 0.5, "loaded_bytes": 4096, "load_seconds": 0.0},
    "fs": {"hits": 10, "stored_bytes": 0, "store_seconds": 0.0, "loaded_bytes": 0, "load_seconds": 0.0},
}


def report(**figures) -> ReplayReport:
    values = {
        "requests": 3,
        "references": 200,
        "prefix_hits": 120,
        "loaded": 100,
        "gpu_hits": 20,
        "infinite_hits": 130,
        "tokens": 1000,
        "tokens_saved": 600,
        "seconds": 2.0,
        "links": {"gpu -> primary": Link(1 << 30, 0.5)},
    }
    made = ReplayReport("t", 9, **(values | figures))
    made.take_tiers(TIERS)
    return made


def test_json_is_one_object_with_the_promised_names() -> None:
    assert json.loads(report().as_json()) == {
        "references": 200,
        "prefix_hits": 120,
        "hits": {"gpu": 20, "primary": 60, "memory": 30, "fs": 10},
        "wrong_bytes": 0,
        "bytes": {
            "gpu -> primary": 1 << 30,
            "primary -> memory": 2048,
            "memory -> primary": 4096,
            "primary -> fs": 0,
            "fs -> primary": 0,
        },
        "seconds": 2.0,
    }


def test_an_engine_without_a_prefix_cache_has_no_hits_in_it() -> None:
    assert "gpu" not in report(gpu_hits=None).hits


def test_the_table_has_hit_rates_links_and_wrong_bytes() -> None:
    rows = {what.strip(): (number.strip(), rate.strip()) for what, number, rate in report().rows()}
    assert rows["prefix hits"] == ("120", "60.0 %")
    assert rows["an infinite cache's"] == ("130", "65.0 %")
    assert rows["from memory"] == ("30", "15.0 %")
    assert rows["tokens not recomputed"] == ("600", "60.0 %")
    assert rows["gpu -> primary"] == ("1GiB", "2.15 GB/s")
    assert rows["wrong bytes"] == ("0", "")
    assert "failed loads, stores" not in rows


def test_the_verdict_says_what_happened() -> None:
    assert "all bytes are right" in report().verdict()
    assert "Stopped after 3 of 9 requests" in report(interrupted=True).verdict()
    assert report(wrong_bytes=7).verdict().startswith("WRONG: 7 bytes")


def test_an_empty_report_can_be_shown() -> None:
    empty = ReplayReport("t", 9)
    assert empty.rows()
    assert empty.progress_line()
    assert json.loads(empty.as_json())["hits"] == {"primary": 0}


def test_without_a_terminal_progress_is_a_plain_line_at_times() -> None:
    stream = io.StringIO()
    times = iter([0.0, 1.0, 5.0, 6.0, 9.9, 10.0])
    with show_progress(stream, clock=lambda: next(times)) as update:
        for _ in range(5):
            update(report())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("3/9 requests, 0 wrong bytes, hits 60.0 % (gpu 10.0 %, primary 30.0 %, memory 15.0 %")
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_progress_is_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with show_progress(stream) as update:
        update(report())
    assert "3/9 requests" in stream.getvalue()
