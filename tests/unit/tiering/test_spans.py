"""Spans: of a request in the sample each lookup, load and store, with tier and bytes; of others, and off, nothing."""

import gc
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtiers.api import ConfigError
from kvtiers.config import load_config
from kvtiers.tiering.engine_side import Watchers
from kvtiers.tracing.span_writer import SpanWriter, otlp_exporter
from kvtiers.tracing.spans import SpanQueue, TracedRequest
from kvtiers.types import RequestContext

from .harness import Bench, chain

NBYTES = 1000
SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = SAMPLED[:-2] + "00"


class Traced:
    """A bench whose requests are in the sample, and what became of their spans."""

    def __init__(self, exporter=None, **options):
        self.queue = SpanQueue(options.pop("sample", 1.0), [NBYTES])
        self.exporter = exporter or InMemorySpanExporter()
        self.writer = SpanWriter(self.queue, self.exporter, "an-engine")
        self.bench = Bench(watchers=Watchers(tracing=self.writer), **options)

    def end(self):
        """Return all spans, by name."""
        self.writer.close(30)
        found = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name.removeprefix("kvtiers."), []).append(span)
        return found


@pytest.fixture
def make():
    made = []

    def make(*arguments, **options):
        made.append(Traced(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.writer.close(30)


def facts(span):
    own = {name.removeprefix("kvtiers."): value for name, value in span.attributes.items()}
    return own["tier"], own["chunks"], own["moved_chunks"], own["bytes"], own["outcome"]


def test_what_a_request_looked_up_loaded_and_stored_is_one_trace_with_tiers_and_bytes(make):
    one = make()
    bench = one.bench
    wanted = chain("0", 4)
    bench.store(wanted, bench.request("first"))
    bench.forget()
    ctx = bench.request("second")
    assert bench.lookup(wanted, ctx)[1] == 4
    bench.settle()
    assert bench.lookup(wanted, ctx) == (4, 0, False)
    assert bench.load(wanted, ctx)
    bench.manager.on_request_finished(ctx)
    found = one.end()
    stores = {facts(span)[0]: span for span in found["store"]}
    assert facts(stores["primary"]) == ("primary", 4, 4, 4 * NBYTES, "ok")
    tier, chunks, moved, nbytes, outcome = facts(stores["a"])
    assert (tier, chunks, moved, outcome) == ("a", 4, 4, "ok")
    assert nbytes == bench.figures("a")["stored_bytes"]
    (lookup,) = found["lookup"]
    assert facts(lookup) == ("a", 4, 4, 4 * NBYTES, "hit")
    loads = {facts(span)[0]: span for span in found["load"]}
    assert facts(loads["a"])[1:3] == (4, 4)
    assert facts(loads["primary"]) == ("primary", 4, 4, 4 * NBYTES, "ok")
    (root,) = [span for span in found["request"] if span.attributes["kvtiers.request_id"] == "second"]
    for span in (lookup, *loads.values()):
        assert span.parent.span_id == root.context.span_id
        assert span.context.trace_id == root.context.trace_id
        assert root.start_time <= span.start_time <= span.end_time
        assert span.attributes["kvtiers.request_id"] == "second"
    assert lookup.end_time >= loads["a"].end_time, "the lookup's span includes the wait for the load"
    assert root.end_time >= loads["primary"].end_time
    assert root.resource.attributes["service.name"] == "kvtiers"
    assert root.resource.attributes["kvtiers.engine"] == "an-engine"


def test_a_prompt_with_windows_is_one_span_a_group(make):
    one = make(rows=64, tokens_per_chunk=(16, 16), windows=(0, 4))
    bench = one.bench
    prompt = [chain("0", 8, group) for group in (0, 1)]
    bench.store([*prompt[0], *prompt[1][4:]], bench.request("first"))
    bench.forget()
    ctx = bench.request("second")
    for _ in range(2):
        found = bench.reach(prompt, ctx)
        bench.settle()
    assert found == (128, 0, False)
    bench.manager.on_request_finished(ctx)
    assert [facts(span)[1:3] for span in one.end()["lookup"]] == [(8, 8), (4, 4)]


def test_a_store_that_ends_after_its_request_is_still_its(make):
    one = make(hold=True)
    bench = one.bench
    ctx = bench.request("early")
    bench.manager.complete_store(bench.begin_store(chain("0", 2), ctx))
    bench.step()
    bench.manager.on_request_finished(ctx)
    bench.tier["a"].end_all()
    bench.settle()
    found = one.end()
    (root,) = found["request"]
    (late,) = [span for span in found["store"] if facts(span)[0] == "a"]
    assert late.parent.span_id == root.context.span_id
    assert late.end_time > root.end_time


def test_a_job_that_is_given_up_says_why_and_is_one_span(make):
    one = make(hold=True)
    bench = one.bench
    ctx = bench.request()
    bench.manager.complete_store(bench.begin_store(chain("0", 2), ctx))
    bench.step()
    bench.step(1e6)
    bench.step()
    bench.tier["a"].end_all()
    bench.settle()
    (given_up,) = [facts(span) for span in one.end()["store"] if facts(span)[0] == "a"]
    assert given_up == ("a", 2, 0, 0, "did not end within 30s")


def test_a_job_that_no_tier_takes_is_a_span_that_failed(make):
    one = make()
    bench = one.bench
    bench.tier["a"].raises.add("submit_store")
    bench.store(chain("0", 2))
    assert [facts(span)[2:] for span in one.end()["store"] if facts(span)[0] == "a"] == [(0, 0, "failed")]


def test_a_miss_and_a_store_without_room_are_spans_too(make):
    one = make(rows=4)
    bench = one.bench
    ctx = bench.request()
    assert bench.lookup(chain("0", 3), ctx) == (0, 0, False)
    assert bench.lookup(chain("0", 3), ctx) == (0, 0, False)
    assert bench.manager.prepare_store(chain("0", 8), ctx) is None
    found = one.end()
    assert [facts(span) for span in found["lookup"]] == [("", 3, 0, 0, "miss")], "the same answer again is no span"
    assert [facts(span) for span in found["store"]] == [("primary", 8, 0, 0, "no room")]


@pytest.mark.parametrize(
    ("sample", "parent", "is_in"),
    [
        (0.0, SAMPLED, True),
        (1.0, NOT_SAMPLED, False),
        (0.0, "", False),
        (1.0, "nonsense", True),
        (1.0, SAMPLED[:-2] + "zz", True),
    ],
)
def test_a_trace_context_decides_where_there_is_one_else_chance(make, sample, parent, is_in):
    one = make(sample=sample)
    ctx = RequestContext("r", {}, parent)
    one.bench.manager.on_new_request(ctx)
    one.bench.store(chain("0", 1), ctx)
    one.bench.manager.on_request_finished(ctx)
    found = one.end()
    assert bool(found) is is_in
    if parent == SAMPLED:
        (root,) = found["request"]
        assert f"{root.context.trace_id:032x}" == SAMPLED[3:35]
        assert f"{root.parent.span_id:016x}" == SAMPLED[36:52]


def test_a_share_of_the_requests_is_in_the_sample(make):
    one = make(sample=0.25)
    one.queue._chance = iter([n % 100 / 100 for n in range(200)]).__next__
    for number in range(200):
        one.bench.manager.on_request_finished(one.bench.request(f"s{number}"))
    assert len(one.end()["request"]) == 50


def test_nothing_is_kept_of_requests_that_are_over(make):
    one = make()
    for number in range(20):
        one.bench.store(chain(f"{number}", 2))
        one.bench.manager.on_request_finished(one.bench.request())
    one.end()
    assert not one.writer._roots
    gc.collect()
    left = [each for each in gc.get_objects() if isinstance(each, TracedRequest) and each.spans is one.queue]
    assert not left


class Refusing(SpanExporter):
    def __init__(self, answer):
        self.answer = answer

    def export(self, spans):
        if self.answer is None:
            raise OSError("away")
        return self.answer


@pytest.mark.parametrize("answer", [None, SpanExportResult.FAILURE])
def test_what_no_receiver_takes_is_counted_and_said_once(make, answer, caplog):
    one = make(Refusing(answer))
    one.bench.store(chain("0", 2))
    one.writer.close(30)
    assert one.bench.figures()["dropped_spans"] == 3
    assert caplog.text.count("spans were not taken by the receiver") == 1


def test_what_finds_no_room_in_the_queue_is_counted():
    queue = SpanQueue(1.0, [NBYTES], most_waiting=2)
    writer = SpanWriter(queue, InMemorySpanExporter())
    writer.close(30)  # so that nothing is taken from the queue
    bench = Bench(watchers=Watchers(tracing=writer))
    bench.store(chain("0", 2))
    assert len(queue.take()) == 2
    assert bench.figures()["dropped_spans"] == 1


OFF = """
import sys
import numpy as np
import kvtiers
layout = kvtiers.CacheLayout(
    kvtiers.ModelIdentity("m", weights="w"), (kvtiers.KVGroup("g", 16),), (kvtiers.KVTensor("t", 0, 4096),)
)
config = {"version": 1, "primary": {"capacity": "1MiB"}, **eval(sys.argv[1])}
manager = kvtiers.open_manager(kvtiers.load_config(config), layout)
threads = [thread.name for thread in __import__("threading").enumerate()]
manager.shutdown(1)
print("opentelemetry" in sys.modules, "kvtiers.tracing.spans" in sys.modules, "kvtiers-spans" in threads)
"""


@pytest.mark.parametrize(("config", "is_on"), [({}, False), ({"tracing": {"sample": 0}}, True)])
def test_off_nothing_of_it_is_imported_and_no_thread_runs(config, is_on):
    done = subprocess.run([sys.executable, "-c", OFF, repr(config)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == 3 * [str(is_on)]


def test_without_the_extra_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtiers\[otel\]', or remove 'tracing'"):
        otlp_exporter(None)


@pytest.mark.parametrize("options", [{"sample": 1.5}, {"sample": -1}, {"endpoint": "localhost:4318"}, {"sampel": 1}])
def test_a_wrong_option_is_one_line(options):
    with pytest.raises(ConfigError) as refused:
        load_config({"version": 1, "primary": {"capacity": "1MiB"}, "tracing": options})
    (line,) = refused.value.problems
    assert "tracing" in line
