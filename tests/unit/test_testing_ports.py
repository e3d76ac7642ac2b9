"""Ports for servers that tests start."""

import subprocess
import sys
from pathlib import Path

from kvtiers.testing.ports import free_port

PROCESS = """
import sys
from kvtiers.testing.ports import free_port
print(*(free_port() for _ in range(60)), flush=True)
sys.stdin.read()
"""


def test_no_two_processes_get_the_same_port_and_no_client_gets_one():
    here = [free_port() for _ in range(60)]
    others = [
        subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        given = here + [int(port) for other in others for port in other.stdout.readline().split()]
    finally:
        for other in others:
            other.communicate()
    assert len(set(given)) == 180
    assert max(given) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
