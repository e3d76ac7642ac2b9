"""What a replay says in a terminal."""

import io
import subprocess
import sys

from kvtiers.metrics import Histogram
from kvtiers_replay.engine.measures import Progress
from kvtiers_replay.report.text import heading, own_figures, progress_line, show_progress, tables
from kvtiers_replay.results import Latencies, Link, OverTime, ReplayResults, TimeToFirstToken

PROGRESS = Progress(3, 9, 200, 0, {"gpu": 20, "primary": 60, "memory": 30, "fs": 10})


def results(**figures) -> ReplayResults:
    values = {
        "requests": 3,
        "requests_in_all": 9,
        "references": 200,
        "prefix_hits": 120,
        "infinite_hits": 130,
        "hits": {"gpu": 20, "primary": 60, "memory": 30, "fs": 10},
        "tokens": 1000,
        "tokens_saved": 600,
        "seconds": 2.0,
        "links": {"gpu -> primary": Link(1 << 30, 0.5), "primary -> fs": Link()},
    }
    return ReplayResults("t", **(values | figures))


def shown(made: ReplayResults) -> dict[str, list[str]]:
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for table in tables(made) for row in table.rows}


def test_the_tables_have_hit_rates_links_and_wrong_bytes() -> None:
    rows = shown(results())
    assert rows["prefix hits"] == ["120", "60.0 %"]
    assert rows["an infinite cache's"] == ["130", "65.0 %"]
    assert rows["from memory"] == ["30", "15.0 %"]
    assert rows["tokens not recomputed"] == ["600", "60.0 %"]
    assert rows["gpu -> primary"] == ["1GiB", "2.15 GB/s"]
    assert rows["primary -> fs"] == ["0B", ""]
    assert rows["wrong bytes"] == ["0", ""]


def test_above_an_infinite_cache_there_is_nothing_to_compare_with_but_a_warm_store() -> None:
    rows = shown(results(prefix_hits=150, warm=True))
    assert rows["an infinite cache's"] == ["-", "the store was warm"]
    assert rows["prefix hits"] == ["150", "75.0 %"]


def test_a_tiers_own_figures_are_shown_for_each_engine_without_those_that_are_zero() -> None:
    one = shown(results(own_figures={"fs": [{"held_bytes": 4096.0, "retries": 0}]}))
    assert one["held_bytes"] == ["4,096"]
    assert "retries" not in one
    two = tables(results(own_figures={"fs": [{"held_bytes": 0.5}, {"held_bytes": 12.0}]}))
    (table,) = [table for table in two if table.columns[0].startswith("fs")]
    assert table.columns == ("fs, its own figures", "engine 0", "engine 1")
    assert [cell.strip() for cell in table.rows[0]] == ["held_bytes", "0.5", "12"]


def test_a_tiers_last_warning_is_shown() -> None:
    assert shown(results(last_troubles={"fs": "no space"}))["fs"] == ["no space"]


def test_what_did_not_happen_is_not_spoken_of() -> None:
    rows = shown(results())
    assert not {"preemptions", "lookup"} & set(rows)
    rows = shown(results(preemptions=2, errors={"fs: chunks not stored": 3}))
    assert rows["fs: chunks not stored"] == ["3"]
    assert rows["preemptions"] == ["2", ""]


def test_times_have_their_percentiles_in_units_that_people_read() -> None:
    lookup = Latencies.of_samples([0.0005] * 98 + [0.002, 3.0])
    estimate = TimeToFirstToken(8000.0, Latencies.of_samples([0.5]), Latencies.of_samples([1.5]))
    rows = shown(results(latencies={"lookup": lookup}, first_token=estimate))
    assert rows["lookup"] == ["500 us", "2 ms", "3 s"]
    assert rows["first token at 8,000 tokens/s, with tiers"] == ["500 ms"] * 3
    assert rows["first token at 8,000 tokens/s, without"] == ["1.5 s"] * 3


def test_a_percentile_of_a_histogram_is_said_to_be_at_most_its_bucket_s_edge() -> None:
    histogram = Histogram()
    for _ in range(99):
        histogram.observe(0.003)
    read = Latencies.of_histogram(histogram.as_data())
    assert shown(results(latencies={"lookup": read}))["lookup"] == ["at most 3.91 ms"] * 3
    histogram.observe(1e6)
    read = Latencies.of_histogram(histogram.as_data())
    assert shown(results(latencies={"lookup": read}))["lookup"][2].startswith("over ")
    assert own_figures(results(own_figures={"fs": [{"retries": 0}], "far": [{"retries": 1, "lost": 0}]})) == [
        ("far", [("retries", "1")])
    ]


def test_hits_over_time_are_shares_of_what_was_asked_for_then() -> None:
    over_time = OverTime(
        [float(at) for at in range(1, 21)], {"fs": [0.25, 0.75, *[None] * 18]}, {"fs: chunks": [5.0] * 20}
    )
    rows = shown(results(over_time=over_time))
    assert rows["hits from fs"] == ["50 %", *["-"] * 9]
    assert rows["fs: chunks"] == ["5"] * 10


def test_an_empty_report_can_be_shown() -> None:
    empty = ReplayResults("t", requests_in_all=9)
    assert tables(empty)
    assert heading(empty) == "Replay of t: 0 requests in 0.0 s"
    assert progress_line(Progress(0, 9, 0, 0, {}))


def test_without_a_terminal_progress_is_a_plain_line_at_times() -> None:
    stream = io.StringIO()
    times = iter([0.0, 1.0, 5.0, 6.0, 9.9, 10.0])
    with show_progress(stream, clock=lambda: next(times)) as update:
        for _ in range(5):
            update(PROGRESS)
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
        update(PROGRESS)
    assert "3/9 requests" in stream.getvalue()


def test_what_draws_is_imported_only_where_a_page_or_a_picture_is_written() -> None:
    script = (
        "import sys, kvtiers_replay.cli.plan, kvtiers_replay.cli.replay, kvtiers_replay.run; "
        "print([name for name in ('matplotlib', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
