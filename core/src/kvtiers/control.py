"""The control socket: a local socket on which an engine answers its operator, number 1 of the format.

The socket is abstract, so nothing is left of it after any end, and named from the engine's process::

    @kvtiers-control-{pid}-{random, of the process}-{number}

A pid alone is no name: containers that share a network, as those of one pod do, see each other's sockets, and each
counts its processes from 1. An engine answers only its own user and root, by the kernel's word (SO_PEERCRED). One
connection is one command, and one line each way::

    client   {"kvtiers_control": 1, "action": "switch", "seconds": 10.0, "tier": "fs", "to": "off"}
    engine   {"kvtiers_control": 1, "text": "fs: off, it was on", "result": {"tier": "fs", ...}}
    or       {"kvtiers_control": 1, "error": "there is no tier 'sf'; this engine has fs"}

``status`` is the action that every engine has (``status.py``); it changes nothing, and waits for no other command.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
control            accepts, at a bounded rate, as any user can connect in a loop; refuses other users. Once a second
                   it calls ``tend``, which looks after the tiers of an idle engine
one a connection   reads the command, has the engine's step do it, waits for that within the command's seconds
the engine's       works on what was posted to its ``CommandQueue``; never waits for any of these
=================  ==========================================================================================
"""

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from kvtiers._failures import error_text, logged_boundary
from kvtiers.api.keys import OffloadKey
from kvtiers.region.handshake import peer_credentials
from kvtiers.tiering.command_queue import CommandRefused

__all__ = [
    "CONTROL_FORMAT",
    "LARGEST_ANSWER",
    "LATE_SECONDS",
    "SOCKET_PREFIX",
    "Action",
    "CommandRefused",
    "ControlSocket",
    "OfAnotherUser",
    "Request",
    "process_of",
    "running",
    "send_command",
    "send_to",
]

CONTROL_FORMAT = 1
LARGEST_ANSWER = 1 << 20
"""Bytes of an answer's line that a client reads."""
LATE_SECONDS = 1.0
"""For a command that has begun when its time is over: a step's work on it takes microseconds."""
SOCKET_PREFIX = "kvtiers-control-"
_log = logging.getLogger("kvtiers.control")
_LARGEST_COMMAND = 1 << 16
_READ_SECONDS = 2.0  # for a client to send its command, and to take its answer
_REST_SECONDS = 0.2  # for the rest of a line that is too long
_MOST_SECONDS = 3600.0
_CONNECTIONS = 256  # open at once; the others wait in the socket's backlog
_COMMANDS = 16  # commands that wait for a step at once; the others wait for one of these
_BACKLOG = 256
_TEND_SECONDS = 1.0
_PAUSE_SECONDS = 0.1  # after a connection that could not be accepted, or while none may be
_CLOSE_SECONDS = 1.0  # for the threads to end; one that waits for a step, or for its client, can take longer
_EACH_SECONDS = 0.001  # after every connection: 1,000 a second are 2 % of a processor
REMEMBERED = 20
_LONGEST_NOTE = 500
_LONGEST_ERROR = 4000
_LONGEST_VALUE = 80
_LARGEST_NUMBER = 1e18  # a second's bytes, more than any machine moves; what is larger may not even be a float
_LISTENS = "00010000"  # the flags of a socket in /proc/net/unix: __SO_ACCEPTCON of include/linux/net.h
_ASKS = "status"
_UNNOTED = frozenset({_ASKS, "warm-keys"})  # which come all the time; the begin and the end of a warm-up are noted
NO_ANSWER = "what it says is no engine's answer"
_LATE = "it has not answered in time"
_NOT_CERTAIN = "whether it has done it is not certain"
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
            raise CommandRefused(f"{name!r} is {_shown(value)}; expected a text")
        return value

    def number(self, name: str, *, default: float | None = None) -> float | None:
        """Return an argument that is a number of at least 0, or null; ``default`` where it is not given."""
        value = self._arguments.pop(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST_NUMBER:
            raise CommandRefused(f"{name!r} is {_shown(value)}; expected a number")
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
            raise CommandRefused(f"{name!r} is {_shown(value)}; expected true or false")
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
            names = ", ".join(_shown(name) for name in self._arguments)
            raise CommandRefused(f"this engine's release has no argument {names}")


class ControlSocket:
    """Takes commands until it is closed.

    ``actions``: by their names, called on a thread of the connection's own. ``tend``: called about once a second.
    ``on_close``: called by ``close``. ``latest``: where the latest commands are noted, for an action that shows them.
    ``read_seconds``: for a client to send its command, and to take its answer. ``prefix``: of the socket's name; no
    command that asks all engines finds another one.
    """

    def __init__(
        self,
        actions: Mapping[str, Action],
        *,
        tend: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
        latest: deque[dict[str, Any]] | None = None,
        read_seconds: float = _READ_SECONDS,
        prefix: str = SOCKET_PREFIX,
    ) -> None:
        self._actions = actions
        self._read_seconds = read_seconds
        self._tend = tend
        self._on_close = on_close
        self._closed = threading.Event()
        self._connections = threading.BoundedSemaphore(_CONNECTIONS)
        self._answering: list[threading.Thread] = []
        self._commands = threading.BoundedSemaphore(_COMMANDS)
        self.latest: deque[dict[str, Any]] = deque(maxlen=REMEMBERED) if latest is None else latest
        """The latest commands: when (seconds since the epoch), uid and pid of its sender, what, and what came of it."""
        self.name = f"{prefix}{os.getpid()}-{_process}-{next(_numbers)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._arrivals = select.poll()
        self._arrivals.register(self._socket, select.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="kvtiers-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further command. One that waits for a step gets no answer but the connection's end."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone would not
        until = time.monotonic() + _CLOSE_SECONDS
        self._thread.join(_CLOSE_SECONDS)  # before the number of its socket can become another file's
        self._socket.close()
        for thread in self._answering:
            thread.join(max(0.0, until - time.monotonic()))
        self._on_close()

    def _serve(self) -> None:
        tend_at = time.monotonic()
        while not self._closed.is_set():
            if (now := time.monotonic()) >= tend_at:
                tend_at = now + _TEND_SECONDS
                with logged_boundary(_log, "the tiers cannot be looked after; a bug of kvtiers"):
                    self._tend()
            if self._connections.acquire(timeout=_PAUSE_SECONDS):
                self._accept()

    def _accept(self) -> None:
        """Wait for a connection and accept it; if its user may, have a thread of its own serve it."""
        with contextlib.ExitStack() as refused:
            refused.callback(self._connections.release)
            if not self._arrivals.poll(_TEND_SECONDS * 1000) or self._closed.is_set():
                return
            try:
                connection = refused.enter_context(self._socket.accept()[0])
                pid, uid = peer_credentials(connection)
            except OSError:  # as without a descriptor to spare
                self._closed.wait(_PAUSE_SECONDS)
                return
            if uid in {0, os.getuid()}:
                refused.pop_all()
                self._start(connection, pid, uid)
        self._closed.wait(_EACH_SECONDS)

    def _start(self, *of: Any) -> None:
        thread = threading.Thread(target=self._take, args=of, name="kvtiers-command", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had: the next connection waits for this one
            self._take(*of)
        else:
            self._answering = [*(each for each in self._answering if each.is_alive()), thread]

    def _take(self, connection: socket.socket, pid: int, uid: int) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(self._read_seconds)
                connection.sendall(_line(self._answer(connection, pid, uid)))
        finally:
            self._connections.release()

    def _answer(self, connection: socket.socket, pid: int, uid: int) -> dict[str, Any]:
        what, action, line = "a command that is none", "", b""
        try:
            line = _read_command(connection, self._read_seconds)
            action, arguments, seconds = _parse(line)
            what = " ".join([action, *(f"{name}={value!r}" for name, value in arguments.items())])[:_LONGEST_NOTE]
            answer = self._do(action, Request(arguments, time.monotonic() + seconds))
        except CommandRefused as refusal:
            answer = {"error": str(refusal)[:_LONGEST_ERROR]}
            if line:  # else what only looks for sockets would push out the operators' commands
                self._note(pid, uid, what, f"refused: {refusal.logged}")
            return answer
        if action not in _UNNOTED:
            self._note(pid, uid, what, answer["text"])
        return answer

    def _do(self, name: str, request: Request) -> dict[str, Any]:
        action = self._action(name)
        try:
            with contextlib.nullcontext() if name == _ASKS else self._one_of_the_commands(request):
                said, result = action(request)
        except CommandRefused:
            raise
        except Exception as error:  # noqa: BLE001 -- a bug of ours: the client gets a line, the log the traceback
            _log.exception("control: %s failed; a bug of kvtiers", name)
            raise CommandRefused(f"{error_text(error)}; a bug of kvtiers") from None
        return {"text": said, "result": dict(result)}

    @contextlib.contextmanager
    def _one_of_the_commands(self, request: Request) -> Iterator[None]:
        """Be one of those that wait for a step; CommandRefused if there are too many as long as the client waits."""
        if not self._commands.acquire(timeout=request.seconds):
            raise CommandRefused("too many commands wait for the engine's next step; nothing was changed")
        try:
            yield
        finally:
            self._commands.release()

    def _action(self, name: str) -> Action:
        if name not in self._actions:
            raise CommandRefused(f"this engine has no action {_shown(name)}; it has {', '.join(self._actions)}")
        return self._actions[name]

    def _note(self, pid: int, uid: int, what: str, said: str) -> None:
        """Log a command: by whom, when, what, and what came of it."""
        now, said = time.time(), said.replace("\n", "; ")[:_LONGEST_NOTE]
        self.latest.append({"at": now, "uid": uid, "pid": pid, "command": what, "outcome": said})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        _log.warning(
            "control: %s: uid %d, pid %d: %s: %s",
            stamp,
            uid,
            pid,
            _printable(what),
            _printable(said),
        )


class OfAnotherUser(CommandRefused):
    """The engine is another user's, and so answers only that user and root."""


def running() -> list[str]:
    """Return the names of all engines' sockets on this machine that listen.

    A connection that an engine took has the same name, for a moment longer than the engine listens.
    """
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:  # noqa: PTH123 -- no file in a folder
            sockets = [line.split() for line in table if f" @{SOCKET_PREFIX}" in line]
    except OSError:
        return []
    return sorted({socket[-1].removeprefix("@") for socket in sockets if socket[3] == _LISTENS})


def process_of(name: str) -> str:
    """Return the part of a socket's name that identifies its process."""
    return name.rpartition("-")[0]


def send_command(
    name: str, action: str, seconds: float, owner: int | None = None, **arguments: Any
) -> tuple[str, dict[str, Any]]:
    """Send a command to the engine at this socket; return a line for people and plain data.

    ``owner``: whose the socket must be, as another process may have taken the name of one that has ended.

    CommandRefused, in one line, if the engine refuses, ends meanwhile, or does not answer within ``seconds``.
    """
    answer = send_to(name, action, seconds, seconds + LATE_SECONDS + _READ_SECONDS, owner, **arguments)[0]
    result = answer.get("result")
    return answer["text"], result if isinstance(result, dict) else {}


def send_to(
    name: str, action: str, seconds: float, most_seconds: float, owner: int | None = None, **arguments: Any
) -> tuple[dict[str, Any], int]:
    """Send a command; return the answer as it is, and the user id of the process that has given it.

    As ``send_command``, but for ``most_seconds``, after which nothing is waited for any more.
    """
    until = time.monotonic() + most_seconds
    late = _LATE
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(most_seconds)
        try:
            connection.connect(f"\0{name}")
            pid, uid = peer_credentials(connection)
            if os.geteuid() not in {0, uid} or owner not in {None, uid}:
                raise OfAnotherUser(f"it is of user id {uid}; an engine answers only to its own user and to root")
            connection.sendall(_line({"action": action, "seconds": seconds, **arguments}))
            late = _LATE if action == "status" else f"{_LATE}; {_NOT_CERTAIN}"
            line = _read_line(connection, until, LARGEST_ANSWER)
        except TimeoutError:
            raise CommandRefused(late) from None
        except OSError as error:
            raise CommandRefused(f"it does not answer: {error.strerror or error}") from None
    return _read_answer(line, pid, late if time.monotonic() >= until else ""), uid


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _read_answer(line: bytes, pid: int, late: str) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        if len(line) >= LARGEST_ANSWER:
            raise CommandRefused(f"its answer has more than {LARGEST_ANSWER} bytes")
        if late:
            raise CommandRefused(late)
        raise CommandRefused(f"process {pid} ended before it answered; {_NOT_CERTAIN}")
    try:
        answer = json.loads(line, parse_constant=_refuse_constant)
        if not isinstance(answer, dict) or answer.get("kvtiers_control") != CONTROL_FORMAT:
            raise CommandRefused(NO_ANSWER)
        lines = str(answer.pop("text", "")).split("\n")
        answer = _printable(answer)
    except (ValueError, RecursionError):
        raise CommandRefused(NO_ANSWER) from None
    if "error" in answer:
        raise CommandRefused(str(answer["error"]))
    return {**answer, "text": "\n".join(map(_printable, lines))}


def _read_command(connection: socket.socket, seconds: float) -> bytes:
    try:
        line = _read_line(connection, time.monotonic() + seconds, _LARGEST_COMMAND)
        if len(line) >= _LARGEST_COMMAND and not line.endswith(b"\n"):
            # What is left unread when the socket is closed would cost the client the answer.
            with contextlib.suppress(TimeoutError):
                until = time.monotonic() + _REST_SECONDS
                while _read_line(connection, until, _LARGEST_COMMAND) and time.monotonic() < until:
                    pass
    except TimeoutError:
        raise CommandRefused(f"no command has come within {seconds:g}s") from None
    return line


def _parse(line: bytes) -> tuple[str, dict[str, Any], float]:
    """Return a command's action, arguments and seconds; CommandRefused if it is none."""
    if not line.endswith(b"\n"):
        much = len(line) >= _LARGEST_COMMAND
        raise CommandRefused(
            f"a command of more than {_LARGEST_COMMAND} bytes" if much else "a command without its end"
        )
    try:
        command = json.loads(line)
    except (ValueError, RecursionError):
        raise CommandRefused("a command that is no JSON") from None
    if not isinstance(command, dict):
        raise CommandRefused("a command that is no JSON object")
    number = command.pop("kvtiers_control", None)
    if number != CONTROL_FORMAT:
        raise CommandRefused(f"a command of format {_shown(number)}; this engine's release has format {CONTROL_FORMAT}")
    action, seconds = command.pop("action", None), command.pop("seconds", None)
    if not isinstance(action, str):
        raise CommandRefused(f"a command whose action is {_shown(action)}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _MOST_SECONDS:
        raise CommandRefused(f"a command whose seconds are {_shown(seconds)}; expected 0 to {_MOST_SECONDS:g}")
    return action, command, float(seconds)


def _read_line(connection: socket.socket, until: float, most: int) -> bytes:
    """Return what comes up to the end of a line, of the stream or of the time, at most ``most`` bytes."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < most:
        connection.settimeout(max(0.001, until - time.monotonic()))
        try:
            data = connection.recv(min(most - len(line), _LARGEST_COMMAND))
        except ConnectionResetError:
            data = b""
        if not data:
            break
        line += data
        if time.monotonic() >= until:
            break
    return bytes(line)


def _shown(value: object) -> str:
    """Return a value that a client has sent, as a line about it quotes it."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps({"kvtiers_control": CONTROL_FORMAT, **message}, default=str).encode() + b"\n"


def _printable(value: Any) -> Any:
    """Return plain data with nothing in its texts that a terminal would act on."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else "?" for letter in value)
    if isinstance(value, dict):
        return {_printable(name): _printable(inner) for name, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value
