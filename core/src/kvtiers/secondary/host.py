"""A tier host: the helper process in which a tier's I/O runs, beside the engine and not inside it.

It maps the engine's region, opens the stores that the HELLO names, and moves values with a ``TransferPool`` for each::

    main thread     reads the engine's messages; ends the process at EOF
    pool threads    open, move, answer; post events
    writer thread   sends events, log lines and figures to the engine

It dies with its engine: by the parent-death signal, and at the latest by EOF of the socket.
"""

import ctypes
import json
import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

from kvtiers.api import ChunkStore, TierConfig, TierContext
from kvtiers.api.config import load_resolved
from kvtiers.plugins import load_tier
from kvtiers.rows.names import StorageNames
from kvtiers.secondary import wire
from kvtiers.secondary.mover import mover_options
from kvtiers.secondary.protocol import Event
from kvtiers.secondary.transfer_pool import TransferPool
from kvtiers.secondary.views import ValueViews
from kvtiers.secondary.wire import Frame, FrameReader, Kind

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_TICK_SECONDS = 1.0
_KEPT_SECONDS = 0.05
_LOGS_PER_TICK = 50


def main() -> None:
    """Run a host. Arguments: the socket's and the region's descriptors, and the engine's process id."""
    socket_fd, region_fd, parent = map(int, sys.argv[1:4])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's; it tells us when to stop
    _Host(socket.socket(fileno=socket_fd), region_fd).run()


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the signal was armed
        os._exit(0)


class _Host:
    """The process's state: the connection, the mapped region, one pool a tier."""

    def __init__(self, connection: socket.socket, region_fd: int) -> None:
        self._connection = connection
        self._region_fd = region_fd
        self._reader = FrameReader()
        self._pools: list[TransferPool] = []
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._logs_left = _LOGS_PER_TICK
        self._writer = threading.Thread(target=self._write, name="kvtiers-host-writer", daemon=True)

    def run(self) -> None:
        """Serve until the engine says CLOSE or is gone."""
        self._writer.start()
        while data := self._connection.recv(1 << 18):
            self._reader.feed(data)
            for message in self._reader.frames(1 << 30):
                if message.kind == Kind.CLOSE:
                    self._close(float.fromhex(str(message.body, "ascii")))
                    return
                self._take(message)
        os._exit(0)  # the engine is gone: nothing that is still under way matters to anybody

    def _take(self, message: Frame) -> None:
        kind, tier, body = message
        match kind:
            case Kind.HELLO:
                self._hello(json.loads(bytes(body)))
            case Kind.JOB:
                self._pools[tier].submit(wire.decode_job(body))
            case Kind.PROBE:
                probe_id, keys, is_prefix = wire.decode_probe(body)
                self._pools[tier].probe(probe_id, keys, is_prefix=is_prefix)
            case Kind.NAMES:
                self._pools[tier].set_names(wire.decode_names(body))
            case Kind.ABANDON:
                self._pools[tier].abandon(wire.decode_id(body))
            case _:
                raise wire.ProtocolError(f"a message of kind {kind}, which is not for a host")

    def _hello(self, hello: dict[str, Any]) -> None:
        if hello["protocol"] != wire.PROTOCOL_FORMAT:
            raise wire.ProtocolError(f"protocol {hello['protocol']}, expected {wire.PROTOCOL_FORMAT}")
        if hello["cpus"]:
            os.sched_setaffinity(0, hello["cpus"])
        region = hello["region"]
        memory = memoryview(mmap.mmap(self._region_fd, region["map_bytes"]))[: region["nbytes"]]
        os.close(self._region_fd)
        views = ValueViews(memory, region["row_stride"])
        for index, tier in enumerate(hello["tiers"]):
            _send_logs_of(index, tier["name"], self._log)
            self._pools.append(self._open(index, tier, views, memory, region["row_stride"]))

    def _open(
        self, index: int, tier: dict[str, Any], views: ValueViews, memory: memoryview, row_stride: int
    ) -> TransferPool:
        options = tier["options"]
        common = load_resolved(TierConfig, {name: options[name] for name in TierConfig.model_fields})

        def open_store() -> ChunkStore:
            plugin = load_tier(common.type)
            config = load_resolved(plugin.config, options)
            context = TierContext(
                tier_name=tier["name"],
                value_bytes=max(value for _, value in tier["sizes"]),
                namespace=tier["namespace"],
                read_only=common.read_only,
                region=memory,
                row_stride=row_stride,
            )
            store = plugin.open(config, context)
            if not isinstance(store, ChunkStore):
                raise TypeError(f"plugin {plugin.name!r} opened a {type(store).__name__}, expected a ChunkStore")
            return store

        return TransferPool(
            open_store,
            views,
            StorageNames(tier["prefix"], bytes.fromhex(tier["layout_id"])),
            mover_options(common, [(payload, value) for payload, value in tier["sizes"]]),
            threads=common.threads,
            deadline=common.deadline,
            emit=partial(self._emit, index),
            label=tier["name"],
        )

    def _emit(self, tier: int, event: Event) -> None:
        self._out.put(wire.encode_event(tier, event))

    def _log(self, tier: int, level: int, text: str) -> None:
        if self._logs_left > 0:  # a backend that logs without end must not drown the engine
            self._logs_left -= 1
            self._out.put(wire.frame(Kind.LOG, tier, bytes([min(level, 255)]) + text.encode()[:4096]))

    def _write(self) -> None:
        next_tick = time.monotonic() + _TICK_SECONDS
        try:
            while True:
                kept = any(pool.check_kept() for pool in self._pools)
                wait = _KEPT_SECONDS if kept else max(0.0, next_tick - time.monotonic())
                try:
                    message = self._out.get(timeout=wait)
                except queue.Empty:
                    message = b""
                if message is None:
                    return
                if message:
                    self._connection.sendall(message)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_SECONDS
                    self._logs_left = _LOGS_PER_TICK
                    self._report()
        except OSError:
            os._exit(0)  # the engine is gone

    def _report(self) -> None:
        for index, pool in enumerate(self._pools):
            self._connection.sendall(wire.frame(Kind.STATS, index, json.dumps(pool.stats()).encode()))

    def _close(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for pool in self._pools:
            pool.drain(max(0.0, until - time.monotonic()))
        for pool in self._pools:
            pool.close(max(0.1, until - time.monotonic()))
        self._out.put(None)
        self._writer.join(1.0)
        os._exit(0)  # a thread that hangs in a store must not hold the process


class _LogSender(logging.Handler):
    """Passes what is logged in this process on to the engine's log."""

    def __init__(self, tier: int, name: str, send: Any) -> None:
        super().__init__(logging.INFO)
        self._tier = tier
        self._name = name
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        self._send(self._tier, record.levelno, f"{self._name}: {self.format(record)}")


def _send_logs_of(index: int, name: str, send: Any) -> None:
    root = logging.getLogger()
    if index == 0:  # one host, one log: with several tiers its lines go out under the first one's name
        root.setLevel(logging.INFO)
        root.addHandler(_LogSender(index, name, send))
