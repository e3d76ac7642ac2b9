"""The control socket: a local socket on which an engine takes its operator's commands, number 1 of their format.

Abstract, as the status socket beside it, and named in that one's answer, so that ``kvtiers ctl`` finds it. An engine
answers only its own user and root, by the kernel's word (SO_PEERCRED). One connection is one command, and one line
each way::

    client   {"kvtiers_control": 1, "action": "switch", "seconds": 10.0, "tier": "fs", "to": "off"}
    engine   {"kvtiers_control": 1, "text": "fs: off, it was on", "result": {"tier": "fs", ...}}
    or       {"kvtiers_control": 1, "error": "there is no tier 'sf'; this engine has fs"}

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
accept             refuses other users; at a bounded rate, as any user can connect in a loop
one a command      reads the command, has the engine's step do it, waits for that within the command's seconds
the engine's       works on what was posted to its ``CommandQueue``; never waits for any of these
=================  ==========================================================================================
"""

import contextlib
import json
import logging
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtiers._failures import error_text
from kvtiers.api import ConfigError
from kvtiers.api.keys import OffloadKey
from kvtiers.api.units import format_size
from kvtiers.layout.storage_name import check_tenant
from kvtiers.region.connection import AcceptRate
from kvtiers.region.handshake import peer_credentials
from kvtiers.tiering.command_queue import Command, CommandRefused

if TYPE_CHECKING:  # the command line, which has this module for what it sends, has no engine
    from kvtiers.tiering.engine_side import LiveSide
    from kvtiers.tiering.manager import TieringManager

__all__ = ["CONTROL_FORMAT", "Action", "CommandRefused", "ControlSocket", "EngineActions", "Request", "send_command"]

CONTROL_FORMAT = 1
_log = logging.getLogger("kvtiers.control")
_PREFIX = "kvtiers-control-"
_LONGEST_LINE = 1 << 16
_READ_SECONDS = 2.0  # for a client to send its command, and to take its answer
_REST_SECONDS = 0.2  # for the rest of a line that is too long
_LATE_SECONDS = 1.0  # for a command that has begun when its time is over: a step's work on it takes microseconds
_MOST_SECONDS = 3600.0
_AT_ONCE = 16  # commands; the others wait in the socket's backlog
_BACKLOG = 256
_PAUSE_SECONDS = 0.1
_REMEMBERED = 20
_LONGEST_NOTE = 500
_FEWEST_DIGITS = 8  # of a fingerprint: fewer may be a slip
_UNNOTED = frozenset({"warm-keys"})  # which come all the time; the begin and the end of a warm-up are noted
_RATES = ("bytes_per_second", "requests_per_second")
_process = secrets.token_hex(4)
_numbers = iter(range(1 << 62))

Action = Callable[["Request"], tuple[str, Mapping[str, Any]]]
"""Carries a command out; returns a line for people and plain data. CommandRefused, in one line, if it does not."""


class Request:
    """One command's arguments, checked as they are read; ``seconds``: until when its client waits."""

    def __init__(self, arguments: Mapping[str, Any], until: float) -> None:
        self._arguments = dict(arguments)
        self.until = until

    @property
    def seconds(self) -> float:
        """How long the client still waits."""
        return max(0.0, self.until - time.monotonic())

    def text(self, name: str) -> str:
        """Return an argument that is a text; CommandRefused if it is missing or is none."""
        value = self._arguments.pop(name, None)
        if not isinstance(value, str) or not value:
            raise CommandRefused(f"{name!r} is {value!r}; expected a text")
        return value

    def number(self, name: str, *, default: float | None = None) -> float | None:
        """Return an argument that is a number of at least 0, or null; ``default`` where it is not given."""
        value = self._arguments.pop(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise CommandRefused(f"{name!r} is {value!r}; expected a number")
        return value

    def whole(self, name: str) -> int:
        """Return an argument that is a whole number."""
        number = self.number(name)
        if number is None or number != int(number):
            raise CommandRefused(f"{name!r} is {number!r}; expected a whole number")
        return int(number)

    def flag(self, name: str) -> bool:
        """Return an argument that is true or false; False where it is not given."""
        value = self._arguments.pop(name, False)
        if not isinstance(value, bool):
            raise CommandRefused(f"{name!r} is {value!r}; expected true or false")
        return value

    def keys(self, name: str) -> list[list[OffloadKey]]:
        """Return an argument that is a list of lists of keys in hexadecimal digits."""
        value = self._arguments.pop(name, None)
        try:
            return [[bytes.fromhex(key) for key in keys] for keys in value or ()]
        except (TypeError, ValueError):
            raise CommandRefused(f"{name!r} is no list of lists of keys in hexadecimal digits") from None

    def has(self, name: str) -> bool:
        """Return whether an argument is given."""
        return name in self._arguments

    def end(self) -> None:
        """Refuse arguments that the action does not have, such as those of a later release."""
        if self._arguments:
            raise CommandRefused(f"this engine's release has no argument {', '.join(map(repr, self._arguments))}")


class EngineActions:
    """The actions of an engine with a tiering manager."""

    def __init__(self, manager: "TieringManager", model: str) -> None:
        self._manager = manager
        self._model = model
        self._commands = manager.commands

    def actions(self) -> dict[str, Action]:
        """Return the actions by name."""
        actions: dict[str, Action] = {"switch": self._switch, "drain": self._drain, "clear": self._clear}
        actions |= _WarmUpActions(self._manager, self.in_step).actions()
        if self._manager.live is not None:
            live = _LiveActions(self._manager.live, self.in_step)
            actions |= {"limit": live.limit, "reload": live.reload, "attach": live.attach, "detach": live.detach}
        return actions

    def _switch(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        tier, to = request.text("tier"), request.text("to")
        request.end()
        done = self.in_step(request, lambda: self._manager.operations.switch(tier, to))
        said = f"{tier}: {done['is']}, it was {done['was']}"
        if done["cancelled_chunks"]:
            said += f"; {done['cancelled_chunks']} chunks that it was to load are misses"
        if done["is"] != "on" and done["running_jobs"]:
            said += f"; {done['running_jobs']} jobs run to their end"
        return said, done

    def _drain(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        request.end()
        done = self.in_step(request, self._manager.operations.drain(), "its stores go on")
        said = f"drained: {done['stored_chunks']} chunks were stored meanwhile, {done['failed_chunks']} were not"
        if done["memory_only_chunks"]:
            said += f"; {done['memory_only_chunks']} wait in memory for 'admission: on_eviction'"
        return said, done

    def _clear(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        of = {name: request.text(name) for name in ("fingerprint", "model", "tenant") if request.has(name)}
        request.end()
        if len(of) != 1:
            raise CommandRefused("give one of fingerprint, model and tenant; nothing was changed")
        ((what, wanted),) = of.items()
        if what == "tenant":
            return self._clear_tenant(request, wanted)
        done = self.in_step(request, partial(self._clear_if, what, wanted))
        return f"{done['cleared_chunks']} chunks forgotten; what the tiers hold stays: 'kvtiers store' removes it", done

    def _clear_tenant(self, request: Request, tenant: str) -> tuple[str, Mapping[str, Any]]:
        try:
            check_tenant(tenant)
        except ConfigError as error:
            raise CommandRefused(f"{error}; nothing was changed") from None
        if not self._manager.tenants.is_on:
            raise CommandRefused("this engine's config has no 'tenants', so no chunk is one's; nothing was changed")
        unfinished = "chunks that are in use stay until they are free; clear it again"
        done = self.in_step(request, self._manager.operations.clear_tenant(tenant), unfinished)
        text = "chunks of tenant {!r} forgotten; what the tiers hold stays: 'kvtiers store prune --tenant' removes it"
        return f"{done['cleared_chunks']} {text.format(tenant)}", done

    def _clear_if(self, what: str, wanted: str) -> dict[str, Any]:
        """Clear the primary, if all that it has is of this fingerprint or model; engine's thread."""
        names = {"fingerprint": self._manager.fingerprint(), "model": self._model}
        has = names[what]
        if has != wanted and not (what == "fingerprint" and len(wanted) >= _FEWEST_DIGITS and has.startswith(wanted)):
            raise CommandRefused(f"this engine's {what} is {has!r}, not {wanted!r}; nothing was changed")
        return {**names, **self._manager.operations.clear()}

    def in_step(
        self, request: Request, work: Callable[[], Mapping[str, Any] | None], unfinished: str = ""
    ) -> Mapping[str, Any]:
        """Have a step of the engine do this work, and wait for its answer as long as the client does.

        ``unfinished``: of work of several steps, what becomes of it when its client waits no longer.
        """
        command, steps, began = Command(work), self._manager.steps, time.monotonic()
        if not self._commands.post(command):
            raise CommandRefused("too many commands wait for the engine's next step; nothing was changed")
        with contextlib.suppress(queue.Empty):
            return command.answer(request.seconds)
        waited = time.monotonic() - began
        if command.withdraw():
            idle = self._manager.steps == steps
            why = "the engine has not stepped for" if idle else "the engine's steps have not come to it in"
            hint = "; an idle engine steps with its next request" if idle else ""
            raise CommandRefused(f"{why} {waited:.3g}s; nothing was changed{hint}")
        with contextlib.suppress(queue.Empty):
            return command.answer(_LATE_SECONDS)
        raise CommandRefused(f"it has begun, and has not ended in {waited:.3g}s; {unfinished or 'see the log'}")


class _WarmUpActions:
    """The actions of a warm-up: its begin, its keys (also none of them, to ask how far it is), and its end."""

    def __init__(self, manager: "TieringManager", in_step: Callable[..., Mapping[str, Any]]) -> None:
        self._manager = manager
        self._operations = manager.operations
        self._in_step = in_step

    def actions(self) -> dict[str, Action]:
        """Return the actions by name."""
        return {"warm": self.begin, "warm-keys": self.keys, "warm-end": self.end}

    def begin(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Begin to fill the primary from a tier."""
        tier = request.text("tier")
        limits = [request.number(name, default=None) for name in ("bytes_per_second", "most_bytes")]
        request.end()
        done = dict(self._in_step(request, lambda: self._operations.warm_up(tier, *limits)))
        done["tokens_per_chunk"] = list(self._manager.tokens_per_chunk)
        done["fingerprint"] = self._manager.fingerprint()
        return f"warm-up {done['id']} from {tier} has begun", done

    def keys(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Give a warm-up more keys, as far as it takes them now."""
        number = request.whole("id")
        runs = request.keys("prefixes")
        continues, is_last = request.flag("continues"), request.flag("last")
        request.end()
        done = self._in_step(
            request, lambda: self._operations.warm_up_keys(number, runs, continues=continues, is_last=is_last)
        )
        return f"warm-up {number}: {_so_far(done)}", done

    def end(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Stop a warm-up, if it is not over, and return what has come of it."""
        number = request.whole("id")
        request.end()
        done = self._in_step(request, lambda: self._operations.warm_up_end(number))
        return f"warm-up {number}: {_so_far(done)}; {done['ended']}", done


def _so_far(done: Mapping[str, Any]) -> str:
    return (
        f"{done['loaded']} chunks loaded, {done['resident']} were in memory, {done['missing']} are not in the tier, "
        f"{done['failed']} failed"
    )


class _LiveActions:
    """The actions that change a config's options and tiers. ``in_step``: as in ``EngineActions``."""

    def __init__(self, live: "LiveSide", in_step: Callable[..., Mapping[str, Any]]) -> None:
        self._live = live
        self._in_step = in_step

    def limit(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Give a tier other threads, or another rate limit; one that is null is none."""
        tier = request.text("tier")
        changes: dict[str, Any] = {}
        if request.has("threads"):
            changes["threads"] = request.number("threads")
        rate = {name: request.number(name) for name in _RATES if request.has(name)}
        request.end()
        if rate:
            changes["rate_limit"] = rate
        if not changes:
            raise CommandRefused(f"give threads, {' or '.join(_RATES)}; nothing was changed")
        done = self._live.limit(tier, changes, partial(self._in_step, request))
        nbytes, calls = done["bytes_per_second"], done["requests_per_second"]
        most = [f"{format_size(nbytes)} a second"] if nbytes else []
        most += [f"{calls:g} calls a second"] if calls else []
        threads = f"{done['threads']} thread{'s' if done['threads'] > 1 else ''}"
        return f"{tier}: {threads} a host, {' and '.join(most) or 'no rate limit'}", done

    def reload(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Apply what is live of the config's file."""
        path = request.text("config") if request.has("config") else ""
        request.end()
        done = self._live.reload(path, partial(self._in_step, request))
        lines = [f"applied: {', '.join(done['applied'])}" if done["applied"] else "nothing to apply"]
        return "\n".join([*lines, *(f"not applied: {line}" for line in done["refused"])]), done

    def attach(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Open a tier of the config's file."""
        tier, path = request.text("tier"), request.text("config") if request.has("config") else ""
        request.end()
        done = self._live.attach(tier, path, partial(self._in_step, request))
        state = "and open" if done["open"] else f"not open so far ({done['error']}); it goes on trying"
        return f"{tier}: attached, {state}", done

    def detach(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Close a tier."""
        tier = request.text("tier")
        request.end()
        unfinished = "it is off, and stays so: detach it again when its jobs have ended"
        done = self._live.detach(tier, partial(self._in_step, request, unfinished=unfinished))
        return f"{tier}: detached", done


class ControlSocket:
    """Takes commands until it is closed. ``actions``: by their names, called on a thread of the command's own."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = actions
        self._closed = threading.Event()
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self.latest: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        """The latest commands: when (seconds since the epoch), uid and pid of its sender, what, and what came of it."""
        self.name = f"{_PREFIX}{os.getpid()}-{_process}-{next(_numbers)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_BACKLOG)
        threading.Thread(target=self._serve, name="kvtiers-control", daemon=True).start()

    def close(self) -> None:
        """Take no further command. One that waits for a step gets no answer but the connection's end."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone would not
        self._socket.close()

    def _serve(self) -> None:
        rate = AcceptRate()
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed.wait(_PAUSE_SECONDS):
                    return
                continue
            with contextlib.ExitStack() as closing:
                closing.push(connection)
                pid, uid = peer_credentials(connection)
                if uid in {0, os.getuid()}:
                    self._start(connection, pid, uid)
                    closing.pop_all()
            if (pause := rate.accepted(at_start=False)) and self._closed.wait(pause):
                return

    def _start(self, connection: socket.socket, pid: int, uid: int) -> None:
        while not self._free.acquire(timeout=_PAUSE_SECONDS):
            if self._closed.is_set():
                connection.close()
                return
        take = threading.Thread(target=self._take, args=(connection, pid, uid), name="kvtiers-command", daemon=True)
        try:
            take.start()
        except RuntimeError:  # no thread can be had: the next command waits for this one
            self._take(connection, pid, uid)

    def _take(self, connection: socket.socket, pid: int, uid: int) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_READ_SECONDS)
                connection.sendall(_line(self._answer(connection, pid, uid)))
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket, pid: int, uid: int) -> dict[str, Any]:
        what, action = "a command that is none", ""
        try:
            action, arguments, seconds = _parse(_read_command(connection))
            what = " ".join([action, *(f"{name}={value!r}" for name, value in arguments.items())])[:_LONGEST_NOTE]
            answer = self._do(action, Request(arguments, time.monotonic() + seconds))
        except CommandRefused as refusal:
            answer = {"error": str(refusal)}
        if "error" in answer or action not in _UNNOTED:
            self._note(pid, uid, what, f"refused: {answer['error']}" if "error" in answer else answer["text"])
        return answer

    def _do(self, action: str, request: Request) -> dict[str, Any]:
        try:
            said, result = self._action(action)(request)
        except CommandRefused:
            raise
        except Exception as error:  # noqa: BLE001 -- a bug of ours: the client gets a line, the log the traceback
            _log.exception("control: %s failed; a bug of kvtiers", action)
            raise CommandRefused(f"{error_text(error)}; a bug of kvtiers") from None
        return {"text": said, "result": dict(result)}

    def _action(self, name: str) -> Action:
        if name not in self._actions:
            raise CommandRefused(f"this engine has no action {name!r}; it has {', '.join(self._actions)}")
        return self._actions[name]

    def _note(self, pid: int, uid: int, what: str, said: str) -> None:
        """Log a command: by whom, when, what, and what came of it."""
        now = time.time()
        self.latest.append({"at": now, "uid": uid, "pid": pid, "command": what, "outcome": said})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        _log.warning(
            "control: %s: uid %d, pid %d: %s: %s",
            stamp,
            uid,
            pid,
            _printable(what),
            _printable(said.replace("\n", "; ")),
        )


def send_command(
    name: str, action: str, seconds: float, owner: int | None = None, **arguments: Any
) -> tuple[str, dict[str, Any]]:
    """Send a command to the engine at this control socket; return a line for people and plain data.

    ``owner``: whose the socket must be, as the one who has named it may be another user.

    CommandRefused, in one line, if the engine refuses, ends meanwhile, or does not answer within ``seconds``.
    """
    command = {"action": action, "seconds": seconds, **arguments}
    until = time.monotonic() + seconds + _LATE_SECONDS + _READ_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(_READ_SECONDS, seconds))
        try:
            connection.connect(f"\0{name}")
            pid, uid = peer_credentials(connection)
            if os.geteuid() not in {0, uid} or owner not in {None, uid}:
                raise CommandRefused(f"it is of user id {uid}; an engine takes commands of its own user and of root")
            connection.sendall(_line(command))
            answer = _read_line(connection, until)
        except OSError as error:
            raise CommandRefused(f"it does not answer: {error.strerror or error}") from None
    return _read_answer(answer, pid)


def _read_answer(line: bytes, pid: int) -> tuple[str, dict[str, Any]]:
    if not line.endswith(b"\n"):
        raise CommandRefused(f"process {pid} ended before it answered; whether it has done it is not certain")
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or answer.get("kvtiers_control") != CONTROL_FORMAT:
        raise CommandRefused("what it says is no engine's answer")
    if "error" in answer:
        raise CommandRefused(_printable(str(answer["error"])))
    result = answer.get("result")
    return "\n".join(map(_printable, str(answer.get("text", "")).split("\n"))), result if isinstance(
        result, dict
    ) else {}


def _read_command(connection: socket.socket) -> bytes:
    try:
        line = _read_line(connection, time.monotonic() + _READ_SECONDS)
        if len(line) >= _LONGEST_LINE and not line.endswith(b"\n"):
            # What is left unread when the socket is closed would cost the client the answer.
            with contextlib.suppress(TimeoutError):
                until = time.monotonic() + _REST_SECONDS
                while _read_line(connection, until) and time.monotonic() < until:
                    pass
    except TimeoutError:
        raise CommandRefused(f"no command has come within {_READ_SECONDS:g}s") from None
    return line


def _parse(line: bytes) -> tuple[str, dict[str, Any], float]:
    """Return a command's action, arguments and seconds; CommandRefused if it is none."""
    if not line.endswith(b"\n"):
        much = len(line) >= _LONGEST_LINE
        raise CommandRefused(f"a command of more than {_LONGEST_LINE} bytes" if much else "a command without its end")
    try:
        command = json.loads(line)
    except (ValueError, RecursionError):
        raise CommandRefused("a command that is no JSON") from None
    if not isinstance(command, dict):
        raise CommandRefused("a command that is no JSON object")
    number = command.pop("kvtiers_control", None)
    if number != CONTROL_FORMAT:
        raise CommandRefused(f"a command of format {number!r}; this engine's release has format {CONTROL_FORMAT}")
    action, seconds = command.pop("action", None), command.pop("seconds", None)
    if not isinstance(action, str):
        raise CommandRefused(f"a command whose action is {action!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _MOST_SECONDS:
        raise CommandRefused(f"a command whose seconds are {seconds!r}; expected 0 to {_MOST_SECONDS:g}")
    return action, command, float(seconds)


def _read_line(connection: socket.socket, until: float) -> bytes:
    """Return what comes up to the end of a line, of the stream or of the time, at most one line."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
        connection.settimeout(max(0.001, until - time.monotonic()))
        try:
            data = connection.recv(_LONGEST_LINE - len(line))
        except ConnectionResetError:
            data = b""
        if not data or time.monotonic() >= until:
            break
        line += data
    return bytes(line)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps({"kvtiers_control": CONTROL_FORMAT, **message}, default=str).encode() + b"\n"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
