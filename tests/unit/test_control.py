"""The control socket: who may command an engine, in which bytes, what is refused, and what is logged of it."""

import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvtiers.control import (
    CONTROL_FORMAT,
    CommandRefused,
    ControlSocket,
    Request,
    send_command,
    send_to,
)
from kvtiers.control_actions import EngineActions

from .tiering.harness import Bench, chain

GOLDEN = [
    case
    for name in ("control-1", "control-1-status", "control-1-warm-up")
    for case in json.loads((Path(__file__).parents[1] / "golden" / f"{name}.json").read_text("utf-8"))
]


UNSEEN = "kvtiers-unseen-"
"""No command that asks all engines of the machine, as other tests run them, finds these sockets."""


@pytest.fixture
def serve():
    """Take commands as an engine would until the test ends; a client's may come as late as a busy machine lets them."""
    sockets = []

    def serve(actions, read_seconds=60.0):
        sockets.append(ControlSocket(actions, read_seconds=read_seconds, prefix=UNSEEN))
        return sockets[-1]

    yield serve
    for one in sockets:
        one.close()


@pytest.fixture
def stepping(serve):
    """An engine with a tier "a", that steps; its control socket."""
    bench, over = Bench(), threading.Event()

    def steps():
        while not over.wait(0.001):
            bench.step()

    engine = threading.Thread(target=steps)
    engine.start()
    yield bench, serve(EngineActions(bench.manager, "some-org/model").actions())
    over.set()
    engine.join(60)


def says(name, data, *, ends=False):
    """Send these bytes; return what the socket answers, to its end."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(f"\0{name}")
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        answer = b""
        while more := client.recv(1 << 16):
            answer += more
    return answer.decode()


def lines(caplog):
    """Return what the control socket has logged: a thread that another test has left may log something, too."""
    return [record.getMessage() for record in caplog.records if record.name == "kvtiers.control"]


# -- the format


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["title"])
def test_commands_and_answers_of_this_format_never_change(serve, case):
    assert CONTROL_FORMAT == 1, "another format needs a golden file of its own, beside this"

    def act(request: Request):
        assert request._arguments == case["arguments"]
        if "error" in case["outcome"]:
            raise CommandRefused(case["outcome"]["error"])
        return case["outcome"]["text"], case["outcome"]["result"]

    assert says(serve({case["action"]: act}).name, case["command"].encode()) == case["answer"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["title"])
def test_a_client_sends_and_reads_this_format(case):
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind("")  # a name of the kernel's choice
        engine.listen(1)
        name = engine.getsockname()[1:].decode()
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send_command, name, case["action"], case["seconds"], **case["arguments"])
            connection, _ = engine.accept()
            with connection:
                assert connection.recv(1 << 16).decode() == case["command"]
                connection.sendall(case["answer"].encode())
            if "error" in case["outcome"]:
                with pytest.raises(CommandRefused, match=re.escape(case["outcome"]["error"])):
                    sent.result(60)
            else:
                assert sent.result(60) == (case["outcome"]["text"], case["outcome"]["result"])


def test_there_is_a_golden_command_of_every_action(stepping):
    bench, _ = stepping
    bench.manager.live = object()
    assert {case["action"] for case in GOLDEN} == {"status", *EngineActions(bench.manager, "m").actions()}


GOOD = {"kvtiers_control": 1, "action": "switch", "seconds": 5, "tier": "a", "to": "off"}


def line(**changes):
    return json.dumps({name: value for name, value in {**GOOD, **changes}.items() if value is not ...}).encode() + b"\n"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\n", "a command that is no JSON"),
        (b"off\n", "a command that is no JSON"),
        (b"\xff\xfe\x00\n", "a command that is no JSON"),
        (b"[1]\n", "a command that is no JSON object"),
        (b"[" * 50_000 + b"\n", "a command that is no JSON"),
        (b"{}\n", "a command of format None; this engine's release has format 1"),
        (line(kvtiers_control=2), "a command of format 2; this engine's release has format 1"),
        (line(action=...), "a command whose action is None"),
        (line(action="explode"), "this engine has no action 'explode'; it has switch, drain, clear"),
        (line(seconds="soon"), "a command whose seconds are 'soon'; expected 0 to 3600"),
        (line(seconds=-1), "a command whose seconds are -1; expected 0 to 3600"),
        (line(tier=...), "'tier' is None; expected a text"),
        (line(tier=7), "'tier' is 7; expected a text"),
        (line(to="sideways"), "a tier cannot be switched to 'sideways'; expected on, off, read-only"),
        (line(tier="b"), "there is no tier 'b'; this engine has a"),
        (line(force=True), "this engine's release has no argument 'force'"),
        (b"x" * 70_000, "a command of more than 65536 bytes"),
        (line(action="warm-keys", tier=..., to=..., id=1.5), "'id' is 1.5; expected a whole number"),
        (line(action="warm-keys", tier=..., to=..., id=1, prefixes=7), "'prefixes' is no list of lists of keys"),
        (line(action="warm-keys", tier=..., to=..., id=1, prefixes=[["0"]]), "'prefixes' is no list of lists of"),
        (line(action="warm-keys", tier=..., to=..., id=1, prefixes=[], last=1), "'last' is 1; expected true or false"),
        (line(action="warm-keys", tier=..., to=..., id=9, prefixes=[]), "there is no warm-up 9: it is over, or"),
        (line(action="warm", tier="a", to=..., most_bytes=10**400), "'most_bytes' is 1000000000000"),
        (line(action="warm-keys", tier=..., to=..., id=10**400), "'id' is 1000000000000"),
        (line(action="warm-keys", tier=..., to=..., id=math.nan), "'id' is nan; expected a number"),
        (line(seconds=10**400), "a command whose seconds are 1000000000000"),
        (line(action="warm", tier="b", to=...), "there is no tier 'b'; this engine has a"),
        (line(action="clear", tier=..., to=...), "give one of fingerprint, model and tenant; nothing was changed"),
        (line(action="clear", tier=..., to=..., tenant="x"), "this engine's config has no 'tenants', so no chunk is"),
        (line(action="clear", tier=..., to=..., tenant="X"), "tenant 'X' cannot be used; expected 1 to 64 of a-z"),
        (line(action="clear", tier=..., to=..., model="other"), "this engine's model is 'some-org/model', not 'other'"),
    ],
)
def test_what_is_no_command_gets_one_clear_line_and_the_next_command_is_done(stepping, data, error):
    bench, control = stepping
    answer = says(control.name, data)
    assert answer.endswith("\n")
    assert answer.count("\n") == 1
    assert json.loads(answer)["error"].startswith(error)
    assert bench.slots[0].switch == "on"
    assert send_command(control.name, "switch", 60, tier="a", to="off")[0] == "a: off, it was on"


def test_a_command_without_its_end_is_refused_when_the_stream_ends(stepping):
    assert "a command without its end" in says(stepping[1].name, line()[:-1], ends=True)


def test_a_client_that_sends_nothing_blocks_no_other(stepping):
    _, control = stepping
    with socket.socket(socket.AF_UNIX) as idle:
        idle.connect(f"\0{control.name}")
        assert send_command(control.name, "switch", 60, tier="a", to="off")[0] == "a: off, it was on"


def test_a_client_that_sends_nothing_gets_a_line_in_the_end(serve):
    assert "no command has come within 0.05s" in says(serve({}, read_seconds=0.05).name, b"")


def test_a_client_that_sends_nothing_is_no_command_that_is_kept_or_logged(stepping, caplog):
    _, control = stepping
    send_command(control.name, "switch", 60, tier="a", to="off")
    kept = list(control.latest)
    caplog.clear()
    for _ in range(control.latest.maxlen):
        assert "a command without its end" in says(control.name, b"", ends=True)
    assert list(control.latest) == kept
    assert not lines(caplog)


# -- who, and when


def test_a_command_is_logged_with_its_sender_its_time_and_its_outcome(stepping, caplog):
    _, control = stepping
    before = time.time()
    with caplog.at_level(logging.WARNING, "kvtiers.control"):
        send_command(control.name, "switch", 60, tier="a", to="off")
        says(control.name, b"nonsense\n")
    mine = f"uid {os.getuid()}, pid {os.getpid()}"
    done, refused = lines(caplog)
    assert re.fullmatch(rf"control: [0-9-]+T[0-9:]+Z: {mine}: switch tier='a' to='off': a: off, it was on", done)
    assert re.fullmatch(rf"control: \S+: {mine}: a command that is none: refused: a command that is no JSON", refused)
    first, second = control.latest
    assert before <= first["at"] <= second["at"] <= time.time()
    assert (first["uid"], first["pid"]) == (os.getuid(), os.getpid())


def test_what_is_kept_of_commands_is_short_and_in_one_line_whatever_was_sent(serve):
    def refuse(request):
        raise CommandRefused("\U0001f600" * 10_000)

    def applied(request):
        return "applied: one\nnot applied: two", {}

    control = serve({"refuse": refuse, "applied": applied})
    assert send_command(control.name, "applied", 60)[0] == "applied: one\nnot applied: two"
    assert control.latest[0]["outcome"] == "applied: one; not applied: two"
    for number in range(20):
        with pytest.raises(CommandRefused):
            send_command(control.name, ("refuse", "\ud800" * 10_000)[number % 2], 60)
    assert len(json.dumps(list(control.latest))) < 500_000


_CLIENT = """
import sys
from kvtiers.control import CommandRefused, send_command
try:
    print(send_command(sys.argv[1], "switch", 60.0, tier="a", to="off")[0])
except CommandRefused as refusal:
    print("refused:", refusal)
"""
_RAW_CLIENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.settimeout(60)
    client.connect("\\0" + sys.argv[1])
    try:
        client.sendall(sys.argv[2].encode() + b"\\n")
        print(client.recv(4096))
    except (BrokenPipeError, ConnectionResetError):
        print(b"")
"""


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, and setpriv")
def test_another_user_is_refused_by_the_engine_and_by_the_client(stepping):
    bench, control = stepping
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=100, check=True)
    # By the engine: what the client checks is no protection. In the standard library alone, which any user can read.
    python = getattr(sys, "_base_executable", sys.executable)
    assert run([*other, python, "-I", "-c", _RAW_CLIENT, control.name, line().decode().strip()]).stdout == "b''\n"
    assert not control.latest
    assert bench.slots[0].switch == "on"
    assert run([sys.executable, "-c", _CLIENT, control.name]).stdout == "a: off, it was on\n", "root may"


def test_a_client_sends_nothing_to_another_users_socket(monkeypatch, serve):
    control = serve({})
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CommandRefused, match="an engine answers only to its own user and to root"):
        send_command(control.name, "switch", 5, tier="a", to="off")


# -- engines that do not step, and engines that end


def test_an_engine_that_does_not_step_is_said_so_and_does_it_never(serve):
    bench = Bench()
    control = serve(EngineActions(bench.manager, "m").actions())
    with pytest.raises(CommandRefused, match=r"the engine has not stepped for [\d.]+s; nothing was changed; an idle"):
        send_command(control.name, "switch", 0.1, tier="a", to="off")
    bench.step()
    bench.step()
    assert bench.slots[0].switch == "on"


def test_a_drain_that_does_not_end_in_time_says_so(serve):
    bench = Bench(hold=True)
    bench.manager.complete_store(bench.begin_store(chain("a", 2)))
    control = serve(EngineActions(bench.manager, "m").actions())
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_to, control.name, "drain", 3, 60)  # until it has begun, too
        while not sent.done():
            bench.step()
            time.sleep(0.001)
        with pytest.raises(CommandRefused, match=r"it has begun, and has not ended in .*; its stores go on"):
            sent.result(0)
    bench.step()  # the engine's next step drops what was given up
    assert not bench.manager.commands.waiting


def test_a_hundred_clients_at_once_are_all_answered(stepping):
    bench, control = stepping
    with ThreadPoolExecutor(100) as pool:
        sent = [
            pool.submit(send_command, control.name, "switch", 60, tier="a", to=("on", "off", "read-only")[each % 3])
            for each in range(100)
        ]
        texts = [each.result(100)[0] for each in sent]
    assert all(text.startswith("a: ") for text in texts)
    assert not bench.manager.commands.waiting
    assert len(control.latest) == 20


@pytest.mark.parametrize("busy_seconds", [0, 0.2])
def test_no_thread_or_socket_is_left_of_a_socket_that_was_closed(busy_seconds):
    """Also while it looks after the tiers, which takes a moment more."""
    begun = threading.Event()

    def tend():
        begun.set()
        time.sleep(busy_seconds)

    before = set(threading.enumerate())
    control = ControlSocket({}, tend=tend, prefix=UNSEEN)
    assert begun.wait(60)
    control.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(CommandRefused, match="it does not answer: Connection refused"):
        send_command(control.name, "drain", 5)


def test_no_thread_is_left_of_a_command_that_is_being_answered(serve):
    begun = threading.Event()

    def act(_request):
        begun.set()
        time.sleep(0.2)
        return "done", {}

    before = set(threading.enumerate())
    control = serve({"act": act})
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{control.name}")
        client.sendall(b'{"kvtiers_control": 1, "action": "act", "seconds": 60}\n')
        assert begun.wait(60)
        control.close()
        assert set(threading.enumerate()) <= before
        assert json.loads(client.recv(1 << 16))["text"] == "done"


def test_closing_does_not_wait_long_for_tiers_that_hang():
    begun, goes_on = threading.Event(), threading.Event()
    control = ControlSocket({}, tend=lambda: begun.set() or goes_on.wait(), prefix=UNSEEN)
    try:
        assert begun.wait(60)
        control.close()
        with pytest.raises(CommandRefused, match="it does not answer: Connection refused"):
            send_command(control.name, "drain", 5)
    finally:
        goes_on.set()


_HANGING = """
import sys, time
from kvtiers.control import ControlSocket

def hang(request):
    print("begun", flush=True)
    time.sleep(300)

print(ControlSocket({"drain": hang}).name, flush=True)
sys.stdin.read()
"""


def test_the_client_of_an_engine_that_is_killed_in_the_midst_gets_one_clear_line():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _HANGING], stdin=pipe, stdout=pipe, text=True) as engine:
        name = engine.stdout.readline().strip()
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send_command, name, "drain", 100)
            assert engine.stdout.readline() == "begun\n"
            engine.send_signal(signal.SIGKILL)
            line = f"process {engine.pid} ended before it answered; whether it has done it is not certain"
            with pytest.raises(CommandRefused, match=line):
                sent.result(60)
