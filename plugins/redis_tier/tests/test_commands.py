"""The tier as its users see it: from a YAML file, in a tier host of its own, by the command line."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from redis_traffic import Cuts

PROGRAM = Path(sys.executable).with_name("kvtiers")


@pytest.fixture
def kvtiers(tmp_path):
    """Return a function that runs the command line on a config with this tier, and gives status and output."""

    def run(command: str, url: str, *words: str, **options: str) -> tuple[int, str]:
        config = tmp_path / "tiers.yaml"
        more = "".join(f"\n    {name}: {text}" for name, text in options.items())
        config.write_text(
            "version: 1\nnamespace: ns\nmodel: {name: m, revision: r}\nprimary: {capacity: 8MiB}\n"
            "lookup_wait: 30s\nload_wait: 30s\nsecondary:\n"  # a busy machine's late answers are hits all the same
            f"  - type: redis\n    url: {url}{more}\n"
        )
        where = [str(config)] if command == "check" else ["--config", str(config)]
        whole = [PROGRAM, command, *where, *words]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=500, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_check_writes_reads_and_says_what_is_wrong(kvtiers, start):
    server = start()
    server.call("CONFIG SET", "maxmemory", 1 << 30)
    status, said = kvtiers("check", server.url)
    assert "maxmemory-policy noeviction" in said
    assert "CONFIG SET maxmemory-policy allkeys-lru" in said
    server.call("CONFIG SET", "maxmemory-policy", "allkeys-lru")
    status, said = kvtiers("check", server.url)
    assert status == 0, said
    assert "noeviction" not in said
    assert server.call("DBSIZE") == 0, "the probe's value has been removed"


def test_a_check_of_a_server_that_is_not_there_names_it_and_no_password(kvtiers, start):
    server = start()
    server.stop()
    status, said = kvtiers("check", server.url, password="hunter2")
    assert status != 0
    assert f"127.0.0.1:{server.port}" in said
    assert "hunter2" not in said


def test_a_url_with_a_password_is_refused_and_not_printed(kvtiers):
    status, said = kvtiers("check", "redis://user:hunter2@cache", "--offline")
    assert status != 0
    assert "'username' and 'password'" in said
    assert "hunter2" not in said


WORKLOAD = ("--workload", "code", "--primary-chunks", "64", "--json", "--requests")


def report_of(said: str) -> dict:
    return json.loads(next(line for line in said.splitlines() if line.startswith("{")))


def test_what_an_engine_stored_the_next_one_loads_byte_for_byte(kvtiers, start):
    server, hits = start(), 0
    for _ in range(8):  # on a busy machine an engine stores little
        status, said = kvtiers("replay", server.url, *WORKLOAD, "60")
        assert status == 0, said
        report = report_of(said)
        assert report["wrong_bytes"] == 0
        hits = report["hits"]["redis"]
        if hits > 500:
            break
    assert hits > 500


def test_connections_that_are_cut_while_an_engine_runs_cost_no_wrong_byte(kvtiers, start):
    server = start()
    stop, cuts = threading.Event(), Cuts(server, 20)

    def cut() -> None:
        while not stop.wait(0.02):
            cuts.make()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for _ in range(2):
            status, said = kvtiers("replay", server.url, *WORKLOAD, "20")
            assert status == 0, said
    finally:
        stop.set()
        thread.join(60)
    report = report_of(said)
    assert report["wrong_bytes"] == 0
    assert report["hits"]["redis"] > 0, "values come through all the same"
