"""``kvtiers metrics``: the figures of all engines on this machine as one page for Prometheus, printed or served.

For engines that have no such page, as a replay. It asks the control sockets for their status, so an engine makes and
serves no page: a thread of its socket answers with plain data. Any user may have a socket of such a name, and root
asks them all: so a figure is taken only under a name that core has, and with a value of the metric's type.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeGuard

import click

from kvtiers.api import KvtiersError
from kvtiers.control import SOCKET_PREFIX, CommandRefused, OfAnotherUser, process_of, running
from kvtiers.metrics import Found, Histogram, described, families
from kvtiers.status import ANSWER_SECONDS, ask_engine

__all__ = ["OF_THE_PAGE", "figures_of", "is_what_if", "metrics"]

_PAGE_SECONDS = 5.0  # for the engines' answers: Prometheus itself waits 10 s for the page
_AT_ONCE = 8  # engines that are asked: one that hangs takes the time of its own answer
_MOST_OWN = 256  # figures of a tier's own store
OF_THE_PAGE = {
    "kvtiers_engines": "Engines on this machine that answered.",
    "kvtiers_silent_engines": "Engines on this machine that gave no good answer.",
}
"""What the page says of itself, by the names of its own metrics."""
_KINDS = {(each.part, each.figure): each.type for each in described()}


@click.command(
    epilog="""\b
Examples:
  kvtiers metrics --listen 127.0.0.1:9464      for a scrape of http://127.0.0.1:9464/metrics
  kvtiers metrics --listen :9464               on every address of the machine
  kvtiers metrics                              print the page once, as for a textfile collector

vLLM's own /metrics has them, too. Each time the page is asked for, every engine on this machine that runs as
the same user is asked (root asks all); the label 'engine' distinguishes them. Needs the extra kvtiers[metrics].
Exit status: 0, or 2 if the address is wrong or taken; Ctrl-C or SIGTERM ends it."""
)
@click.option("--listen", metavar="[HOST]:PORT", help="Serve the page here until Ctrl-C; port 0: any free one.")
@click.option("--engine", type=int, metavar="PID", help="Only the engine of this process.  [default: all]")
def metrics(listen: str | None, engine: int | None) -> None:
    """Serve the figures of this machine's engines to Prometheus, or print them once."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest, start_http_server
    except ImportError:
        raise KvtiersError("kvtiers metrics needs prometheus_client: pip install 'kvtiers[metrics]'") from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Engines(engine, ANSWER_SECONDS if listen is None else _PAGE_SECONDS))
    if listen is None:
        click.echo(generate_latest(registry).decode(), nl=False)
        return
    host, port = _address(listen)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise KvtiersError(f"--listen {listen}: {error.strerror or error}; give another address or port") from None
    click.echo(f"serving http://{_in_a_url(host)}:{server.server_port}/metrics", err=True)
    try:
        threading.Event().wait()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"expected [HOST]:PORT, as 127.0.0.1:9464, got {text!r}", param_hint="'--listen'")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 -- as asked for


def _in_a_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Engines:
    """The collector of all engines that answer within ``seconds``, or of those of one process."""

    def __init__(self, pid: int | None, seconds: float) -> None:
        self._seconds = seconds
        self._start = SOCKET_PREFIX if pid is None else f"{SOCKET_PREFIX}{pid}-"

    def collect(self) -> Iterator[Any]:
        """Yield the families of all their figures, and how many gave no answer."""
        from prometheus_client.core import GaugeMetricFamily

        names = [name for name in running() if name.startswith(self._start)]
        with ThreadPoolExecutor(_AT_ONCE) as asking:
            answers = list(asking.map(partial(_answer, seconds=self._seconds), names))
        found = [
            each for name, answer in zip(names, answers, strict=True) if answer for each in figures_of(name, answer)
        ]
        yield from families(found)
        counts = (len(found), sum(answer is None for answer in answers))
        for (name, text), count in zip(OF_THE_PAGE.items(), counts, strict=True):
            yield GaugeMetricFamily(name, text, count)


def _answer(name: str, seconds: float) -> dict[str, Any] | None:
    """Return an engine's answer: None if it gives none, empty if it is another user's or has ended meanwhile."""
    try:
        return ask_engine(name, seconds)
    except OfAnotherUser:
        return {}
    except CommandRefused:
        return None if name in running() else {}


def figures_of(name: str, answer: Mapping[str, Any]) -> list[Found]:
    """Return what an engine counts, by its answer to ``status``; nothing of one that says it in another form.

    An engine whose tiers have a socket each, as under vLLM's own tiering, is one engine.
    """
    stats = answer.get("stats")
    if not isinstance(stats, dict) or not all(
        isinstance(stats.get(part), dict) for part in ("engine", "primary", "tiers")
    ):
        return []
    tiers = {
        tier: _good("tier", figures) | {"own": _own_of(figures)}
        for tier, figures in stats["tiers"].items()
        if isinstance(figures, dict)
    }
    engine = _good("", stats["engine"])
    good: dict[str, Any] = {"engine": engine, "primary": _good("primary", stats["primary"]), "tiers": tiers}
    if is_what_if(stats.get("what_if")):
        good["what_if"] = stats["what_if"]
    number = name if engine else process_of(name)
    return [({"engine": number.removeprefix(SOCKET_PREFIX), "model": answer["model"]}, good)]


def _good(part: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if _is_good(_KINDS.get((part, name)), value)}


def _is_good(kind: str | None, value: Any) -> bool:
    if kind == "histogram":
        return isinstance(value, dict) and _is_number(value.get("sum")) and _are_counts(value.get("buckets"))
    return kind is not None and _is_number(value)


def _are_counts(buckets: Any) -> bool:
    expected = len(Histogram.bounds) + 1
    return isinstance(buckets, Sequence) and len(buckets) == expected and all(map(_is_number, buckets))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _own_of(figures: Mapping[str, Any]) -> dict[str, float]:
    own = figures.get("own")
    numbers = {name: value for name, value in own.items() if _is_number(value)} if isinstance(own, dict) else {}
    return dict(list(numbers.items())[:_MOST_OWN])


def is_what_if(report: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether an engine's answer has the shadow caches' report in it, each part of its kind."""
    if not isinstance(report, dict) or not all(isinstance(report.get(name), dict) for name in ("hit_rates", "adds")):
        return False
    rates = [rate for of in report["hit_rates"].values() for rate in (of.values() if isinstance(of, dict) else [None])]
    numbers = (
        *rates,
        *report["adds"].values(),
        *(report.get(name) for name in ("infinite", "sampled", "chunks", "dropped", "seconds")),
    )
    return all(map(_is_number, numbers))
