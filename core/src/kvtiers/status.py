"""The status socket: a local socket on which an engine answers ``kvtiers status``, and only to its own user.

The socket is abstract, so nothing is left of it after any end, and named from the engine's process::

    @kvtiers-status-{pid}-{random, of the process}-{number}

A pid alone is no name: containers that share a network, as those of one pod do, see each other's sockets, and each
counts its processes from 1.

A client that connects gets one JSON object and the end of the stream; what it sends is not read. A thread of its own
makes the answers from figures that the engine's thread counts, so the engine never waits for a client. Once a second
it has the tiers looked after, for an engine that is idle: what it shows is then true of an idle engine, too.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtiers._failures import logged_boundary
from kvtiers.control import ControlSocket
from kvtiers.metrics import budget_advice
from kvtiers.region.connection import AcceptRate
from kvtiers.region.handshake import peer_credentials

__all__ = [
    "LastTrouble",
    "StatusSocket",
    "Troubles",
    "answer_status",
    "ask",
    "ask_engine",
    "figures_of_engine",
    "is_orphaned",
    "process_of",
    "running",
    "troubles_from_the_start",
]

_log = logging.getLogger("kvtiers.status")
_PREFIX = "kvtiers-status-"
_SEND_SECONDS = 2.0
_TEND_SECONDS = 1.0
_PAUSE_SECONDS = 0.1  # after a question that could not be taken
_LARGEST_ANSWER = 1 << 20
_AS_THEY_ARE = (
    "off",
    "shared",
    "hits",
    "tokens",
    "loads",
    "computing_seconds",
    "saved_seconds",
    "load_seconds",
    "loaded_bytes",
    "stored_chunks",
    "stored_bytes",
    "unread_bytes",
    "wait_expired",
    "recomputed_cheaper",
)
_OWN_NUMBERS = (
    "breaker_seconds",
    "waiting_calls",
    "silent_seconds",
    "not_taken",
    "not_taken_seconds",
    "taken_meanwhile",
    "missing",
)
"""Of a tier's own figures: what is not well, and for how long it has been so."""
_LATER_NUMBERS = (
    *_OWN_NUMBERS,
    "loaded_chunks",
    "failed_loads",
    "trouble_seconds",
    "computing_seconds",
    "saved_seconds",
)
"""What an engine that started before an upgrade may not say."""
_LONG_PARTS = ("commands", "what_if", "stats", "")  # of an answer, in the order in which they are left out
_OF_ENGINE = ("steps", "engine_seconds", "lookups", "primary_hits", "late_loads", "rows", "free_rows")
_NO_ANSWER = "what it says is no engine's answer"
_ENDED = ("answers again", "works again", "takes values again", "fast enough again", "its loads succeed again")
"""How the lines begin in which the log says that a tier's trouble has ended."""
_TEXTS = ("engine", "model")
_TIER_TEXTS = ("off", "trouble")
_TIER_NUMBERS = (
    "open", "breaker_state", "shared", "hits", "tokens", "loaded_bytes", "stored_bytes", "unread_bytes", "queue",
    "seal_failures", "wait_expired", "stored_chunks", "load_seconds",
)  # fmt: skip
_process = secrets.token_hex(4)
_numbers = iter(range(1 << 62))


class StatusSocket:
    """Answers with ``status()``, plain data, until it is closed. ``tend``: called about once a second."""

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        on_close: Callable[[], None] = lambda: None,
        tend: Callable[[], None] = lambda: None,
    ) -> None:
        self._status = status
        self._on_close = on_close
        self._tend = tend
        self._closed = threading.Event()
        self.name = f"{_PREFIX}{os.getpid()}-{_process}-{next(_numbers)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(4)
        self._socket.settimeout(_TEND_SECONDS)
        threading.Thread(target=self._serve, name="kvtiers-status", daemon=True).start()

    def close(self) -> None:
        """Close the socket and answer no further client."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone would not
        self._socket.close()
        self._on_close()

    def _serve(self) -> None:
        rate = AcceptRate()  # any user can connect in a loop, and this thread has the engine's interpreter meanwhile
        tend_at = time.monotonic()
        while not self._closed.is_set():
            if (now := time.monotonic()) >= tend_at:
                tend_at = now + _TEND_SECONDS
                with logged_boundary(_log, "the tiers cannot be looked after; a bug of kvtiers"):
                    self._tend()
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed.wait(_PAUSE_SECONDS):
                    return
                continue  # as without a descriptor to spare
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_SEND_SECONDS)
                _, uid = peer_credentials(connection)
                if uid in {0, os.getuid()}:
                    connection.sendall(self._answer())
            if (pause := rate.accepted(at_start=False)) and self._closed.wait(pause):
                return

    def _answer(self) -> bytes:
        with logged_boundary(_log, "kvtiers status cannot be answered; a bug of kvtiers") as answering:
            status = self._status()
            for part in _LONG_PARTS:
                answer = json.dumps(status, default=str).encode()
                if len(answer) <= _LARGEST_ANSWER:
                    break
                status.pop(part, None)  # else a client reads nothing, not even where commands go
            return answer
        return json.dumps({"error": answering.error}).encode()


class LastTrouble(logging.Handler):
    """A log handler that keeps a tier's last warning or error in one line; the tier's lines begin with its name.

    A line that says that a trouble has ended is none itself: it ends the one that is kept.
    """

    def __init__(self, tier: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._start = f"{tier}: "
        self._clock = clock
        self._at = 0.0
        self.text = ""
        self.is_over = False
        """The log has said since that it has ended."""

    @property
    def seconds(self) -> float:
        """How long ago it was logged."""
        return self._clock() - self._at if self.text else 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of this tier's."""
        text = record.getMessage()
        if not text.startswith(self._start):
            return
        text = _in_one_line(text.removeprefix(self._start))
        if text.startswith(_ENDED):
            self.is_over = True
        else:
            self.text, self.is_over, self._at = text, False, self._clock()


def _in_one_line(text: str) -> str:
    """Return a log line without its traceback, but with the exception in which that ends."""
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"


class Troubles:
    """Each tier's last warning or error in the log, from now on until it is closed."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._last = {name: LastTrouble(name) for name in tiers}
        for trouble in self._last.values():
            logging.getLogger("kvtiers").addHandler(trouble)

    def of(self, tier: str) -> LastTrouble:
        """Return a tier's last trouble; its text is "" as long as there was none."""
        if tier not in self._last:  # one that was attached later: from now on
            self._last[tier] = LastTrouble(tier)
            logging.getLogger("kvtiers").addHandler(self._last[tier])
        return self._last[tier]

    def close(self) -> None:
        """Listen to the log no longer."""
        for trouble in self._last.values():
            logging.getLogger("kvtiers").removeHandler(trouble)


@contextlib.contextmanager
def troubles_from_the_start(tiers: Sequence[str]) -> Iterator[Troubles]:
    """Keep the troubles of tiers that are opened within, also those of their start; closed only if that fails."""
    troubles = Troubles(tiers)
    try:
        yield troubles
    except BaseException:
        troubles.close()
        raise


def answer_status(
    engine: str,
    model: str,
    troubles: Troubles,
    figures: Callable[[], Mapping[str, Mapping[str, Any]]],
    *,
    namespace: str = "",
    fingerprint: Callable[[], str] = lambda: "",
    what_if: Callable[[], Mapping[str, Any]] = dict,
    control: ControlSocket | None = None,
    engine_figures: Callable[[], Mapping[str, float]] = dict,
    stats: Callable[[], Mapping[str, Any]] = dict,
    events: Callable[[], Mapping[str, Any]] = dict,
    tend: Callable[[], None] = lambda: None,
) -> StatusSocket:
    """Answer questions about an engine's tiers from now on. ``troubles``: closed with the answer.

    ``figures()``: by tier, the fields of ``TierMetrics``; ``own``: the tier's own figures; ``off``: why it is not used
    here, or ""; ``shared``, ``tokens``, ``saved_seconds``; and ``left_out_requests`` where there can be any.
    ``what_if()``: the report of the shadow caches, empty where there are none. ``control``: closed with the answer.
    ``engine_figures()``: of the engine itself, by ``figures_of_engine``, where there are any. ``stats()``: all that is
    counted, as a manager's, for ``kvtiers metrics``; empty: nothing. ``events()``: the report of the publisher of KV
    events, empty where there is none. ``tend``: looks after the tiers of an idle engine; called about once a second.
    """

    def status() -> dict[str, Any]:
        found = {name: _tier_status(known, troubles.of(name)) for name, known in figures().items()}
        return {
            "engine": engine,
            "pid": os.getpid(),
            "model": model,
            "namespace": namespace,
            "fingerprint": fingerprint(),
            "orphaned": is_orphaned(),
            "tiers": found,
            "what_if": dict(what_if()),
            "figures": dict(engine_figures()),
            "stats": dict(stats()),
            "events": dict(events()),
            "control": "" if control is None else control.name,
            "commands": [] if control is None else list(control.latest),
        }

    def close() -> None:
        troubles.close()
        if control is not None:
            control.close()

    return StatusSocket(status, close, tend)


def figures_of_engine(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return, of all that a tiering manager counts, what a screen of an engine shows besides its tiers."""
    found = {**stats["engine"], **stats["primary"]}
    return {name: found[name] for name in _OF_ENGINE if name in found}


def is_orphaned() -> bool:
    """Return whether the process that started this one, to answer for it, has ended: an engine whose server is gone."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def running() -> list[str]:
    """Return the names of all engines' sockets on this machine."""
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:  # noqa: PTH123 -- no file in a folder
            names = {line.split()[-1].removeprefix("@") for line in table if f" @{_PREFIX}" in line}
    except OSError:
        return []
    return sorted(names)


def process_of(name: str) -> str:
    """Return the part of a socket's name that identifies its process."""
    return name.rpartition("-")[0]


def ask(name: str, seconds: float = 2.0) -> dict[str, Any]:
    """Return what the process at this socket says; OSError or ValueError, with the reason, if it is nothing good."""
    return _ask(name, seconds)[0]


def ask_engine(name: str) -> dict[str, Any]:
    """Return an engine's answer, and whose it is (``uid``, from the kernel); OSError or ValueError as for ``ask``.

    Any user may have a socket of such a name: the answer has all that ``answer_status`` says, each of its kind.
    """
    status, uid = _ask(name, 2.0)
    if not _is_answer(status):
        raise ValueError(_NO_ANSWER)
    return status | {"uid": uid}


def _ask(name: str, seconds: float) -> tuple[dict[str, Any], int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(f"\0{name}")
        _, uid = peer_credentials(connection)
        if os.geteuid() not in {0, uid}:
            raise OSError(f"it is of user id {uid}; an engine answers only to its own user and to root")
        answer = b"".join(_received(connection, time.monotonic() + seconds))
    if not answer:
        raise OSError("it answers only to its own user and to root")
    try:
        status = _printable(json.loads(answer))
    except (ValueError, RecursionError):
        raise ValueError(_NO_ANSWER) from None
    if not isinstance(status, dict) or "error" in status:
        raise ValueError(status["error"] if isinstance(status, dict) else _NO_ANSWER)
    return status, uid


def _received(connection: socket.socket, until: float) -> Iterator[bytes]:
    size = 0
    while data := connection.recv(1 << 16):
        size += len(data)
        if size > _LARGEST_ANSWER:
            raise ValueError(f"more than {_LARGEST_ANSWER} bytes")
        yield data
        if time.monotonic() >= until:
            raise TimeoutError("it has not ended its answer in time")


def _printable(value: Any) -> Any:
    """Return plain data with nothing in its texts that a terminal would act on."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else "?" for letter in value)
    if isinstance(value, dict):
        return {_printable(name): _printable(inner) for name, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value


def _is_answer(status: Mapping[str, Any]) -> bool:
    if not (isinstance(status.get("tiers"), dict) and isinstance(status.get("pid"), int)):
        return False
    if not all(isinstance(status.get(name), str) for name in _TEXTS) or not isinstance(status.get("control", ""), str):
        return False
    if not _is_report(status.get("events", {})):
        return False
    figures = status.get("figures", {})  # an engine that started before an upgrade says neither of these
    if not (isinstance(figures, dict) and all(isinstance(figure, int | float) for figure in figures.values())):
        return False
    return all(
        isinstance(tier, dict)
        and all(isinstance(tier.get(name), str) for name in _TIER_TEXTS)
        and all(isinstance(tier.get(name), int | float) for name in _TIER_NUMBERS)
        and all(isinstance(tier.get(name, 0), int | float | None) for name in _LATER_NUMBERS)
        and all(isinstance(value, str | int | float | None) for value in tier.values())
        for tier in status["tiers"].values()
    )


def _is_report(events: Any) -> bool:
    """Return whether this is the report of a publisher of KV events, or says that there is none."""
    return isinstance(events, dict) and (
        not events
        or (
            all(isinstance(events.get(name), str) for name in ("endpoint", "error"))
            and all(isinstance(events.get(name), int) for name in ("batches", "chunks", "dropped_chunks"))
        )
    )


def _switch(figures: Mapping[str, Any]) -> str:
    if figures.get("switched_off"):
        return "off"
    return "read-only" if figures.get("switched_read_only") else "on"


def _tier_status(figures: Mapping[str, Any], trouble: LastTrouble) -> dict[str, Any]:
    own = figures["own"]
    asked = figures.get("lookups", 0) + figures["stored_chunks"]
    status = {name: figures[name] for name in _AS_THEY_ARE} | {
        "open": bool(own.get("open", 0)),
        "breaker_state": int(own.get("breaker_state", 0)),
        "queue": figures["loading_chunks"] + own.get("storing_chunks", 0),
        "full": bool(own.get("full", 0)),
        "refusing": bool(own.get("refusing", 0)),
        "too_slow": bool(figures.get("too_slow", 0)),
        **{name: figures.get(name, 0) for name in ("loaded_chunks", "failed_loads")},
        **{name: own.get(name, 0) for name in _OWN_NUMBERS},
        "seal_failures": own.get("seal_failures", 0),
        "trouble": trouble.text,
        "trouble_seconds": trouble.seconds,
        "trouble_is_over": trouble.is_over,
        "written_chunks": max(0, figures["stored_chunks"] - own.get("already_present", 0)),
        "budget": budget_advice(figures, asked),
        "switch": _switch(figures),
    }
    if "left_out_requests" in figures:
        status["left_out_requests"] = figures["left_out_requests"]
    return status
