#!/usr/bin/env python3
"""The Compose example, run: replicas share through Valkey, Prometheus scrapes them, the end leaves no container.

The tests check the files and run the parts; this starts the containers, so it needs what the example needs: a container
engine, its images, and a GPU for each replica. FOLDER is the example or an adapted copy of it (model, sizes), which
builds its image from the wheels two folders above it, as the example does::

    tools/try_compose.py [--compose "docker compose"] [FOLDER]
"""

import argparse
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).parents[1] / "examples" / "compose"
START_SECONDS, SECONDS = 1200, 120
STORED = "kvtiers_tier_stored_chunks"  # in Valkey
HITS = "kvtiers_tier_hits"  # chunks, of Valkey
HIT_TOKENS = "vllm:external_prefix_cache_hits"


def get(port: str, path: str, body: dict[str, Any] | None = None) -> str:
    """Return the answer of a service on this machine."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.read().decode()


def until(what: str, holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait until something holds, and print it; end with one line where it never does."""
    end = time.monotonic() + seconds
    while True:
        try:
            if holds():
                break
        except OSError:
            pass  # not up yet
        if time.monotonic() > end:
            sys.exit(f"error: not within {seconds:.0f} s: {what}")
        time.sleep(0.5)
    print(f"ok: {what}", flush=True)


def counted(name: str, port: str) -> float:
    """Return a counter in a replica's /metrics, whatever its labels."""
    return sum(map(float, re.findall(rf"^{name}_total\{{[^}}]*\}} (\S+)$", get(port, "/metrics"), re.MULTILINE)))


def runs(command: list[str]) -> bool:
    """Return whether a command ends well."""
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def containers(compose: list[str], folder: Path) -> str:
    """Return the ids of the example's containers, those that have ended included; "": there are none."""
    for every in (["--all"], []):  # podman-compose has no such option, and lists these without it
        listed = [*compose, "ps", "--quiet", *every]
        done = subprocess.run(listed, cwd=folder, check=False, capture_output=True, text=True)
        if not done.returncode:
            return done.stdout.strip()
    sys.exit(f"error: {shlex.join(listed)} has failed:\n{done.stdout}{done.stderr}")


def try_it(compose: list[str], folder: Path) -> None:
    """Start the example, ask its replicas, kill one, and take it down."""
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    ports = {name: service["ports"][0].split(":")[-2] for name, service in services.items() if "ports" in service}
    replicas = [name for name, service in services.items() if "build" in service]
    (model, *_) = services[replicas[0]]["command"]
    first, second = (ports[name] for name in replicas)

    def run(*arguments: str) -> None:
        done = subprocess.run([*compose, *arguments], cwd=folder, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {shlex.join([*compose, *arguments])} has failed:\n{done.stdout}{done.stderr}")

    def ask(port: str, prompt: list[int], tokens: int = 8) -> None:
        """Have a prompt completed. Which tokens these are is not compared: on a GPU they may differ by the batch."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = json.loads(get(port, "/v1/completions", body))
        reason, usage = answer["choices"][0]["finish_reason"], answer["usage"]
        if (reason, usage["prompt_tokens"], usage["completion_tokens"]) != ("length", len(prompt), tokens):
            sys.exit(f"error: port {port}: expected {tokens} tokens after {len(prompt)}, got {reason!r}, {usage}")

    def grow(port: str, before: dict[str, float]) -> bool:
        ask(port, [5, 6], 2)  # vLLM reports figures with its steps
        return all(counted(name, port) > count for name, count in before.items())

    def shares(one: str, other: str) -> bool:
        """Ask one replica, then the other. On a busy machine a prompt may be computed sooner than looked up."""
        prompt = [random.randrange(3, 500) for _ in range(1500)]  # tokens that any model has
        had = {STORED: counted(STORED, one)}
        found = {name: counted(name, other) for name in (HITS, HIT_TOKENS)}
        ask(one, prompt)
        until(f"port {one} has stored what it computed", lambda: grow(one, had))
        ask(other, prompt)
        return grow(other, found)

    try:
        run("up", "--build", "--detach")
        for name in replicas:
            until(f"{name} serves", lambda name=name: get(ports[name], "/health") == "", START_SECONDS)
        until(f"{replicas[1]} has found what {replicas[0]} computed", lambda: shares(first, second))

        def targets() -> list[str]:
            found = json.loads(get(ports["prometheus"], "/api/v1/targets"))["data"]["activeTargets"]
            return [target["health"] for target in found]

        until("Prometheus scrapes both", lambda: targets() == ["up"] * len(replicas))
        run("kill", "--signal", "KILL", replicas[0])
        run("up", "--detach")
        until(f"{replicas[0]} serves again after SIGKILL", lambda: get(first, "/health") == "", START_SECONDS)
        until(f"{replicas[0]} has found what {replicas[1]} computed", lambda: shares(second, first))
    finally:
        run("down")
    if left := containers(compose, folder):
        sys.exit(f"error: containers are left: {left}")
    print("ok: no container is left")


def main() -> None:
    """Read the arguments, and try the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=EXAMPLE, metavar="FOLDER")
    parser.add_argument("--compose", default="docker compose", help="the command of Compose (default: docker compose)")
    options = parser.parse_args()
    compose = shlex.split(options.compose)
    # Docker without its plugin for Compose is a command, too.
    if not compose or not shutil.which(compose[0]) or not runs([*compose, "version"]):
        sys.exit(f"error: {options.compose!r} does not run: install Docker with Compose, or name another by --compose")
    if not (options.folder / "compose.yaml").exists():
        sys.exit(f"error: {options.folder} has no compose.yaml: name the folder of the example, or a copy of it")
    if containers(compose, options.folder):
        sys.exit("error: containers of this example are there already, and would be removed: take them down first")
    try_it(compose, options.folder)


if __name__ == "__main__":
    main()
