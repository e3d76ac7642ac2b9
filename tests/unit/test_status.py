"""``kvtiers status``: what an engine says of its tiers, whether they pay, and why not."""

import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
from click.testing import CliRunner

from kvtiers import status
from kvtiers.cli.main import cli
from kvtiers.cli.output import in_words
from kvtiers.cli.status import state_of, verdict, what_if_sentence, writes_per_hit
from kvtiers.control import SOCKET_PREFIX, CommandRefused, ControlSocket, running, send_command
from kvtiers.metrics import TierMetrics
from kvtiers.status import LastTrouble, Troubles, answer_status, troubles_from_the_start

TIER = {
    "off": "",
    "shared": True,
    "open": True,
    "breaker_state": 0,
    "hits": 0,
    "tokens": 0,
    "load_seconds": 0.0,
    "loads": 0,
    "computing_seconds": 0.0,
    "saved_seconds": 0.0,
    "loaded_bytes": 0,
    "stored_chunks": 0,
    "stored_bytes": 0,
    "unread_bytes": 0,
    "queue": 0,
    "seal_failures": 0,
    "wait_expired": 0,
    "recomputed_cheaper": 0,
    "full": False,
    "refusing": False,
    "too_slow": False,
    "loaded_chunks": 0,
    "failed_loads": 0,
    "written_chunks": 0,
    "budget": "",
    "switch": "on",
    "trouble": "",
    "trouble_seconds": 0.0,
    "trouble_is_over": False,
    "breaker_seconds": 0.0,
    "waiting_calls": 0,
    "silent_seconds": 0.0,
    "not_taken": 0,
    "not_taken_seconds": 0.0,
    "taken_meanwhile": 0,
    "missing": 0,
}


SLOW = {"hits": 5, "tokens": 160, "load_seconds": 3.0, "computing_seconds": 2.0, "saved_seconds": 0.05}


def answer(**tiers):
    named = {"engine": "vLLM 0.32.0", "pid": os.getpid(), "model": "some-org/model", "namespace": "", "fingerprint": ""}
    return {**named, "orphaned": False, "figures": {}, "events": {}, "actions": [], "tiers": tiers}


def answering(status, **how):
    """Return a socket that answers ``status`` with what this returns."""
    return ControlSocket({"status": lambda _: ("", status())}, **how)


def stats(**tiers):
    return {"engine": {}, "primary": {}, "tiers": tiers}


def ask(name, seconds=60.0):
    return status.ask(name, seconds)


def run(*arguments):
    return CliRunner().invoke(cli, ["status", *arguments])


def run_of_ours(*arguments):
    """Of the engines of this process alone: tests beside it have theirs."""
    return run("--engine", str(os.getpid()), *arguments)


@pytest.fixture
def serve():
    """Answer as an engine would until the test ends."""
    sockets = []

    def serve(status):
        sockets.append(answering(lambda: status))
        return sockets[-1]

    yield serve
    for one in sockets:
        one.close()


def test_an_engine_is_found_and_answers(serve):
    served = serve(answer(fs=TIER))
    assert served.name in running()
    assert ask(served.name) == answer(fs=TIER)


_CONTAINER = """
import os, sys
os.getpid = lambda: 7
from kvtiers.control import ControlSocket
served = ControlSocket({})
print(served.name, flush=True)
sys.stdin.read()
"""


def test_engines_of_one_pid_in_containers_that_share_a_network_are_two():
    start = partial(subprocess.Popen, [sys.executable, "-c", _CONTAINER], stdin=PIPE, stdout=PIPE, text=True)
    with start() as one, start() as two:
        names = {engine.stdout.readline().strip() for engine in (one, two)}
        assert len(names) == 2
        assert names <= set(running())
        for engine in (one, two):
            engine.stdin.close()


def test_nothing_is_left_of_a_socket_that_was_closed(serve):
    served = serve({})
    served.close()
    until = time.monotonic() + 60
    while served.name in running():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_engine_that_has_ended_is_none_though_a_connection_of_its_is_still_open():
    name = f"{SOCKET_PREFIX}{os.getpid()}-c0ffee-0"
    with socket.socket(socket.AF_UNIX) as client:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            client.connect(f"\0{name}")
            taken, _ = listener.accept()
            assert name in running()
        with taken:
            assert f"@{name}" in Path("/proc/net/unix").read_text()
            assert name not in running()


def test_a_client_that_connects_and_asks_nothing_blocks_no_other(serve):
    served = serve(answer(fs=TIER))
    with socket.socket(socket.AF_UNIX) as idle:
        idle.connect(f"\0{served.name}")
        assert ask(served.name)["model"] == "some-org/model"


_ENGINE = """
import multiprocessing, os, sys, time

def engine(pipe):
    from kvtiers.status import Troubles, answer_status
    troubles = Troubles([])
    stats = {"engine": {}, "primary": {}, "tiers": {}}
    named = {"namespace": "prod", "fingerprint": lambda: "c0ffee"}
    served = answer_status("vLLM 0.32.0", "orphans/model", troubles, lambda: stats, lambda *_: {}, **named)
    pipe.send((served.name, os.getpid()))
    time.sleep(300)

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context(sys.argv[1]).Process(target=engine, args=(theirs,)).start()
    print(*ours.recv(), flush=True)
    sys.stdin.read()
    os._exit(0)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engine_whose_server_is_gone_says_so(tmp_path, method):
    script = tmp_path / "server.py"
    script.write_text(_ENGINE)
    with subprocess.Popen([sys.executable, script, method], stdin=PIPE, stdout=PIPE, text=True) as server:
        name, pid = server.stdout.readline().split()
        try:
            assert not ask(name)["orphaned"]
            server.kill()
            server.wait(60)
            until = time.monotonic() + 60
            while not ask(name)["orphaned"]:
                assert time.monotonic() < until, "it does not say that its server is gone"
                time.sleep(0.05)
            lines = run("--engine", pid).stdout
            assert "namespace 'prod', fingerprint c0ffee" in lines
            assert f"orphaned: the server that started it has ended, so no request arrives; kill {pid}" in lines
        finally:
            os.kill(int(pid), 9)


def test_a_question_that_cannot_be_answered_says_why_and_the_next_one_is_answered(caplog):
    found = [ZeroDivisionError("no figures")]

    def status():
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    served = answering(status)
    try:
        with pytest.raises(CommandRefused, match="no figures"):
            ask(served.name)
        found[0] = answer(fs=TIER)
        assert ask(served.name) == answer(fs=TIER)
    finally:
        served.close()
    assert "a bug of kvtiers" in caplog.text


def test_a_question_that_cannot_be_taken_is_not_the_last(monkeypatch):
    accept, troubles = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def take(listening):
        if troubles:
            raise troubles.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", take)
    served = answering(lambda: answer(fs=TIER))
    try:
        assert ask(served.name) == answer(fs=TIER)
    finally:
        served.close()


def test_questions_are_taken_at_a_bounded_rate_from_any_user(serve):
    """A process that asks in a loop, of any user, would have the engine's interpreter for half of the time."""
    name = serve({"tiers": {}}).name
    began = time.monotonic()
    for _ in range(1_000):
        assert ask(name, 60.0) == {"tiers": {}}
    assert time.monotonic() - began > 0.8, "100 in each tenth of a second"


def test_the_tiers_are_looked_after_about_once_a_second_whether_anyone_asks_or_not(caplog):
    times, seen = [], threading.Event()

    def tend():
        times.append(time.monotonic())
        if len(times) >= 4:
            seen.set()
        raise ZeroDivisionError("a bug")

    served = answering(lambda: answer(fs=TIER), tend=tend)
    try:
        for _ in range(20):
            assert ask(served.name) == answer(fs=TIER)
        assert seen.wait(60), "a bug of it ends nothing, and nobody has to ask"
        assert times[3] - times[0] > 1.5, "not for each question"
    finally:
        served.close()
    assert "the tiers cannot be looked after; a bug of kvtiers" in caplog.text


def test_an_engine_that_has_ended_listens_to_the_log_no_longer():
    logger = logging.getLogger("kvtiers")
    before = list(logger.handlers)
    served = answer_status("vLLM 0.32.0", "some-org/model", Troubles(["fs", "redis"]), stats, lambda *_: {})
    assert len(logger.handlers) == len(before) + 2
    served.close()
    assert logger.handlers == before


def test_what_a_tier_logs_while_it_is_opened_is_its_last_trouble_also_for_those_who_ask_later():
    logger = logging.getLogger("kvtiers")
    before = list(logger.handlers)
    with troubles_from_the_start(["fs"]) as troubles:
        logger.warning("fs: out of use")
    figures = dict.fromkeys(TierMetrics.__slots__, 0) | TIER | {"own": {}}
    served = answer_status("vLLM 0.32.0", "some-org/model", troubles, lambda: stats(fs=figures), lambda *_: {})
    try:
        assert ask(served.name)["tiers"]["fs"]["trouble"] == "out of use"
    finally:
        served.close()
    assert logger.handlers == before


def test_a_start_that_fails_listens_to_the_log_no_longer():
    logger = logging.getLogger("kvtiers")
    before = list(logger.handlers)
    with pytest.raises(OSError, match="no tier"), troubles_from_the_start(["fs"]):
        raise OSError("no tier")
    assert logger.handlers == before


FULL = "full: its store has not taken 4 values; what it holds is read as before; raise 'capacity'"


def test_all_tiers_of_one_engine_stand_in_one_screen(serve):
    serve(
        answer(
            fs=TIER
            | {"hits": 30, "tokens": 960, "load_seconds": 0.5, "loaded_bytes": 3 << 20}
            | {"loads": 1, "saved_seconds": 7.25, "computing_seconds": 7.75}
        )
    )
    serve(answer(redis=TIER | {"breaker_state": 1, "trouble": "no route to host"}))
    result = run()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    own = [line for line in lines if f"process {os.getpid()}: some-org/model" in line]
    assert len(own) == 1
    row = ["fs", "in", "use", "30", "chunks", "960", "7.2", "s"]
    assert any(line.split()[:8] == row and "3MiB" in line for line in lines)
    assert any("redis" in line and "out of use" in line and line.endswith(" 0 s ago") for line in lines)
    assert sum("no route to host" in line for line in lines) == 1, "once, below the table"
    assert "  fs: it pays: 960 tokens came from it in 0.5 s of reading, which this engine computes in 7.8 s" in lines
    engines = json.loads(run("--json").stdout)
    (mine,) = [engine for engine in engines if engine["pid"] == os.getpid()]
    assert set(mine["tiers"]) == {"fs", "redis"}


def test_engines_of_one_pid_stand_apart(serve, monkeypatch):
    serve(answer(fs=TIER))
    monkeypatch.setattr("kvtiers.control._process", "of-another-container")
    serve(answer(redis=TIER))
    engines = [engine for engine in json.loads(run("--json").stdout) if engine["pid"] == os.getpid()]
    assert sorted(name for engine in engines for name in engine["tiers"]) == ["fs", "redis"]
    assert len(engines) == 2


_FAKE = """
import json, os, socket, sys, time
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind("\\0" + sys.argv[1])
listener.listen(8)
says = b'{"kvtiers_control": 1, "text": "", "result": %s}\\n' % sys.stdin.buffer.read()
print(flush=True)
while True:
    connection, _ = listener.accept()
    connection.recv(1 << 16)
    if sys.argv[3] == "slow":
        while True:
            try:
                connection.sendall(b" ")
            except OSError:
                break
            time.sleep(0.01)
    connection.sendall(says)
    connection.close()
"""


@pytest.fixture
def fake(serve):
    """Say this where an engine of this process, which answers too, would."""
    name = serve(answer(fs=TIER)).name
    processes = []

    def start(says, uid=None):
        arguments = [name.rpartition("-")[0] + "-999", str(os.geteuid() if uid is None else uid), says[:4]]
        processes.append(subprocess.Popen([sys.executable, "-c", _FAKE, *arguments], stdin=PIPE, stdout=PIPE))
        processes[-1].stdin.write(says.encode())
        processes[-1].stdin.close()
        processes[-1].stdout.readline()
        return arguments[0]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


_NO_ANSWERS = {
    "list": "[1, 2]",
    "text": '"text"',
    "half": "{",
    "deep": "[" * 200_000,
    "empty": "{}",
    "no tier": json.dumps(answer(t=5)),
    "half a tier": json.dumps(answer(t={"off": "", "open": 1})),
    "no number": json.dumps(answer(t=TIER | {"hits": "many"})),
    "not plain": json.dumps(answer(t=TIER | {"model": ["x"]})),
    "no namespace": json.dumps({name: part for name, part in answer(t=TIER).items() if name != "namespace"}),
    "no seconds": json.dumps(answer(t=TIER | {"silent_seconds": None})),
    "not a number": json.dumps(answer(t=TIER | {"loaded_bytes": float("nan")})),
    "no float": json.dumps(answer(t=TIER | {"hits": 10**400})),
    "figures in words": json.dumps(answer(t=TIER | {"written_chunks": "many"})),
    "left out in words": json.dumps(answer(t=TIER | {"left_out_requests": "many"})),
    "the engine's figures": json.dumps(answer(t=TIER) | {"figures": {"rows": 10**400}}),
    "endless": json.dumps(answer(t=TIER | {"loaded_bytes": 0.125})).replace("0.125", "1e999"),
}


@pytest.mark.parametrize("says", _NO_ANSWERS.values(), ids=_NO_ANSWERS)
def test_what_is_no_engine_s_answer_is_one_line_and_hides_no_engine(fake, says):
    name = fake(says)
    result = run()
    assert result.exit_code == 0
    assert f"{name}: no answer: what it says is no engine's answer" in result.stderr
    assert f"process {os.getpid()}: some-org/model" in result.stdout


def test_an_engine_that_ends_before_it_is_asked_is_no_line(serve, monkeypatch):
    ended = f"{serve(answer(fs=TIER)).name}-ended"
    found = iter([[*running(), ended]])
    monkeypatch.setattr("kvtiers.cli.engines.running", lambda: next(found, running()))
    result = run_of_ours()
    assert ended not in result.stderr
    assert f"process {os.getpid()}: some-org/model" in result.stdout


@pytest.mark.parametrize("report", [{"x": 1}, {"hit_rates": {"lru": {"1": 0.5}}, "adds": {}}])
def test_a_report_of_shadow_caches_that_is_none_is_not_shown(serve, report):
    serve(answer(fs=TIER) | {"what_if": report})
    result = run("--what-if")
    assert result.exit_code == 0
    assert "what if: nothing to say" in result.stdout


def test_an_answer_that_never_ends_is_waited_for_no_longer_than_others(fake):
    name = fake("slow")
    with pytest.raises(CommandRefused, match="it has not answered in time"):
        ask(name, 0.3)


def test_an_answer_moves_no_cursor(fake):
    fake(
        json.dumps(answer(t=TIER | {"trouble": "\x1b[2J\x1b]0;mine\x07\n"}) | {"pid": 7, "model": "\x1b[31mred\u202e"})
    )
    said = run().stdout
    assert "?[2J?]0;mine??" in said
    assert not set(said) & set("\x1b\x07\u202e")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_another_user_s_answer_is_added_to_no_engine_of_ours(fake, monkeypatch):
    name = fake(json.dumps(answer(theirs=TIER)), uid=65534)
    engines = [engine for engine in json.loads(run("--json").stdout) if engine["pid"] == os.getpid()]
    assert {engine["uid"]: list(engine["tiers"]) for engine in engines} == {0: ["fs"], 65534: ["theirs"]}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CommandRefused, match="it is of user id 65534; an engine answers only to its own user"):
        ask(name)


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({"off": "LoRA is enabled"}, "it does nothing here: LoRA is enabled"),
        ({"open": False, "trouble": "no such host"}, "cannot be used: no such host"),
        ({"breaker_state": 1}, "cannot be used"),
        ({"shared": False, "hits": 5}, "by this process alone"),
        ({"hits": 5, "tokens": 160}, "it pays: 160 tokens came from it in 0 s of reading; how long computing takes"),
        (SLOW | {"loads": 8}, "it does not pay: 160 tokens"),
        (SLOW | {"loads": 8}, "in 3 s of reading, which this engine computes in 2 s"),
        (SLOW | {"loads": 7}, "nothing can be said yet: 160 tokens came from it in 3 s of reading"),
        (SLOW | {"loads": 8, "saved_seconds": 0.2}, "it pays: 160 tokens"),
        (
            {"too_slow": True, "hits": 5, "trouble": "too slow: 60 chunks were computed"},
            "it brings next to nothing: too slow: 60 chunks were computed",
        ),
        (
            {"full": True, "hits": 5, "not_taken": 231, "not_taken_seconds": 40.0, "trouble": FULL},
            "it takes nothing new: 231 values not taken, the last 40 s ago; raise 'capacity'",
        ),
        (
            {"full": True, "not_taken": 231, "not_taken_seconds": 40.0, "taken_meanwhile": 46},
            "it takes little of what is new: 231 values not taken, 46 were, the last 40 s ago; the log says what to do",
        ),
        ({"full": True, "hits": 5, "trouble": "another one"}, "it takes nothing new: the log says what to do"),
        (
            {"silent_seconds": 17.2, "waiting_calls": 9, "too_slow": True},
            "it brings nothing: no answer for 17 s, 9 calls wait; look whether its backend hangs",
        ),
        (
            {"breaker_state": 1, "breaker_seconds": 200.0, "trouble": "taken out of use after OSError"},
            "it brings nothing for 3 min 20 s, since it cannot be used: taken out of use after OSError",
        ),
        (
            {"retired": True, "trouble": "put out of use: job 7 was never given"},
            "it brings nothing until the engine is started again: put out of use: job 7 was never given",
        ),
        ({"seal_failures": 2}, "2 values came back damaged"),
        ({"wait_expired": 9, "stored_chunks": 1000}, "too late"),
        ({"recomputed_cheaper": 9, "stored_chunks": 1000}, "computing is faster than reading from it"),
        ({"left_out_requests": 3}, "nothing for salted requests and for sessions in this release of vLLM: 3 came"),
        ({"left_out_requests": 3, "stored_chunks": 1000}, "no prompt that it holds has come again"),
        ({"stored_chunks": 1000}, "no prompt that it holds has come again"),
        ({}, "nothing can be said yet"),
    ],
)
def test_one_sentence_says_whether_a_tier_pays_and_if_not_why(figures, sentence):
    assert sentence in verdict(TIER | figures)


@pytest.mark.parametrize(
    ("figures", "state"),
    [
        ({}, "in use"),
        ({"full": True}, "full"),
        ({"too_slow": True}, "too slow"),
        ({"full": True, "too_slow": True}, "full, too slow"),
        ({"full": True, "taken_meanwhile": 3}, "takes little"),
        ({"silent_seconds": 17.0, "too_slow": True}, "no answer"),
        ({"full": True, "breaker_state": 1}, "out of use"),
        ({"open": False}, "not open"),
        ({"retired": True}, "retired"),
    ],
)
def test_the_state_of_a_tier_says_what_holds_it_up(serve, figures, state):
    name = f"fs-{os.getpid()}"  # other engines of this machine are listed, too
    serve(answer(**{name: TIER | figures}))
    lines = run_of_ours().stdout.splitlines()
    (row,) = [line for line in lines if line.split()[:1] == [name]]
    assert row.split("  ")[1].strip() == state or f" {state} " in row


def test_a_tiers_last_trouble_is_its_own_last_warning_in_one_line_and_ends_when_the_log_says_so():
    now = [100.0]
    logger, trouble = logging.getLogger("kvtiers.test_status"), LastTrouble("fs", lambda: now[0])
    logging.getLogger("kvtiers").addHandler(trouble)
    try:
        logger.warning("%s: %s", "fs", "the first")
        logger.warning("fs: the second")
        logger.warning("redis: another logger's")
        logger.info("fs: no trouble")
        assert (trouble.text, trouble.is_over, trouble.seconds) == ("the second", False, 0.0)
        now[0] += 40.0
        logger.warning("fs: answers again; back in use")
        assert (trouble.text, trouble.is_over, trouble.seconds) == ("the second", True, 40.0)
        logger.error("fs: job 3\nTraceback (most recent call last):\n  File x, line 3\nValueError: bad")
        assert (trouble.text, trouble.is_over) == ("job 3: ValueError: bad", False)
    finally:
        logging.getLogger("kvtiers").removeHandler(trouble)


def report(**more):
    rates = {"0.25": 0.1, "0.5": 0.2, "1": 0.3, "2": 0.334, "4": 0.35, "8": 0.351}
    learnt = {times: rate + 0.061 for times, rate in rates.items()}
    return {
        "policy": "lru",
        "rows": 16384,
        "sampled": 0.0625,
        "chunks": 250_000,
        "infinite": 0.36,
        "capacity": 64 * 2**30,
        "dropped": 3,
        "seconds": 1.5,
        "hit_rates": {"lru": rates, "turn-hazard": learnt},
        "adds": {"fs": 0.08, "s3": 0.002},
    } | more


def test_what_if_is_a_table_and_one_sentence(serve):
    serve(answer(fs=TIER) | {"what_if": report()})
    shown = run_of_ours("--what-if").output
    assert "16GiB" in shown
    assert "512GiB" in shown
    assert "39.5 %" in shown
    assert "250,000 chunks asked for, 6.2 % of them in the sample, 3 requests left out" in shown
    sentence = "with turn-hazard +6.1 points; with 128GiB +3.4; the fs tier adds 8.0; the s3 tier adds 0.2: drop it"
    assert f"what if: {sentence}\n" in shown
    assert "what if" not in run_of_ours().output


def test_what_if_says_when_nothing_would_help_and_when_it_is_too_early():
    flat = {"0.25": 0.3, "0.5": 0.3, "1": 0.3, "2": 0.3, "4": 0.301, "8": 0.302}
    assert what_if_sentence(report(hit_rates={"lru": flat, "arc": flat}, adds={})) == (
        "lru is the best policy; more memory, up to 512GiB, adds nothing"
    )
    assert (
        what_if_sentence(report(chunks=500))
        == "nothing can be said yet: 500 chunks were asked for, 10,000 say something"
    )


def test_an_engine_without_shadow_caches_says_how_to_have_them(serve):
    serve(answer(fs=TIER))
    shown = run_of_ours("--what-if").output
    assert "'what_if: true' in the engine's config" in shown


def test_writes_per_hit_are_said_once_there_are_enough(serve):
    assert writes_per_hit(TIER | {"written_chunks": 99, "hits": 9}) == ""
    assert writes_per_hit(TIER | {"written_chunks": 5000}) == "5,000 chunks written, no hit so far"
    said = "4.0 writes per hit: 5,000 chunks written, 1,250 hits"
    assert writes_per_hit(TIER | {"written_chunks": 5000, "hits": 1250}) == said
    serve(answer(fs=TIER | {"written_chunks": 5000, "hits": 1250}))
    assert f"  fs: {said}\n" in run_of_ours().output


def test_a_tier_that_was_put_out_of_use_for_good_is_not_said_to_be_in_use():
    figures = TierMetrics(out_of_use=1).as_data() | {"own": {"open": 1}, "off": "", "shared": True, "tokens": 0}
    name = f"fs-{os.getpid()}"
    named = {"tiers": {name: figures}, "engine": {}, "primary": {}}
    engine = answer_status("vLLM 0.32.0", "some-org/model", Troubles([name]), lambda: named, lambda *_: {})
    try:
        tier = ask(engine.name)["tiers"][name]
    finally:
        engine.close()
    assert (tier["retired"], state_of(tier)) == (True, "retired")


def test_the_budget_that_costs_hits_is_named_with_what_to_change(serve):
    figures = TierMetrics(lookups=1000, stored_chunks=500, over_one_tier=100, over_all_tiers=20).as_data()
    figures |= {"own": {"already_present": 100}, "off": "", "shared": True, "tokens": 0}
    engine = answer_status("vLLM 0.32.0", "some-org/model", Troubles(["fs"]), lambda: stats(fs=figures), lambda *_: {})
    try:
        said_of_it = ask(engine.name)["tiers"]["fs"]
        shown = run_of_ours().output
    finally:
        engine.close()
    assert said_of_it["written_chunks"] == 400
    assert said_of_it["budget"] == (
        "'budgets.one_tier' costs hits: 100 chunks got no row or were not sent; raise 'budgets.one_tier' (at most to "
        "'all_tiers'), or raise 'primary.capacity'"
    )
    assert f"  fs: {said_of_it['budget']}\n" in shown


EVENTS = {"endpoint": "tcp://*:5557", "error": "", "batches": 1234, "chunks": 56789, "dropped_chunks": 0}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "KV events: tcp://*:5557, 1,234 batches of 56,789 chunks, none dropped"),
        (
            {"dropped_chunks": 7},
            (
                "KV events: tcp://*:5557, 1,234 batches of 56,789 chunks; 7 chunks' events were dropped: raise "
                "'events.max_waiting'"
            ),
        ),
        ({"error": "tcp://*:5557: it is in use"}, "KV events: none are published: tcp://*:5557: it is in use"),
    ],
)
def test_an_engine_says_whether_its_kv_events_are_published(serve, changed, line):
    serve(answer(fs=TIER) | {"events": EVENTS | changed})
    assert f"  {line}\n" in run_of_ours().output


@pytest.mark.parametrize("events", [[], {"endpoint": 5}, EVENTS | {"batches": "many"}])
def test_a_report_of_kv_events_that_is_none_is_no_engine_s_answer(serve, events):
    serve(answer(fs=TIER) | {"events": events})
    assert "no engine's answer" in run_of_ours().output


@pytest.mark.parametrize(
    ("late", "said"), [(1, "1 load came late, computed"), (1200, "1,200 loads came late, computed")]
)
def test_loads_that_came_late_are_counted_where_vllms_warning_sends_an_operator(serve, late, said):
    serve({**answer(fs=TIER), "figures": {"late_loads": late}})
    assert f"  {said}: vLLM logs 'Recovered from KV load failure' for each\n" in (run_of_ours().output)


def test_loads_that_came_in_time_are_no_line(serve):
    serve({**answer(fs=TIER), "figures": {"late_loads": 0}})
    assert "came late" not in run_of_ours().stdout, "another engine of this machine may say so"


@pytest.mark.parametrize(("unusable", "requests"), [(1, "1 request"), (1200, "1,200 requests")])
def test_requests_whose_prefix_has_no_checkpoint_are_counted_with_the_option_that_sets_these(serve, unusable, requests):
    serve({**answer(fs=TIER), "figures": {"unusable_prefixes": unusable}})
    line = f"  {requests} found a stored prefix that ends before its next checkpoint, and loaded none of it: "
    assert f"{line}vLLM's --prefix-cache-retention-interval sets more checkpoints\n" in run_of_ours().output


def test_where_each_prefix_has_a_checkpoint_there_is_no_line(serve):
    serve({**answer(fs=TIER), "figures": {"unusable_prefixes": 0}})
    assert "before its next checkpoint" not in run_of_ours().stdout, "another engine of this machine may say so"


def shown(serve, tier, **more):
    serve(answer(fs=TIER | tier) | more)
    return run_of_ours().stdout.splitlines()


def test_what_the_trouble_was_stands_once_below_the_table_with_its_age(serve):
    lines = shown(serve, {"trouble": "its host ended", "trouble_seconds": 2460.0})
    assert lines[2].endswith(" 41 min ago")
    assert [line for line in lines if "its host ended" in line] == ["  fs: last trouble (41 min ago): its host ended"]


def test_a_trouble_that_is_over_is_called_so(serve):
    lines = shown(serve, {"trouble": "out of use: refused", "trouble_seconds": 3.4, "trouble_is_over": True})
    assert lines[2].endswith(" 3.4 s ago, over")
    assert "  fs: last trouble (3.4 s ago, over): out of use: refused" in lines


def test_a_store_that_is_full_is_one_sentence_and_not_its_old_line_besides(serve):
    lines = shown(serve, {"full": True, "not_taken": 231, "not_taken_seconds": 40.0, "trouble": FULL})
    assert sum("raise 'capacity'" in line for line in lines) == 1
    assert not any("4 values" in line for line in lines)


def test_the_primary_has_a_row(serve):
    lines = shown(serve, {}, figures={"primary_hits": 1234, "rows": 1000, "free_rows": 37})
    assert lines[2].split("  ")[1:] == ["primary", "37 of 1,000 rows free", "1,234 chunks"]


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (0, []),
        (1, ["  pool: this engine has its memory, and the next one finds what is in it"]),
        (
            2,
            ["  pool: this engine has its memory, but no keeper takes what is new: the next engine does not find that"],
        ),
        (
            3,
            ["  pool: not to be had: the memory is this engine's own, and ends with it ('kvtiers check' says why)"],
        ),
    ],
)
def test_whether_an_engine_has_its_pool_is_said_of_those_that_are_to_have_one(serve, pool, said):
    assert [line for line in shown(serve, {}, figures={"pool": pool}) if "pool" in line] == said


def test_one_engine_can_be_asked_for(serve):
    assert shown(serve, {})[0].startswith("vLLM 0.32.0, process")
    other = run("--engine", "1")
    assert (other.exit_code, other.stdout) == (1, "")
    assert "no engine with kvtiers runs here as process 1 of this user" in other.stderr


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.123, "0.12 s"),
        (3.38, "3.4 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (123.0, "2 min 3 s"),
        (3380.0, "56 min"),
        (3600.0, "1 h"),
        (18_720.0, "5 h 12 min"),
        (300_000.0, "3 days"),
        (float("inf"), "inf s"),
    ],
)
def test_times_are_written_as_people_say_them(seconds, words):
    assert in_words(seconds) == words


def test_what_did_not_come_and_why_stands_before_any_advice(serve):
    figures = {"loaded_chunks": 0, "failed_loads": 205, "seal_failures": 200, "missing": 1, "budget": "raise it"}
    lines = shown(serve, figures)
    reasons = "200 were damaged, 1 were not there, 4 failed or came too late"
    said = f"  fs: of 205 chunks that it said it has, none could be read: {reasons}"
    assert lines.index(said) < lines.index("  fs: raise it")
    assert not any("could be read" in line for line in shown(serve, {"loaded_chunks": 200, "failed_loads": 5}))


def test_an_answer_that_would_be_too_long_to_be_read_still_says_what_the_tiers_are():
    long = stats() | {"what_if": {"x": "x" * 600_000}, "events": {"endpoint": "there"}}
    served = answer_status("vLLM 0.32.0", "some-org/model", Troubles([]), lambda: long, lambda *_: {})
    try:
        said = ask(served.name)
    finally:
        served.close()
    assert not said.keys() & {"commands", "what_if"}
    assert said["model"] == "some-org/model"
    assert said["events"] == {"endpoint": "there"}


def test_status_is_answered_while_more_commands_than_may_run_wait_for_the_engine():
    over = threading.Event()

    def hang(_):
        over.wait(60)
        return "done", {}

    served = ControlSocket({"status": lambda _: ("", answer(fs=TIER)), "drain": hang})
    try:
        with ThreadPoolExecutor(40) as pool:
            sent = [pool.submit(send_command, served.name, "drain", 60) for _ in range(40)]
            for _ in range(20):
                assert ask(served.name, 60)["tiers"] == {"fs": TIER}
            over.set()
            assert [one.result(60) for one in sent] == [("done", {})] * 40
    finally:
        over.set()
        served.close()


def test_the_status_of_an_engine_is_asked_for_without_a_line_in_its_log(serve, caplog):
    ask(serve(answer(fs=TIER)).name)
    assert not caplog.records


def test_a_machine_that_shows_no_sockets_is_said_so(monkeypatch):
    monkeypatch.setattr("kvtiers.cli.engines._SOCKETS", "/nowhere/net/unix")
    done = run_of_ours()
    assert "no engine can be found: /nowhere/net/unix cannot be read" in done.stderr
