"""``tools/try_compose.py`` beside a stand-in for Compose, and servers that answer as its services do."""

import json
import random
import re
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

TOOL = Path(__file__).parents[3] / "tools" / "try_compose.py"
DOCKER = """#!/bin/sh
case "$*" in
    *--all*) cat containers ;;  # without --all it lists those that run alone: none here
esac
"""
PODMAN = """#!/bin/sh
case "$*" in
    *--all*) echo unrecognized arguments: --all >&2; exit 2 ;;
    ps*) cat containers ;;
esac
"""


class Replica(BaseHTTPRequestHandler):
    """A vLLM with the figures that the tool reads; also Prometheus. ``valkey``: the prompts that are stored."""

    valkey: set[str]
    figures: dict[str, int]
    finish_reason = "length"

    def do_GET(self):
        lines = [f'{name}_total{{engine="0"}} {count}' for name, count in self.figures.items()]
        targets = {"data": {"activeTargets": [{"health": "up"}] * 2}}
        self.reply({"/health": "", "/metrics": "\n".join(lines), "/api/v1/targets": json.dumps(targets)}[self.path])

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, figures = str(asked["prompt"]), self.figures
        if len(asked["prompt"]) > 100 and prompt in self.valkey:
            figures["kvtiers_tier_hits"] += 60
            figures["vllm:external_prefix_cache_hits"] += 1440
        elif len(asked["prompt"]) > 100:
            figures["kvtiers_tier_stored_chunks"] += 60
            self.valkey.add(prompt)
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        choice = {"text": str(random.random()), "finish_reason": self.finish_reason}
        self.reply(json.dumps({"choices": [choice], "usage": usage}))

    def reply(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def serving(handler):
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the tool with such a Compose; ``left``: the id of a container after its end."""

    def tried(compose, left="", **of_replica):
        valkey, services = set(), {}
        names = ("kvtiers_tier_stored_chunks", "kvtiers_tier_hits", "vllm:external_prefix_cache_hits")
        with ExitStack() as stack:
            for name in ("vllm-1", "vllm-2", "prometheus"):
                own = {"valkey": valkey, "figures": dict.fromkeys(names, 0), **of_replica}
                port = stack.enter_context(serving(type("Service", (Replica,), own)))
                image = {"image": "prometheus"} if name == "prometheus" else {"build": {}, "command": ["a/model"]}
                services[name] = {"ports": [f"127.0.0.1:{port}:8000"], **image}
            (tmp_path / "compose.yaml").write_text(yaml.safe_dump({"services": services}))
            (tmp_path / "containers").write_text("")
            command = tmp_path / "compose"
            command.write_text(compose + f'case "$*" in down) echo "{left}" > containers ;; esac\n')
            command.chmod(0o700)
            arguments = [sys.executable, TOOL, "--compose", command, tmp_path]
            return subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=False)

    return tried


@pytest.mark.parametrize("compose", [DOCKER, PODMAN], ids=["docker", "podman"])
def test_replicas_that_find_each_others_chunks_pass_whatever_tokens_they_generate(run, compose):
    done = run(compose)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"ok: (vllm-\d) has found what (vllm-\d) computed", done.stdout)
    assert found == [("vllm-2", "vllm-1"), ("vllm-1", "vllm-2")]
    assert done.stdout.endswith("ok: no container is left\n")


def test_an_answer_that_ends_early_fails(run):
    done = run(DOCKER, finish_reason="stop")
    assert done.returncode == 1
    assert "expected 8 tokens after 1500, got 'stop'" in done.stderr


@pytest.mark.parametrize("compose", [DOCKER, PODMAN], ids=["docker", "podman"])
def test_a_container_that_has_ended_and_is_not_removed_counts_as_left(run, compose):
    done = run(compose, left="0123abcd")
    assert done.returncode == 1
    assert "containers are left: 0123abcd" in done.stderr
