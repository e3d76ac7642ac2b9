"""The cost of the way to a Redis server: the kernel alone, bare sockets, the tier, redis-benchmark; by TCP and UNIX.

All move the same values in turns, a round after the other, and each lane is given in GB/s, in processor seconds per GB
(of its own processes, and of the server), and as a share of `bare sockets` over TCP in the same round, in the middle:
of the processor time of both sides together, which differs less than the rate where a machine is busy. `bare sockets
again` is the control: what it differs by, the machine does.

`the kernel alone` moves the bytes between two processes that do nothing else, by the fewest calls there can be: the
limit of any client and any server. `bare sockets` send the requests to Redis and look at nothing. The tier seals what
it writes and checks what it reads, and its old values are deleted between turns; the others overwrite theirs, which the
server's time includes. redis-benchmark sends one buffer again and again.

`--tried` has the bare sockets try what was thought of, instead: RESP3, MSG_ZEROCOPY, other windows, other numbers of
connections, larger buffers of the sockets, on both ways. `--valkey` measures Valkey instead (the server of the tests).
benchmarks/redis_notes.md has what came of it. States no goals.
"""

import resource
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from baselines import redis_lanes as lanes
from baselines import redis_sockets as sockets
from baselines.kernel_streams import kernel_alone, other_process
from lib.processes import processor_seconds
from lib.results import WAYS, middle_share, options_of, say
from redis_tier import config, start
from rigs.store_tier_lane import TierLane

from kvtiers.api.units import format_size, parse_size

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "plugins" / "redis_tier" / "tests")]

from servers import Server, valkey  # noqa: E402 -- the servers of the tier's tests

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
SOCKETS = 3  # as many as the tier writes through at a time
WINDOW = 512 << 10
BENCHMARK_CONNECTIONS = (1, 4)
BASE, CONTROL = "bare sockets, TCP", "bare sockets again"
TRIED_WINDOWS = [128 << 10, 2 << 20, 8 << 20]
TRIED_CONNECTIONS = [1, 2, 6]
TRIED_BUFFERS = [256 << 10, 1 << 20, 4 << 20]
SO_ZEROCOPY, MSG_ZEROCOPY = 60, 0x4000000  # Python has no names for these
_ERRORS_PATIENCE_MS = 1000.0


@dataclass(slots=True)
class Sample:
    """One turn: GB/s, and processor seconds per GB of the lane's processes and of the server."""

    rate: float
    client: float
    server: float

    @property
    def cost(self) -> float:
        """Both sides' processor seconds per GB."""
        return self.client + self.server


@dataclass(slots=True)
class Costed:
    """A lane whose processor time is measured.

    ``move``: moves all values one way, or returns the values a second where it measures itself. ``pids``: its processes
    besides this one. ``before``: what is done before the values are written.
    """

    move: Callable[[str], float | None]
    server: int
    pids: list[int] = field(default_factory=list)
    before: Callable[[], None] = lambda: None

    def turn(self, way: str, nbytes: int, count: int) -> Sample:
        """Move the values once."""
        if way == "write":
            self.before()
        begin, mine, theirs = time.perf_counter(), self._spent(), processor_seconds(self.server)
        values_a_second = self.move(way)
        seconds = count / values_a_second if values_a_second else time.perf_counter() - begin
        total = nbytes * count / 1e9
        spent = self._spent() - mine, processor_seconds(self.server) - theirs
        return Sample(total / seconds, *(each / total for each in spent))

    def _spent(self) -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = 0.0 if self.pids else time.process_time() + ended.ru_utime + ended.ru_stime
        return own + sum(map(processor_seconds, self.pids))


def send_without_a_copy(link: socket.socket, parts: list[bytes | memoryview]) -> None:
    """Send with MSG_ZEROCOPY, and wait until the kernel has said of each call that it is done with the memory."""
    left, calls = list(parts), 0
    while left:
        left = sockets.behind(left, link.sendmsg(left, [], MSG_ZEROCOPY))
        calls += 1
    errors = select.poll()
    errors.register(link, 0)
    while calls:
        errors.poll(_ERRORS_PATIENCE_MS)
        try:
            _, notes, _, _ = link.recvmsg(0, 256, socket.MSG_ERRQUEUE)
        except BlockingIOError:
            continue
        for _, _, note in notes:  # struct sock_extended_err: the first and the last call that it is about
            calls -= int.from_bytes(note[12:16], sys.byteorder) - int.from_bytes(note[8:12], sys.byteorder) + 1


class Moves:
    """Makes the lanes of one size."""

    def __init__(self, server: Server, rows: memoryview, fd: int, nbytes: int, stack: ExitStack) -> None:
        self._server, self._rows, self._fd, self._nbytes, self._stack = server, rows, fd, nbytes, stack
        self.count = len(rows) // nbytes
        self.addresses: dict[str, int | str] = {"TCP": server.port, "UNIX": str(server.socket)}
        self._taken: list[int] = []

    def bare(self, way: str, connections: int = SOCKETS, **options: Any) -> Costed:
        """Bare sockets."""
        links = lanes.connections(self.addresses[way], connections)
        return self._bare(links, **options)

    def _bare(self, links: list[socket.socket], **options: Any) -> Costed:
        for link in links:
            self._stack.callback(link.close)
        move = sockets.plain_sockets(links, self._rows, self._nbytes, self.count, **options)
        return Costed(move, self._server.pid)

    def with_buffers(self, way: str, nbytes: int) -> Costed:
        """Bare sockets with buffers of so many bytes in the kernel, as far as it allows them."""
        return self._bare(lanes.connections(self.addresses[way], SOCKETS, nbytes))

    def resp3(self, way: str) -> Costed:
        """Bare sockets that speak the third version of the protocol."""
        links = lanes.connections(self.addresses[way], SOCKETS)
        for link in links:
            link.sendall(b"HELLO 3\r\nPING\r\n")
            said = b""
            while not said.endswith(b"+PONG\r\n"):
                said += link.recv(1 << 16)
            assert said.startswith(b"%"), said
        return self._bare(links)

    def zero_copy(self) -> Costed:
        """Bare sockets that have the kernel read their memory later, where it can; UNIX sockets have no such thing."""
        links = lanes.connections(self.addresses["TCP"], SOCKETS)
        for link in links:
            link.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
        return self._bare(links, send=send_without_a_copy)

    def kernel(self, way: str, folder: Path) -> Costed:
        """Return the streams that are no Redis at all."""
        path = folder / f"kernel-{self._nbytes}" if way == "UNIX" else None
        pid, address = self._stack.enter_context(other_process(len(self._rows), SOCKETS, path))
        return Costed(kernel_alone(address, self._rows, SOCKETS, max(WINDOW, self._nbytes)), pid)

    def tier(self, way: str, **options: Any) -> Costed:
        """Return the whole tier."""
        url = self._server.url if way == "TCP" else f"unix://{self._server.socket}"
        lane = TierLane(self._server.client, self._fd, self._rows, self._nbytes, config(url, **options), self._stack)
        pids = [pid for pid in lane.pids if pid not in self._taken]
        self._taken += pids
        return Costed(lane.move, self._server.pid, pids, lane.forget)

    def benchmark(self, way: str, connections: int) -> Costed:
        """Return redis-benchmark."""
        move = partial(lanes.redis_benchmark, self.addresses[way], connections, self._nbytes, self.count)
        return Costed(move, self._server.pid)


def usual(moves: Moves, folder: Path) -> dict[str, Costed]:
    """Return the lanes from the kernel to the tier."""
    found = {BASE: moves.bare("TCP"), CONTROL: moves.bare("TCP")}
    for way in moves.addresses:
        found[f"the kernel alone, {way}"] = moves.kernel(way, folder)
        if way != "TCP":
            found[f"bare sockets, {way}"] = moves.bare(way)
        found[f"tier, {way}"] = moves.tier(way)
        found[f"tier, {way}, 2 hosts"] = moves.tier(way, processes=2)
        found |= {f"redis-benchmark -c {n}, {way}": moves.benchmark(way, n) for n in BENCHMARK_CONNECTIONS}
    return found


def tried(moves: Moves, _: Path) -> dict[str, Costed]:
    """Return the bare sockets with what was thought of."""
    found = {BASE: moves.bare("TCP"), CONTROL: moves.bare("TCP"), "MSG_ZEROCOPY, TCP": moves.zero_copy()}
    for way in moves.addresses:
        if way != "TCP":
            found[f"bare sockets, {way}"] = moves.bare(way)
        found[f"RESP3, {way}"] = moves.resp3(way)
        found |= {f"window {format_size(n)}, {way}": moves.bare(way, window=n) for n in TRIED_WINDOWS}
        found |= {f"connections {n}, {way}": moves.bare(way, n) for n in TRIED_CONNECTIONS}
        found |= {f"buffers {format_size(n)}, {way}": moves.with_buffers(way, n) for n in TRIED_BUFFERS}
    return found


def measure(server: Server, folder: Path, nbytes: int, total: int, rounds: int, *, try_all: bool) -> dict[str, Any]:
    """Return the figures of each lane at this size."""
    with lanes.memory(total) as (fd, rows), ExitStack() as stack:
        moves = Moves(server, rows, fd, nbytes, stack)
        with server.client() as client:
            client.flushall()
            lanes.fill(client, nbytes, moves.count)
        each = (tried if try_all else usual)(moves, folder)
        samples: dict[str, dict[str, list[Sample]]] = {name: {way: [] for way in WAYS} for name in each}
        order = [*each]
        for turn in range(rounds + 1):
            for way in WAYS:
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    sample = each[name].turn(way, nbytes, moves.count)
                    samples[name][way] += [sample] if turn else []
    with server.client() as client:
        client.flushall()
    return {"value_bytes": nbytes, "lanes": {name: _figures(name, samples) for name in samples}}


def _figures(name: str, samples: dict[str, dict[str, list[Sample]]]) -> dict[str, dict[str, float]]:
    found = {}
    for way in WAYS:
        these, base = samples[name][way], samples[BASE][way]
        found[way] = {
            what: statistics.median(getattr(sample, what) for sample in these) for what in ("rate", "client", "server")
        }
        found[way]["cost_of_bare"] = middle_share([one.cost for one in these], [one.cost for one in base])
        found[way]["rate_of_bare"] = middle_share([one.rate for one in these], [one.rate for one in base])
    return found


def report(found: dict[str, Any]) -> None:
    """Print a table for each size."""
    print(f"{found['server']}; TCP congestion control: {found['congestion_control']} (this machine's default)")
    print("GB/s; processor s/GB of the client, of the server; both as a share of bare sockets, and the rate as one")
    cells = "{rate:8.2f}{client:8.3f}{server:8.3f}{cost_of_bare:7.2f}{rate_of_bare:7.2f}"
    for size in found["sizes"]:
        print(f"{format_size(size['value_bytes']):30}" + "".join(f"{way:>40}" for way in WAYS))
        for name, by_way in size["lanes"].items():
            print(f"  {name:30}" + "  ".join(cells.format(**by_way[way]) for way in WAYS))


def main() -> None:
    parser = options_of(__doc__, "fewer sizes and rounds")
    parser.add_argument("--tried", action="store_true", help="bare sockets with every option that was thought of")
    parser.add_argument("--valkey", action="store_true", help="a Valkey server instead of Redis")
    parser.add_argument("--size", type=parse_size, action="append", help="only this size")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("error: tier hosts need Linux")
    rounds, sizes = (5, SIZES[::2]) if options.quick else (11, SIZES)
    with tempfile.TemporaryDirectory(prefix="kvtiers-bench-") as top, ExitStack() as stack:
        server = start(stack, Path(top, "server"), 1, binary=valkey() if options.valkey else None)
        found: dict[str, Any] = {"sizes": [], "goals": []}
        info = server.info("server")
        found["server"] = f"Valkey {info['valkey_version']}" if options.valkey else f"Redis {info['redis_version']}"
        found["congestion_control"] = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        for nbytes in options.size or sizes:
            print(f"{format_size(nbytes)} ...", file=sys.stderr)
            found["sizes"].append(measure(server, Path(top), nbytes, 128 << 20, rounds, try_all=options.tried))
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
