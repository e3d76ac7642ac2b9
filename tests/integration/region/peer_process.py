"""The processes of a test: each runs the Python it is sent, line by line, and answers each with one line of JSON.

They are forked from one that has imported everything, for each socket that it is sent (SCM_RIGHTS). Each ends at the
end of its socket, and the first one at the end of its standard input, so none outlives the test.
"""

import ast
import json
import os
import signal
import socket
import time
from pathlib import Path  # noqa: F401 -- for the code that is sent

from kvtiers._process import receive_fds
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region import populate, prefault  # noqa: F401 -- for the code that is sent
from kvtiers.region.client import RegionJoin  # noqa: F401 -- for the code that is sent
from kvtiers.region.handshake import FORMAT, Kind, listen, socket_name  # noqa: F401 -- for the code that is sent
from kvtiers.region.region import AnonymousRegion, SharedOffloadRegion  # noqa: F401 -- for the code that is sent

PATIENCE = 60.0


def layout(world_size=1, **changes):
    tensors = tuple(KVTensor(f"layer{i}", 0, 8192) for i in range(4))
    options = {"model": ModelIdentity("m"), "groups": (KVGroup("full", 16),), "tensors": tensors} | changes
    return CacheLayout(world_size=world_size, **options)


def gather(region, last):
    """Collect events until one of this type has come; the end of pre-faulting, at any time, if that is asked for."""
    events = []
    deadline = time.monotonic() + PATIENCE
    while not any(type(event).__name__ == last for event in events):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {last} in {events}")
        events += region.poll(timeout=PATIENCE)
    return [repr(event) for event in events if type(event).__name__ in (last, "RankJoined", "RankLost", "RankGone")]


def wait_for(join, condition):
    """Wait until the rank's status fulfils the condition; return its parts."""
    status = join.poll()
    deadline = time.monotonic() + PATIENCE
    while not condition(status):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {status}")
        status = join.wait_change(status, PATIENCE)
    return [status.state, status.reason, status.populated_rows, status.prefault_ended]


def connected(engine_id, uid=None):
    """A socket to the region's owner that has said nothing yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(PATIENCE)
    sock.connect(socket_name(engine_id, os.geteuid() if uid is None else uid))
    return sock


def run(code, names):
    tree = ast.parse(code)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<sent>", "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "<sent>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<sent>", "eval"), names)


def converse(fd):
    names = dict(globals())
    with socket.socket(fileno=fd) as sock, sock.makefile("r") as lines:
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(sock, [b"."], [pidfd])
        os.close(pidfd)
        for line in lines:
            try:
                answer = {"value": run(json.loads(line), names)}
            except Exception as error:  # noqa: BLE001 -- whatever the sent code raises is the answer
                answer = {"error": f"{type(error).__name__}: {error}"}
            sock.sendall(json.dumps(answer, default=repr).encode() + b"\n")


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=0) as requests:
        while fds := receive_fds(requests, 1, 1)[1]:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.detach()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                converse(fds[0])
                os._exit(0)
            os.close(fds[0])


if __name__ == "__main__":
    main()
