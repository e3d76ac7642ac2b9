"""One process of a test: runs the Python it is sent, line by line, and answers each with one line of JSON.

It ends when its standard input does, so it never outlives the test.
"""

import ast
import json
import os
import signal  # noqa: F401 -- for the code that is sent
import socket  # noqa: F401 -- for the code that is sent
import sys
import time
from pathlib import Path  # noqa: F401 -- for the code that is sent

from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.region import populate, prefault  # noqa: F401 -- for the code that is sent
from kvtiers.region.client import RegionJoin  # noqa: F401 -- for the code that is sent
from kvtiers.region.handshake import (  # noqa: F401 -- for the code that is sent
    SPEAKS,
    Kind,
    MessageReader,
    encode_message,
    listen,
    peer_credentials,
    socket_name,
)
from kvtiers.region.region import AnonymousRegion, SharedOffloadRegion  # noqa: F401 -- for the code that is sent

PATIENCE = 60.0


def layout(world_size=1, **changes):
    tensors = tuple(KVTensor(f"layer{i}", 0, 8192) for i in range(4))
    options = {"model": ModelIdentity("m"), "groups": (KVGroup("full", 16),), "tensors": tensors} | changes
    return CacheLayout(world_size=world_size, **options)


def gather(region, last):
    """Collect events until one of this type has come."""
    events = []
    deadline = time.monotonic() + PATIENCE
    while not any(type(event).__name__ == last for event in events):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {last} in {events}")
        events += region.poll(timeout=PATIENCE)
    return [repr(event) for event in events]


def wait_for(join, condition):
    """Wait until the rank's status fulfils the condition; return its parts."""
    status = join.poll()
    deadline = time.monotonic() + PATIENCE
    while not condition(status):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {status}")
        status = join.wait_change(status, PATIENCE)
    return [status.state, status.reason, status.populated_rows, status.prefault_ended]


def run(code, names):
    tree = ast.parse(code)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<sent>", "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "<sent>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<sent>", "eval"), names)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    names = dict(globals())
    for line in sys.stdin:
        try:
            answer = {"value": run(json.loads(line), names)}
        except Exception as error:  # noqa: BLE001 -- whatever the sent code raises is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer, default=repr) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
