"""What authors have on a laptop: no memfd, no pidfd, no abstract sockets; the kit and replay work all the same."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE_TESTS = Path(__file__).parents[2] / "plugins" / "example_tier" / "tests" / "test_conformance.py"

# The libraries below ours store which system they were installed for, so they come first.
TAKE_LINUX_AWAY = """
import fcntl, os, select, signal, socket, sys, sysconfig, tempfile, zoneinfo
import click, msgspec, numpy, pluggy, pydantic.json_schema, pytest, rich.progress, xxhash, yaml
from pydantic import BaseModel

sysconfig.get_config_vars()
sys.platform = "darwin"
for module, names in {
    os: "memfd_create MFD_CLOEXEC MFD_HUGETLB MFD_ALLOW_SEALING pidfd_open eventfd sched_setaffinity O_PATH",
    fcntl: "F_ADD_SEALS F_GET_SEALS",
    select: "epoll",
    signal: "pidfd_send_signal",
    socket: "SO_PEERCRED MSG_CMSG_CLOEXEC",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
RUN_COMMAND = f"{TAKE_LINUX_AWAY}\nfrom kvtiers.cli.main import main; main()"
RUN_TESTS = f"{TAKE_LINUX_AWAY}\nsys.exit(pytest.main(sys.argv[1:]))"


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize(("io", "fallen_back"), [("thread", 0), ("process", 1)])
def test_replay_works_and_says_in_a_line_what_does_not(tmp_path, io, fallen_back):
    config = tmp_path / "tiers.yaml"
    config.write_text(
        "version: 1\nlookup_wait: 30s\nload_wait: 30s\nprimary: {capacity: 4MiB}\n"
        f"secondary: [{{type: memory, capacity: 64MiB, io: {io}}}, {{type: memory-async, max_blocks: 2000}}]\n"
    )
    done = run(
        RUN_COMMAND, "replay", "--config", config, "--workload", "code", "--requests", 40, "--bytes-per-chunk", 4032
    )
    assert done.returncode == 0, done.stderr
    assert "all bytes are right" in done.stdout
    # A busy machine takes long enough to show its progress, too.
    no_region, *others = [line for line in done.stderr.splitlines() if not re.match(r"\d+/\d+ requests, ", line)]
    assert no_region.startswith("no shared region on darwin: ranks must run in this process")
    assert len(others) == fallen_back
    assert all(line.startswith("memory: no tier host") for line in others)


def test_ranks_in_processes_are_refused_in_a_line():
    done = run(RUN_COMMAND, "replay", "--workload", "code", "--requests", 10, "--workers", 2)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --workers needs memory that processes share, which there is on Linux only")
    assert len(done.stderr.splitlines()) == 1


def test_the_conformance_kit_works():
    done = run(RUN_TESTS, "-q", "-p", "no:cacheprovider", EXAMPLE_TESTS)
    assert done.returncode == 0, done.stdout[-3000:]
