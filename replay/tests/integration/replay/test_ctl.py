"""``kvtiers ctl``: a running engine is commanded from another process, and serves on with the right bytes."""

import json
import os
import re
import signal
import subprocess
import threading
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtiers.cli.main import cli

from .setups import is_running, named, wait_until
from .test_replay_command import SMALL, command

START = """\
version: 1
tenants: {}
primary: {capacity: 4MiB}
secondary:
  - {type: memory, capacity: 64MiB}
lookup_wait: 30s
load_wait: 30s
"""
LATER = """\
version: 1
tenants: {}
primary: {capacity: 8MiB}
secondary:
  - {type: fs, path: FOLDER, capacity: 64MiB, processes: 2}
  - {type: memory, capacity: 64MiB, threads: 3, rate_limit: {bytes_per_second: 64MiB}, deadline: 20s}
lookup_wait: 20s
load_wait: 30s
budgets: {one_tier: 30%}
"""
OTHER_THREADS = 3  # of a host: the main one, the one that reads the engine's jobs, the one that sends probes


def start(folder: Path) -> subprocess.Popen[str]:
    """Start an engine that serves small requests for minutes: every second one is new, the others come in turns.

    In a turn more come than the primary holds, so they are looked for in the tiers; the new ones are there to be
    stored, however long the test takes to look.
    """
    trace = folder / "trace.jsonl"
    with trace.open("w", encoding="utf-8") as lines:
        for number in range(20_000):
            prefix = number if number % 2 else f"turn {number % 200}"
            ids = [f"{prefix}.{place}" for place in range(6)]
            fields = {"timestamp": 10 * number, "input_length": 3073, "hash_ids": [*ids, "rest"]}
            if number % 4 == 0:
                fields["tenant"] = "blue"
            lines.write(json.dumps(fields) + "\n")
    (folder / "tiers.yaml").write_text(START, encoding="utf-8")
    (folder / "later.yaml").write_text(LATER.replace("FOLDER", str(folder / "fs")), encoding="utf-8")
    arguments = ("--config", folder / "tiers.yaml", "--trace", trace, "--speed", 1, "--json", *SMALL)
    with (folder / "stderr").open("w", encoding="utf-8") as log:
        return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=log, text=True)


class Engine:
    """A replay, seen by another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = start(folder)
        self.named = ["--engine", str(self.process.pid), "--timeout", "60"]  # a busy machine's answer comes late
        wait_until(lambda: self.status()["tiers"]["memory"]["stored_chunks"])

    def status(self) -> dict:
        """Its answer; a busy machine's may come too late for one question."""
        found: list[dict] = []

        def answers() -> bool:
            done = CliRunner().invoke(cli, ["status", "--json"])
            found.extend(one for one in json.loads(done.stdout or "[]") if one["pid"] == self.process.pid)
            return bool(found)

        wait_until(answers)
        return found[0]

    def ctl(self, *arguments: object) -> dict:
        """Send a command; its answer, which is no refusal."""
        answer = self.refused(*arguments)
        assert "error" not in answer, answer
        return answer

    def refused(self, *arguments: object) -> dict:
        """Send a command; its answer."""
        words = [*map(str, arguments), *self.named, "--json"]
        done = CliRunner().invoke(cli, ["ctl", *words])
        (answer,) = json.loads(done.stdout)
        assert done.exit_code == int("error" in answer)
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def hosts(self, name: str) -> list[int]:
        return named(self.process.pid, name)

    def log(self) -> str:
        return (self.folder / "stderr").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One engine for all commands; what it has loaded in the end is what was stored, to the byte."""
    engine = Engine(tmp_path_factory.mktemp("ctl"))
    try:
        yield engine
        engine.process.send_signal(signal.SIGINT)
        out, _ = engine.process.communicate(timeout=300)
        assert engine.process.returncode == 130, engine.log()
        assert "Traceback" not in engine.log()
        figures = json.loads(out)
        assert figures["wrong_bytes"] == 0
        assert figures["references"] > 0
    finally:
        engine.end()


def test_an_engine_that_serves_is_warmed_from_a_tier_by_its_trace(engine) -> None:
    """Its memory is emptied first; that what it then serves is right is seen at its end."""
    first = engine.folder / "first.jsonl"
    with (engine.folder / "trace.jsonl").open(encoding="utf-8") as lines:
        first.write_text("".join(islice(lines, 400)), encoding="utf-8")
    engine.ctl("clear", "--model", engine.status()["model"])
    words = ["--from", "memory", "--trace", first, "--rate", "256MiB/s"]
    done = CliRunner().invoke(cli, ["warm", *map(str, words), "--engine", str(engine.process.pid), "--json"])
    (answer,) = json.loads(done.stdout)
    assert done.exit_code == 0, answer
    assert answer["ended"] in {"done", "the primary is full"}
    assert answer["loaded"] > 0
    assert engine.status()["commands"][-1]["command"].startswith("warm-end id=")


def test_top_shows_what_an_engine_does_in_columns_of_80_and_for_programs(engine) -> None:
    """Its figures are the engine's own: a figure of another name would be 0 here, or an error."""

    def measured() -> dict:
        done = CliRunner().invoke(cli, ["top", "--once", "--json", "--interval", "1"])
        found = {one["pid"]: one for one in json.loads(done.stdout)}
        return found.get(engine.process.pid, {"tiers": {}})

    flows = ("hits_per_second", "read_bytes_per_second", "written_bytes_per_second")
    seen: list[dict] = []

    def has_moved() -> bool:
        seen.append(measured())
        tier = seen[-1]["tiers"].get("memory")
        return tier is not None and all(tier[flow] > 0 for flow in flows) and seen[-1]["hit_rate"] is not None

    before = engine.status()
    wait_until(has_moved)
    after, mine = engine.status(), seen[-1]
    tier = mine["tiers"]["memory"]
    for figure, shown in (("hits", "hits"), ("loaded_bytes", "read_bytes"), ("stored_bytes", "written_bytes")):
        assert before["tiers"]["memory"][figure] <= tier[shown] <= after["tiers"]["memory"][figure], shown
    assert (tier["state"], tier["switch"], tier["breaker"]) == ("in use", "on", "closed")
    assert mine["hit_rate"] > 0
    assert 0 < mine["hit_rate_so_far"] <= 1
    assert mine["step_share"] > 0
    assert mine["steps_per_second"] > 0
    assert 0 <= mine["free_rows"] <= mine["rows"] == after["figures"]["rows"]
    assert tier["saved_seconds"] is not None

    found: list[str] = []

    def is_on_the_screen() -> bool:
        done = CliRunner().invoke(cli, ["top", "--once", "--interval", "1"])
        lines = done.stdout.splitlines()
        mine = [at for at, line in enumerate(lines) if f"process {engine.process.pid}:" in line]
        found[:] = lines[mine[0] : mine[0] + 5] if mine else []
        return bool(found)

    wait_until(is_on_the_screen)
    assert max(map(len, found)) <= 80
    summary = r"  hits [\d.]+ % now, [\d.]+ % in all, [\d,]+ of [\d,]+ rows free"
    assert re.fullmatch(summary, found[1]), found[1]
    assert re.fullmatch(r"  kvtiers takes [\d.]+ % of the time of the engine's thread", found[2]), found[2]
    assert found[3].split()[:3] == ["tier", "state", "hits/s"]
    assert re.match(r"memory +in use +[\d.k]+ +\d\.\d{3} +\d\.\d{3} ", found[4]), found[4]


def test_a_tier_is_switched_off_and_on_and_the_status_says_so(engine) -> None:
    assert engine.ctl("memory", "off")["text"].startswith("memory: off, it was on")
    before = engine.status()["tiers"]["memory"]
    assert before["switch"] == "off"
    assert engine.ctl("drain")["result"]["failed_chunks"] == 0
    written = engine.status()["tiers"]["memory"]["stored_chunks"]
    steps = engine.ctl("memory", "off")["result"]
    assert (steps["was"], steps["running_jobs"]) == ("off", 0)
    assert engine.status()["tiers"]["memory"]["stored_chunks"] == written
    assert engine.ctl("memory", "on")["result"]["was"] == "off"
    wait_until(lambda: engine.status()["tiers"]["memory"]["stored_chunks"] > written)
    assert f"uid {os.getuid()}, pid {os.getpid()}: switch tier='memory' to='on'" in engine.log()
    assert engine.status()["commands"][-1]["command"] == "switch tier='memory' to='on'"


def test_the_printed_answer_names_the_engine_that_was_commanded(engine) -> None:
    """Also where one alone runs: none was named on the command line then."""
    pid = str(engine.process.pid)
    done = CliRunner().invoke(cli, ["ctl", "memory", "on", *engine.named])
    assert done.stdout == f"process {pid}: memory: on, it was on\n"
    done = CliRunner().invoke(cli, ["ctl", "other", "off", *engine.named])
    assert f"error: process {pid}: " in done.stderr, "engines of other tests, which end now, may have lines before it"


def test_threads_and_rates_change_in_a_running_host(engine) -> None:
    assert engine.ctl("memory", "threads", 9)["text"] == "memory: 9 threads a host, no rate limit"
    (host,) = engine.hosts("memory")

    def threads() -> int:
        return len(list(Path(f"/proc/{host}/task").iterdir()))

    wait_until(lambda: threads() == OTHER_THREADS + 9)
    assert engine.ctl("memory", "threads", 1)["result"]["threads"] == 1
    wait_until(lambda: threads() == OTHER_THREADS + 1)
    assert engine.ctl("memory", "rate-limit", "1GiB", "--requests", 500)["text"] == (
        "memory: 1 thread a host, 1GiB a second and 500 calls a second"
    )
    assert engine.ctl("memory", "rate-limit", "none")["text"] == "memory: 1 thread a host, no rate limit"
    engine.ctl("memory", "threads", 4)
    assert engine.ctl("drain")["result"]["failed_chunks"] == 0


def test_what_a_file_changes_is_applied_or_named_in_one_line(engine) -> None:
    done = engine.ctl("reload", "--config", engine.folder / "later.yaml")["result"]
    assert {"lookup_wait", "budgets.one_tier", "secondary.memory.rate_limit", "secondary.memory.threads"} <= set(
        done["applied"]
    )
    assert done["refused"] == [
        "primary: it is read at the start only; restart the engine",
        "secondary.fs: it is new; 'kvtiers ctl attach fs' opens it",
        "secondary.memory.deadline: it is read when the tier is opened; 'kvtiers ctl detach memory', then attach",
    ]
    again = engine.ctl("reload", "--config", engine.folder / "later.yaml")["result"]
    assert again["applied"] == []
    assert len(again["refused"]) == 3
    assert engine.ctl("reload")["result"]["refused"] == []
    bad = engine.folder / "bad.yaml"
    bad.write_text(START.replace("lookup_wait", "lookup_wiat"), encoding="utf-8")
    assert "lookup_wiat" in engine.refused("reload", "--config", bad)["error"]
    assert "cannot read the file" in engine.refused("reload", "--config", engine.folder / "none.yaml")["error"]


def test_a_tier_that_the_file_makes_read_only_stays_so_when_it_is_switched_off_and_on(engine) -> None:
    read_only = engine.folder / "read-only.yaml"
    read_only.write_text(START.replace("64MiB}", "64MiB, read_only: true}"), encoding="utf-8")
    applied = engine.ctl("reload", "--config", read_only)["result"]["applied"]
    assert applied == ["secondary.memory.read_only"]
    engine.ctl("memory", "off")
    engine.ctl("memory", "on")
    assert engine.ctl("drain")["result"]["failed_chunks"] == 0
    before = engine.status()
    written = before["tiers"]["memory"]["stored_chunks"]
    wait_until(lambda: engine.status()["figures"]["lookups"] > before["figures"]["lookups"] + 20)
    assert engine.ctl("drain")["result"]["failed_chunks"] == 0
    assert engine.status()["tiers"]["memory"]["stored_chunks"] == written
    assert engine.ctl("reload")["result"]["applied"] == applied
    wait_until(lambda: engine.status()["tiers"]["memory"]["stored_chunks"] > written)


def test_tiers_are_attached_and_detached_and_leave_no_process(engine) -> None:
    later = engine.folder / "later.yaml"
    assert engine.ctl("attach", "fs", "--config", later)["text"].startswith("fs: attached, ")
    wait_until(lambda: engine.status()["tiers"]["fs"]["open"])  # at once, but for a busy machine
    assert list(engine.status()["tiers"]) == ["fs", "memory"], "in the file's order"
    wait_until(lambda: engine.status()["tiers"]["fs"]["stored_chunks"])
    hosts = engine.hosts("fs (1 of 2)") + engine.hosts("fs (2 of 2)")
    assert len(hosts) == 2
    assert engine.refused("attach", "fs")["error"] == "the tier 'fs' is attached already"
    managed = engine.folder / "managed.yaml"
    managed.write_text(START.replace("secondary:", "secondary:\n  - {type: memory-async, max_blocks: 64}"))
    refused = engine.refused("attach", "memory-async", "--config", managed)["error"]
    assert refused == "memory-async: a tier that moves its rows by itself is opened at the start only"
    assert engine.ctl("detach", "memory")["text"] == "memory: detached"
    assert list(engine.status()["tiers"]) == ["fs"]
    assert not engine.hosts("memory")
    wait_until(lambda: engine.status()["tiers"]["fs"]["hits"])
    engine.ctl("attach", "memory")
    engine.ctl("detach", "fs")
    wait_until(lambda: not any(map(is_running, hosts)))
    assert "no tier 'fs'; this engine has memory" in engine.refused("detach", "fs")["error"]
    assert "there is no tier 'fs' in" in engine.refused("attach", "fs")["error"]
    wait_until(lambda: engine.status()["tiers"]["memory"]["stored_chunks"])


def test_a_clear_forgets_what_is_in_memory_if_it_is_what_was_meant(engine) -> None:
    blue = engine.ctl("clear", "--tenant", "blue")
    assert blue["result"]["cleared_chunks"] > 0
    assert "chunks of tenant 'blue' forgotten; what the tiers hold stays" in blue["text"]
    assert engine.ctl("clear", "--tenant", "red")["result"] == {"tenant": "red", "cleared_chunks": 0}
    assert "cannot be used" in engine.refused("clear", "--tenant", "Blue")["error"]
    fingerprint = engine.status()["fingerprint"]
    other = engine.refused("clear", "--fingerprint", "0123456789abcdef")["error"]
    assert other == f"this engine's fingerprint is '{fingerprint}', not '0123456789abcdef'; nothing was changed"
    done = engine.ctl("clear", "--fingerprint", fingerprint[:8])["result"]
    assert done["fingerprint"] == fingerprint
    assert done["cleared_chunks"] > 0
    assert engine.ctl("clear", "--model", "replay")["result"]["model"] == "replay"


def test_an_engine_that_is_killed_under_a_command_leaves_one_line_and_no_process(tmp_path) -> None:
    engine = Engine(tmp_path)
    try:
        engine.ctl("attach", "fs", "--config", tmp_path / "later.yaml")
        hosts = engine.hosts("memory") + engine.hosts("fs (1 of 2)") + engine.hosts("fs (2 of 2)")
        assert len(hosts) == 3
        (control,) = [engine.status()["control"]]
        engine.process.send_signal(signal.SIGSTOP)
        answers: list[str] = []

        def drain() -> None:
            from kvtiers.control import CommandRefused, send_command

            try:
                send_command(control, "drain", 100.0)
            except CommandRefused as refusal:
                answers.append(str(refusal))

        client = threading.Thread(target=drain)
        client.start()
        wait_until(lambda: f"@{control}" in Path("/proc/net/unix").read_text(encoding="utf-8"))
        engine.process.kill()
        client.join(60)
        (line,) = answers
        assert "ended before it answered" in line or "Connection refused" in line
        wait_until(lambda: not any(map(is_running, hosts)))
        engine.process.wait(60)  # only then has the kernel closed its sockets
        wait_until(lambda: f"@{control}" not in Path("/proc/net/unix").read_text(encoding="utf-8"))
    finally:
        engine.end()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["ctl", "fs", "of"], "No such command 'of'"),
        (["ctl", "fs", "threads", "0"], "0 is not in the range"),
        (["ctl", "fs", "rate-limit", "4 parsecs"], "unknown unit 'parsecs'"),
        (["ctl", "fs", "rate-limit", "none", "--requests", "few"], "expected a number above 0, or none, got 'few'"),
        (["ctl", "clear"], "give one of --fingerprint, --model and --tenant"),
        (["ctl", "clear", "--model", "a", "--tenant", "b"], "give one of --fingerprint, --model and --tenant"),
        (["ctl", "drain", "--engine", "1"], "error: no engine with kvtiers runs here as process 1 of this user"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_exit_status_2(words, line) -> None:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert line in done.output
    assert "Traceback" not in done.output
