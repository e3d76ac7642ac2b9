"""The span writer: makes OpenTelemetry's spans of what was recorded, and sends them, on a thread of its own.

    kvtiers.request            from the request's start to its end in the engine; below the caller's span, if it has one
      kvtiers.lookup           from the first question to the answer that stands
      kvtiers.load             from a tier into rows (a job), and from rows to the GPU (tier "primary")
      kvtiers.store            from the GPU into rows (tier "primary"), and from rows into a tier (a job)

The decision about a request was made before, on the engine's thread: what comes here is all sent. Nothing waits for
this thread: while a receiver is slow, the queue fills; what finds no room in it and what no receiver takes is counted.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from kvtiers._failures import log_with_backoff, logged_boundary
from kvtiers.api import ConfigError
from kvtiers.tracing.spans import Span, SpanQueue, TracedRequest
from kvtiers.types import RequestContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["SpanWriter", "otlp_exporter"]

_log = logging.getLogger("kvtiers.tiering")
_LOOK_SECONDS = 0.2  # between looks into the queue: the engine's thread wakes none
_MOST_AT_ONCE = 512  # spans in one message


def otlp_exporter(endpoint: str | None) -> "SpanExporter":
    """Return OpenTelemetry's exporter to this URL, or to that of its environment variables.

    ConfigError in one line if the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"tracing: OpenTelemetry cannot be imported ({error}): pip install 'kvtiers[otel]', or remove 'tracing'"
        ) from None
    return OTLPSpanExporter(endpoint=endpoint)


class SpanWriter:
    """Sends spans until ``close``. ``exporter``: OpenTelemetry's, called by this thread alone."""

    def __init__(self, queue: SpanQueue, exporter: "SpanExporter", engine: str = "") -> None:
        # An extra, so imported only where it is wanted; here, since importing takes the interpreter for long.
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended = self._ended = list["ReadableSpan"]()

        class _Gather(SpanProcessor):
            def on_end(self, span: "ReadableSpan") -> None:
                ended.append(span)

        resource = Resource.create({"kvtiers.engine": engine} if engine else {})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "kvtiers"}))
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(_Gather())
        self._tracer = provider.get_tracer("kvtiers")
        self._below = set_span_in_context
        self._context = TraceContextTextMapPropagator().extract
        self._queue = queue
        self._exporter = exporter
        self._since_monotonic = time.time_ns() - time.monotonic_ns()
        self._roots: set[TracedRequest] = set()
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtiers-spans", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Spans that are missing at the receiver."""
        return self._queue.lost

    def begin(self, context: RequestContext) -> TracedRequest | None:
        """Return the record of a request that is new here, if it is in the sample."""
        return self._queue.begin(context)

    def close(self, timeout: float) -> None:
        """Send what was recorded, for ``timeout`` seconds at most, and end."""
        self._stop.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._exporter.shutdown()  # which ends its pauses between attempts
            self._thread.join(_LOOK_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            with logged_boundary(_log, "tracing: spans cannot be made; a bug of kvtiers"):
                self._write()
        with logged_boundary(_log, "tracing: the last spans cannot be sent"):
            self._write()
            for request in self._roots:
                request.root.end()
            self._send()
            self._exporter.shutdown()

    def _write(self) -> None:
        for span in self._queue.take():
            root = self._root_of(span.request)
            if span.name != "request":
                self._make(span, root)
        for request in [request for request in self._roots if request.ended]:
            request.root.end(self._wall(request.ended))
            self._roots.remove(request)
        self._send()

    def _root_of(self, request: TracedRequest) -> Any:
        if request.root is None:
            parent = self._context({"traceparent": request.context.traceparent})
            attributes = {"kvtiers.request_id": request.context.request_id}
            request.root = self._tracer.start_span(
                "kvtiers.request", parent, attributes=attributes, start_time=self._wall(request.began)
            )
            self._roots.add(request)
        return request.root

    def _make(self, span: Span, root: Any) -> None:
        attributes: dict[str, str | int] = {
            "kvtiers.request_id": span.request.context.request_id,
            "kvtiers.tier": span.tier,
            "kvtiers.chunks": span.chunks,
            "kvtiers.moved_chunks": span.moved,
            "kvtiers.bytes": span.nbytes,
            "kvtiers.outcome": span.outcome,
        }
        made = self._tracer.start_span(
            f"kvtiers.{span.name}", self._below(root), attributes=attributes, start_time=self._wall(span.began)
        )
        made.end(self._wall(span.ended))

    def _wall(self, monotonic: int) -> int:
        return monotonic + self._since_monotonic

    def _send(self) -> None:
        ended = self._ended.copy()
        self._ended.clear()
        for start in range(0, len(ended), _MOST_AT_ONCE):
            self._send_some(ended[start : start + _MOST_AT_ONCE])

    def _send_some(self, spans: "Sequence[ReadableSpan]") -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001 -- an exporter of any kind: nothing of it ends this thread
            sent = False
        if sent:
            self._failures = 0
            return
        self._queue.unsent += len(spans)
        self._failures += 1
        log_with_backoff(self._failures, _log.warning, "tracing: %d spans were not taken by the receiver", len(spans))
