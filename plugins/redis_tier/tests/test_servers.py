"""The servers of the tests themselves: none outlives the process that started it."""

import subprocess
import sys
from pathlib import Path

from redis_servers import wait_until

_OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from servers import Server
print(Server(Path(sys.argv[2])).start().pid, flush=True)
time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_server_ends_with_the_process_that_started_it_also_if_that_is_killed(tmp_path):
    command = [sys.executable, "-c", _OWNER, str(Path(__file__).parent), str(tmp_path / "server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        assert not has_ended(pid)
        owner.kill()
    wait_until(lambda: has_ended(pid), "the server's end")
