"""A process that starts with standard input, output and error closed, as under some daemons."""

import subprocess
import sys

ENGINE = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("harness", sys.argv[1])
report = open(sys.argv[2], "w")
sys.path.insert(0, sys.argv[3])
os.closerange(0, 3)
sys.stdin = sys.stdout = sys.stderr = None
harness = importlib.util.module_from_spec(spec)
spec.loader.exec_module(harness)
engine = harness.Engine({"type": "faulty", "root": sys.argv[4]})
engine.until_available("faulty")
engine.store(harness.keys(0, 8))
for fd in (0, 1, 2):
    os.write(fd, b"what a library prints " * 100)
engine.load(harness.keys(0, 8))
engine.forget()
engine.load(harness.keys(0, 8))
print(*(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)), file=report, flush=True)
engine.close()
"""


def test_what_is_printed_there_never_lands_in_the_rows_and_the_tiers_are_in_use(faulty, site, tmp_path, machine):
    harness, report = machine.bench.__file__, tmp_path / "report"
    command = [sys.executable, "-c", ENGINE, harness, str(report), str(site), faulty()["root"]]
    done = subprocess.run(command, timeout=500, check=False)
    assert report.read_text() == "/dev/null /dev/null /dev/null\n"
    assert done.returncode == 0
