"""Three machines that share the memory of all three, as processes of this one: what Mooncake Store does under kvtiers.

Each process is a machine: it has a client of kvtiers with a ``mooncake`` tier, and contributes 64 MiB to the pool. A
value that one has written is read by the others, wherever in the pool it lies; then one machine is killed::

    pip install ./core ./plugins/mooncake_tier mooncake-transfer-engine-non-cuda numpy
    python examples/mooncake/three_machines.py

It starts a ``mooncake_master`` of its own, and leaves nothing behind. It takes half a minute.
"""

import contextlib
import multiprocessing
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvtiers import ModelIdentity, open_client

VALUE_BYTES = 1 << 20
VALUES = 24
IDENTITY = ModelIdentity("example/model", weights="v1")
PATIENCE = 60.0


def key_of(machine: str, number: int) -> bytes:
    """Return the key of a value; an engine has the chained hash of the tokens here."""
    return f"{machine}/{number}".encode().ljust(32, b".")


def value_of(machine: str, number: int) -> np.ndarray:
    """Return the "KV" that this machine computes for this key."""
    return np.random.default_rng([*machine.encode(), number]).integers(0, 256, VALUE_BYTES, np.uint8)


def machine(master: str, orders: Connection) -> None:
    """Be one machine: do what is ordered, one after the other."""
    config: dict[str, Any] = {
        "version": 1,
        "primary": {"capacity": "1MiB"},  # the file format wants one; a client has none
        "secondary": [
            {"type": "mooncake", "master": master, "segment": "64MiB", "required": True, "exists_ttl": "1s"},
        ],
    }
    client = open_client(config, IDENTITY, value_bytes=VALUE_BYTES)
    orders.send("ready")
    while True:
        order, of = orders.recv()
        keys = [key_of(of, number) for number in range(VALUES)]
        if order == "put":
            orders.send(sum(client.put(keys, [[value_of(of, number)] for number in range(VALUES)]).stored))
        elif order == "get":
            rows = np.zeros((VALUES, VALUE_BYTES), np.uint8)
            begin = time.perf_counter()
            found = client.get_into(keys, [[row] for row in rows])
            seconds = time.perf_counter() - begin
            right = sum(there and np.array_equal(rows[i], value_of(of, i)) for i, there in enumerate(found))
            wrong = sum(found) - right
            orders.send((right, wrong, seconds))
        else:
            client.close()
            orders.send("left")
            return


class Machine:
    """A machine, seen from this process."""

    def __init__(self, name: str, master: str) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=machine, args=(master, theirs))
        self._process.start()
        self._answer()

    def _answer(self) -> Any:
        if not self._orders.poll(PATIENCE):
            raise TimeoutError(f"machine {self.name} does not answer")
        return self._orders.recv()

    def do(self, order: str, of: str = "") -> Any:
        """Give an order, and return the answer."""
        self._orders.send((order, of))
        return self._answer()

    def kill(self) -> None:
        """Take its power away: its tier's host ends with it."""
        self._process.kill()
        self._process.join()

    def leave(self) -> None:
        """Leave the pool in order."""
        if self._process.is_alive():
            self.do("leave")
            self._process.join(PATIENCE)


@contextlib.contextmanager
def master_process() -> Any:
    """Start a master on a free port; yield its address."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    beside = str(Path(sys.executable).parent)
    program = shutil.which("mooncake_master", path=beside) or shutil.which("mooncake_master")
    if program is None:
        sys.exit("error: no mooncake_master; pip install mooncake-transfer-engine-non-cuda")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [program, f"--rpc_port={port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1", "--client_ttl=3"],
            stdout=log,
            stderr=log,
        )
        try:
            until = time.monotonic() + PATIENCE
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit("error: mooncake_master does not start")
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def say_read(reader: Machine, of: str) -> int:
    """Have a machine read another one's values, and print what came."""
    right, wrong, seconds = reader.do("get", of)
    rate = right * VALUE_BYTES / 1e9 / seconds
    print(f"  {reader.name} reads what {of} has written: {right} of {VALUES} values, {wrong} wrong, {rate:.2f} GB/s")
    if wrong:
        sys.exit("error: wrong bytes")
    return int(right)


def main() -> None:
    with master_process() as address, contextlib.ExitStack() as stack:
        machines = {name: Machine(name, address) for name in ("anna", "bert", "cleo")}
        for one in machines.values():
            stack.callback(one.leave)
        print("three machines share 3 x 64 MiB")
        stored = machines["anna"].do("put", "anna")
        print(f"  anna writes {stored} values of 1 MiB; the master spreads them over the three")
        if not all(say_read(machines[name], "anna") == VALUES for name in ("bert", "cleo")):
            sys.exit("error: values are missing")

        print("cleo is killed")
        machines["cleo"].kill()
        left = say_read(machines["bert"], "anna")
        print(f"  {VALUES - left} values lay in cleo's memory: they are misses, and an engine computes them again")

        print("anna, who has computed them again, writes them again")
        until = time.monotonic() + PATIENCE
        while True:
            machines["anna"].do("get", "anna")  # what it misses is written by the next put
            machines["anna"].do("put", "anna")
            if machines["bert"].do("get", "anna")[0] == VALUES:
                break
            if time.monotonic() > until:
                sys.exit("error: they have not come back")
            time.sleep(0.5)
        say_read(machines["bert"], "anna")
        print("bert and anna leave")


if __name__ == "__main__":
    main()
