"""Outside judges: test suites of others, run over kvtiers in the place of their own parts.

``.venv-vllm/bin/python tests/judges/judges.py vllm``, with the Python of the engine's environment. Nothing of theirs is
in this repository: pip fetches their source distributions, pinned by hash in ``sdists.txt``, into ``.judges``.

``expected.toml`` names each of their tests that is expected to fail, with the reason. Any other test that fails fails
the run, and so does one of these that passes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".judges"
VLLM = "tests/v1/kv_offload"
SUITES = {
    "vllm": (
        f"{VLLM}/tiering/test_fs_tier.py",
        f"{VLLM}/cpu/test_manager.py",
        "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py",
    ),
    "lmcache": ("tests/v1/distributed/test_mock_l2_adapter.py",),
}


def fetched(name):
    """Return the folder with the tests of a source distribution."""
    wanted = next(line for line in (HERE / "sdists.txt").read_text().splitlines() if line.startswith(f"{name}=="))
    folder = CACHE / wanted.split()[0].replace("==", "-")
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _unpacked(wanted, Path(scratch)).rename(folder)
    return folder


def _unpacked(wanted, scratch):
    """Have pip fetch and check a distribution, and return a folder with its ``tests`` alone.

    pip unpacks it to ask for its metadata, which needs what builds it: whether that succeeds does not matter here.
    """
    (scratch / "wanted.txt").write_text(wanted)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-clean", "--no-deps"]
    command += ["--no-build-isolation", "--no-binary=:all:", "--require-hashes", f"--dest={scratch}"]
    command += [f"--requirement={scratch / 'wanted.txt'}"]
    run = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, check=False
    )
    found = next((it.parent for it in scratch.glob("*/*/PKG-INFO") if (it.parent / "tests").is_dir()), None)
    if found is None:
        sys.exit(f"judges: pip has not fetched {wanted.split()[0]}:\n{run.stdout}{run.stderr}")
    alone = scratch / "alone"
    alone.mkdir()
    (found / "tests").rename(alone / "tests")
    (alone / "tests/conftest.py").unlink(missing_ok=True)  # of their whole suite: it needs more than these tests
    return alone


def main(judge, *options):
    folder = fetched(judge)
    command = [sys.executable, "-m", "pytest", "-q", "-p", f"{judge}_suites", "-c", str(HERE / "judges.ini")]
    command += ["--rootdir", str(folder), *SUITES[judge], *options]
    paths = os.pathsep.join([str(folder), str(HERE)])
    own = {"PYTHONPATH": paths, "VLLM_TARGET_DEVICE": "cpu", "LMCACHE_TRACK_USAGE": "false"}
    return subprocess.run(command, cwd=folder, env={**os.environ, **own}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
