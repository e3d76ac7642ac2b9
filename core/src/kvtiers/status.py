"""What an engine says of its tiers: the action ``status`` of its control socket, and the reader of its answer.

A thread of the socket's makes the answer from figures that the engine's thread counts, so the engine never waits for a
client.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtiers.control import (
    LARGEST_ANSWER,
    NO_ANSWER,
    REMEMBERED,
    Action,
    CommandRefused,
    ControlSocket,
    Request,
    send_to,
)
from kvtiers.metrics import budget_advice

__all__ = [
    "ANSWER_SECONDS",
    "LastTrouble",
    "Troubles",
    "answer_status",
    "ask",
    "ask_engine",
    "figures_of_engine",
    "is_orphaned",
    "troubles_from_the_start",
]

ANSWER_SECONDS = 10.0
"""How long an engine's answer is waited for: a machine may be so busy, and engines are asked side by side."""
_LONG_PARTS = ("commands", "what_if", "stats")  # of an answer, in the order in which they are left out
_OF_ENGINE = (
    "steps", "engine_seconds", "lookups", "primary_hits", "late_loads", "unusable_prefixes", "rows", "free_rows",
    "pool",
)  # fmt: skip
_ENDED = ("answers again", "works again", "takes values again", "fast enough again", "its loads succeed again")
"""How the lines begin in which the log says that a tier's trouble has ended."""
_AS_THEY_ARE = (
    "off", "shared", "hits", "tokens", "loads", "computing_seconds", "saved_seconds", "load_seconds", "loaded_bytes",
    "stored_chunks", "stored_bytes", "unread_bytes", "wait_expired", "recomputed_cheaper",
)  # fmt: skip
_OWN_NUMBERS = (
    "breaker_seconds", "waiting_calls", "silent_seconds", "not_taken", "not_taken_seconds", "taken_meanwhile",
    "missing",
)  # fmt: skip
"""Of a tier's own figures: what is not well, and for how long it has been so."""
_NUMBER = int | float
_LARGEST_NUMBER = 2**64
_ENGINE_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("engine", "model", "namespace", "fingerprint"), str),
    **dict.fromkeys(("pid", "orphaned"), int),
    **dict.fromkeys(("figures", "events", "tiers"), dict),
    "actions": list,
}
_TIER_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("off", "trouble", "budget", "switch"), str),
    **dict.fromkeys(
        (
            *_AS_THEY_ARE[1:], *_OWN_NUMBERS, "open", "breaker_state", "queue", "full", "refusing", "too_slow",
            "loaded_chunks", "failed_loads", "seal_failures", "trouble_seconds", "trouble_is_over", "written_chunks",
        ),
        _NUMBER,
    ),
    "left_out_requests": _NUMBER | None,  # only where there can be any
    "retired": _NUMBER | None,  # missing in the answer of an engine from before this field
}  # fmt: skip
_EVENTS_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("endpoint", "error"), str),
    **dict.fromkeys(("batches", "chunks", "dropped_chunks"), int),
}


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
    stats: Callable[[], Mapping[str, Any]],
    about: Callable[[str, Mapping[str, Any]], Mapping[str, Any]],
    *,
    namespace: str = "",
    fingerprint: Callable[[], str] = lambda: "",
    actions: Mapping[str, Action] | None = None,
    tend: Callable[[], None] = lambda: None,
) -> ControlSocket:
    """Answer an engine's operator from now on. ``troubles``: closed with the socket.

    ``stats()``: all that is counted, as ``TieringManager.stats``. ``about(tier, figures)``: what that does not have of
    a tier: ``off``: why it is not used here, or ""; ``shared``, ``tokens``; and ``left_out_requests`` where there can
    be any. ``actions``: what the engine does besides. ``tend``: looks after the tiers of an idle engine.
    """
    actions = actions or {}
    latest: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)

    def status(request: Request) -> tuple[str, Mapping[str, Any]]:
        request.end()
        counted = stats()
        tiers = {
            name: _tier_status({**figures, **about(name, figures)}, troubles.of(name))
            for name, figures in counted["tiers"].items()
        }
        return "", _bounded(
            {
                "engine": engine,
                "pid": os.getpid(),
                "model": model,
                "namespace": namespace,
                "fingerprint": fingerprint(),
                "orphaned": is_orphaned(),
                "tiers": tiers,
                "what_if": dict(counted.get("what_if", {})),
                "figures": figures_of_engine(counted),
                "stats": counted,
                "events": dict(counted.get("events", {})),
                "actions": list(actions),
                "commands": list(latest),
            }
        )

    return ControlSocket({**actions, "status": status}, tend=tend, on_close=troubles.close, latest=latest)


def _bounded(status: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without the parts for which it would be too long to be read."""
    for part in _LONG_PARTS:
        if len(json.dumps(status, default=str)) < LARGEST_ANSWER - 1024:  # the rest of its line
            break
        status.pop(part, None)
    return status


def figures_of_engine(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return, of all that a tiering manager counts, what a screen of an engine shows besides its tiers."""
    found = {**stats["engine"], **stats["primary"]}
    return {name: found[name] for name in _OF_ENGINE if name in found}


def is_orphaned() -> bool:
    """Return whether the process that started this one, to answer for it, has ended: an engine whose server is gone."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def ask(name: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Return what the process at this control socket says; CommandRefused, in one line, if it is nothing good."""
    return _ask(name, seconds)[0]


def ask_engine(name: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Return an engine's answer; CommandRefused as for ``ask``.

    Any user may have a socket of such a name: the answer has all that ``answer_status`` says, each of its kind. With
    it: whose it is (``uid``, from the kernel), and where it takes commands (``control``), "" if it takes none.
    """
    status, uid = _ask(name, seconds)
    if not _is_answer(status):
        raise CommandRefused(NO_ANSWER)
    return status | {"uid": uid, "control": name if status.get("actions") else ""}


def _ask(name: str, seconds: float) -> tuple[dict[str, Any], int]:
    answer, uid = send_to(name, "status", seconds, seconds)
    status = answer.get("result")
    if not isinstance(status, dict):
        raise CommandRefused(NO_ANSWER)
    return status, uid


def _is_answer(status: Mapping[str, Any]) -> bool:
    """Return whether each part of an answer that the commands read is of its kind."""
    return (
        _has(_ENGINE_SHAPE, status)
        and all(_has(_TIER_SHAPE, tier) and _is_flat(tier) for tier in status["tiers"].values())
        and all(_is_number(figure) for figure in status["figures"].values())
        and (status["events"] == {} or _has(_EVENTS_SHAPE, status["events"]))
    )


def _has(shape: Mapping[str, Any], data: Any) -> bool:
    return isinstance(data, dict) and all(isinstance(data.get(name), kind) for name, kind in shape.items())


def _is_flat(data: Mapping[str, Any]) -> bool:
    return all(isinstance(value, str | None) or _is_number(value) for value in data.values())


def _is_number(value: Any) -> bool:
    """Return whether it is a number that can be shown: JSON has ones that no float can be."""
    return isinstance(value, _NUMBER) and abs(value) < _LARGEST_NUMBER


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
        "retired": bool(figures.get("out_of_use", 0)),
    }
    if "left_out_requests" in figures:
        status["left_out_requests"] = figures["left_out_requests"]
    return status
