"""What strangers found by trying kvtiers, as they wrote it: scripts that exit 1 while their fault is there, and a tier.

They are of an earlier commit; ``RENAMED`` and ``TIER_RENAMED`` give the names that they use as they are today.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOUND = os.environ.get("KVTIERS_FOUND", "")
REPOSITORY = Path(__file__).parents[2]
RENAMED = {
    "hello_world_size": {
        "import RequestContext": "import PromptGroup, RequestContext",
        'm.lookup_prefix([os.urandom(36)] * 1, RequestContext("r"))': (
            'm.reach([PromptGroup([os.urandom(36)])], RequestContext("r"))'
        ),
        "socket.socket(socket.AF_UNIX)": "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
        '{"rank": 0, ': '{"format": handshake.FORMAT, "rank": 0, ',
        "handshake.encode_message(handshake.Kind.HELLO, body)": "handshake.Kind.HELLO.message(body)",
        "def steps(seconds):": (  # a rank that was refused ends a wait at once, and the others come in after it
            "def wait_ready(until):\n"
            "    while True:\n"
            "        try: return m.wait_ready(1)\n"
            "        except Exception:\n"
            "            if time.monotonic() > until: raise\n"
            "            time.sleep(.01)\n"
            "def steps(seconds):"
        ),
        "m.wait_ready(10)": "wait_ready(time.monotonic() + 60)",  # the fault kept them out for minutes
    },
    "fs_evictor_stops": {"StoreFull": "NotKept"},
    # What its finding names: the memory. Linux has no signal that a child is born with, so one that is stopped before
    # it has armed its own stays stopped; from its exec on it holds nothing of the region by then.
    # Of its 40 engines, stopped at moments of chance, 12: hosts/test_engine_gone.py has the moments themselves.
    "stopped_host_keeps_region": {
        "sys.exit(bool(left))": "sys.exit(any(memory for _, memory in left))",
        "for _ in range(40):": "for _ in range(12):",
    },
    "fs_folder_left_by_killed_writer": {
        "memoryview(bytearray(4096)))": "memoryview(bytearray(4096))) == 4096",
    },
    "status_too_long": {
        'c = control.ControlSocket(EngineActions(m, "m").actions()); s': "c = s",
        "dict, control=c, stats=m.stats)": 'm.stats, lambda *_: {}, actions=EngineActions(m, "m").actions())',
    },
    "vllm_session_leaves_requests": {
        "book.prefixes(": "book.announced(",
        # Nothing is kept of a session, and the last request is to be none.
        'plain = prepared("plain")': 'plain = prepared("plain")\nplain.resumable = False',
    },
}
AS_ROOT = {"fs_evictor_stops", "fs_folder_left_by_killed_writer"}
ELSEWHERE = {"vllm_session_with_a_discarded_token": "integrations/vllm/tests/real_vllm/test_sessions.py"}
"""Scripts that need real vLLM, and where they run."""
TIER_RENAMED = {
    "config.py": {"    shareable = True  # several processes may have it open, each finds what others wrote\n": ""},
    "plugin.py": {"api_version=1,": "api_version=1,\n        shareable=True,"},
    "store.py": {
        "StoreFull": "NotKept",
        "-> bool:": "-> int:",
        "st_size != len(dst)": "st_size > len(dst)",
        "return opened.readinto(dst) == len(dst)": "return opened.readinto(dst)",
        "return False": "return 0",
    },
}


def renamed(text, names):
    for old, new in names.items():
        assert old in text
        text = text.replace(old, new)
    return text


def run(*command, **options):
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False, **options)


def end_session(leader):
    """Kill every process of the session that this one leads."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def scripts():
    return [path for path in sorted(Path(FOUND).glob("*.py")) if path.stem not in ELSEWHERE] if FOUND else []


@pytest.mark.skipif(not FOUND, reason="KVTIERS_FOUND is not set")
@pytest.mark.parametrize("script", scripts() or [None], ids=lambda path: path.stem if path else "none")
def test_what_strangers_found_is_mended(script, tmp_path):
    if script.stem in AS_ROOT and os.geteuid():
        pytest.skip("it becomes other users: only root can")
    copy, folder = tmp_path / script.name, f"/tmp/kvtiers-attacks-{os.getpid()}"  # other users come there, too
    text = renamed(script.read_text(), RENAMED.get(script.stem, {}))
    copy.write_text(text.replace("/tmp/kvtiers-attacks", folder))  # where some of them work: each in its own
    output = tmp_path / "output"
    with output.open("wb") as file:  # no pipe: what a script leaves stopped would keep it open
        command = [sys.executable, copy]
        running = subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=file, start_new_session=True)
    try:
        status = running.wait(580)
    finally:
        end_session(running.pid)
        shutil.rmtree(folder, ignore_errors=True)
    assert status == 0, output.read_text(errors="replace")[-4000:]


@pytest.fixture
def forking_tier(tmp_path):
    """Return kvtiers with the tier ``shelf`` installed, whose first write forks and lets the child come back."""
    project, site = Path(FOUND) / "kvtiers-shelf-fork", tmp_path / "site"
    package, info = site / "kvtiers_shelf", site / "kvtiers_shelf-0.1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    for path in (project / "src" / "kvtiers_shelf").iterdir():
        (package / path.name).write_text(renamed(path.read_text(), TIER_RENAMED.get(path.name, {})))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtiers-shelf\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[kvtiers.tiers]\nshelf = kvtiers_shelf.plugin\n")
    config = tmp_path / "tiers.yaml"
    config.write_text((project / "tiers.yaml").read_text().replace("/var/tmp/kvtiers-shelf", str(tmp_path / "values")))

    def kvtiers(*command):
        path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
        return run(Path(sys.executable).with_name("kvtiers"), *command, env=os.environ | {"PYTHONPATH": path})

    return kvtiers, config


@pytest.mark.skipif(not FOUND, reason="KVTIERS_FOUND is not set")
def test_no_byte_is_wrong_with_a_tier_that_forks_and_whose_child_comes_back(forking_tier):
    kvtiers, config = forking_tier
    for time in ("first", "second"):  # the second time the tier has values
        done = kvtiers("replay", "--config", config, "--workload", "code", "--requests", "20")
        assert done.returncode == 0, f"{time}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "all bytes are right" in done.stdout
        assert "has forked" in done.stderr


@pytest.mark.skipif(not FOUND, reason="KVTIERS_FOUND is not set")
def test_a_check_names_the_call_whose_child_comes_back(forking_tier):
    kvtiers, config = forking_tier
    done = kvtiers("check", config)
    assert "ShelfStore.write left a child process (" in done.stdout, f"{done.stdout}\n{done.stderr}"
    # At most once: the child says nothing, and may rename the file that both write before its parent does.
    assert done.stdout.count("wrote, read back, compared and deleted") <= 1


def test_tests_that_stand_for_scripts_exist():
    assert [path for path in ELSEWHERE.values() if not (REPOSITORY / path).is_file()] == []
