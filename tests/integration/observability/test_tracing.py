"""Spans of a whole engine, as a receiver of OpenTelemetry's protocol gets them; an engine whose receiver is away."""

import http.server
import json
import subprocess
import sys
import threading
from collections import Counter

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TIERS = """\
version: 1
primary: {capacity: 256KiB}
secondary:
  - {type: fs, path: FOLDER, capacity: 64MiB}
tracing: {sample: SAMPLE, endpoint: "http://127.0.0.1:PORT/v1/traces"}
"""
REQUESTS = 40


class Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted to it, in its server."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def receiver():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def replayed(folder, port, sample):
    """Serve prompts, each of them twice; the replay's own report."""
    text = TIERS.replace("FOLDER", str(folder / "fs")).replace("PORT", str(port)).replace("SAMPLE", str(sample))
    (folder / "tiers.yaml").write_text(text)
    with (folder / "trace.jsonl").open("w") as lines:
        for number in range(REQUESTS):
            ids = [f"{number % (REQUESTS // 2)}.{place}" for place in range(6)]
            lines.write(json.dumps({"timestamp": number, "input_length": 3073, "hash_ids": [*ids, "rest"]}) + "\n")
    command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "replay", "--json"]
    options = ["--config", "tiers.yaml", "--trace", "trace.jsonl", "--bytes-per-chunk", "4032"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def spans_in(received):
    return [
        (span, {each.key: each.value.string_value or each.value.int_value for each in span.attributes})
        for _, message in received
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_every_lookup_load_and_store_of_an_engine_reaches_the_receiver(tmp_path, receiver):
    report, _ = replayed(tmp_path, receiver.server_address[1], 1)
    assert {path for path, _ in receiver.received} == {"/v1/traces"}
    spans = spans_in(receiver.received)
    counted = Counter(span.name for span, _ in spans)
    assert counted["kvtiers.request"] == REQUESTS
    assert counted["kvtiers.lookup"] >= REQUESTS
    assert counted["kvtiers.load"] > 0
    nbytes = Counter()
    for span, facts in spans:
        if span.name in {"kvtiers.load", "kvtiers.store"}:
            nbytes[span.name, facts["kvtiers.tier"]] += facts["kvtiers.bytes"]
    links = {link: moved["nbytes"] for link, moved in report["links"].items()}
    assert nbytes["kvtiers.store", "primary"] == links["gpu -> primary"] > 0
    assert nbytes["kvtiers.store", "fs"] == links["primary -> fs"] > 0
    assert nbytes["kvtiers.load", "fs"] == links["fs -> primary"] > 0
    assert nbytes["kvtiers.load", "primary"] == links["primary -> gpu"] > 0
    roots = {span.span_id: span for span, _ in spans if span.name == "kvtiers.request"}
    for span, _ in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.name != "kvtiers.request":
            assert roots[span.parent_span_id].trace_id == span.trace_id


def test_a_receiver_that_is_away_costs_spans_and_nothing_else(tmp_path, receiver):
    """Its port is one on which nothing listens."""
    receiver.shutdown()
    receiver.server_close()
    _, errors = replayed(tmp_path, receiver.server_address[1], 1)
    assert "tracing:" in errors
    assert "were not taken by the receiver" in errors
