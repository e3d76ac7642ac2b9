"""The tier host: the helper process in which a tier's I/O runs, beside the engine and not inside it.

It maps the engine's region, opens the store that the HELLO names, and moves values with a ``TransferPool``::

    main thread     reads the engine's messages; ends the process at EOF
    pool threads    open, move, answer; post events
    writer thread   sends events, log lines and figures to the engine

It dies with its engine: by the parent-death signal (``kvtiers._process``), and at the latest by EOF of the socket.

A store may start programs, and must not fork without exec. A child that is forked all the same has none of the host's
descriptors and no access to the rows, and ends where the call ends that forked it (``_failures.same_process``).
"""

import contextlib
import faulthandler
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtiers._failures import plugin_boundary
from kvtiers._version import __version__
from kvtiers.api import ChunkStore, TierConfig, TierContext
from kvtiers.api.config import load_resolved
from kvtiers.encryption.config import load_sources
from kvtiers.host import wire
from kvtiers.host.bounce_buffers import BounceBufferViews, value_views
from kvtiers.host.malloc import give_back
from kvtiers.host.messages import (
    Abandon,
    Close,
    Event,
    Hello,
    JobDone,
    JobStarted,
    Limits,
    LogLine,
    Names,
    Opened,
    Probe,
    Release,
    Request,
    Stats,
    StoreJob,
)
from kvtiers.host.sender import HostSender, send_logs
from kvtiers.host.transfer_pool import PoolOptions, TransferPool
from kvtiers.host.wire import FrameReader, ProtocolError
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.fingerprint_record import Described
from kvtiers.layout.storage_name import StorageNames
from kvtiers.plugins import load_tier, open_plugin
from kvtiers.region.memfd import Mapping, detach_in_children, map_memory

__all__ = ["TierHost"]

_log = logging.getLogger("kvtiers.secondary")
_RECEIVE_BYTES = 1 << 18
_LAST_WORDS_SECONDS = 1.0
_LOWEST_PRIORITY = 19


class TierHost:
    """The process's state: the connection, the mapped region, the store's pool.

    ``callers_fds``: that of the memory of a client's caller, if the HELLO says that there is one.
    """

    def __init__(self, socket_fd: int, region_fd: int, callers_fds: Sequence[int] = ()) -> None:
        os.set_inheritable(socket_fd, False)
        self._connection = socket.socket(fileno=socket_fd)
        self._region_fd = region_fd
        self._callers_fds = callers_fds
        self._mapping: Mapping | None = None
        self._callers_mapping: Mapping | None = None
        self._pool: TransferPool | None = None
        self._reported: dict[str, float] = {}
        self._writer = HostSender(self._connection, self._figures, self._check_kept, give_back)
        detach_in_children(self)

    def detach(self) -> None:
        """Close the descriptors, in a forked child: the engine would hear it, or wait for its end."""
        text = (
            f"kvtiers: {threading.current_thread().name}: a tier's store has forked; the child {os.getpid()} must "
            "exec, or end: it has no access to the buffers of the call\n"
        )
        with contextlib.suppress(OSError):  # without a standard error
            os.write(2, text.encode(errors="replace"))
        faulthandler.disable()  # the stack of one that touches them would read as the host's own fault
        self._connection.close()
        for fd in (self._region_fd, *self._callers_fds):
            if fd >= 0:
                os.close(fd)

    def run(self) -> None:
        """Serve until the engine sends CLOSE, or its process has ended."""
        reader = FrameReader()
        self._writer.start()
        while data := self._receive():
            reader.feed(data)
            if self._pool is None:
                self._begin(reader)
            for message in reader.messages(1 << 30):
                self._take(wire.decode_request(message))
        os._exit(0)  # the engine is gone: nothing in flight matters any more

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_RECEIVE_BYTES)
        except OSError:
            return b""

    def _take(self, message: Request) -> None:
        pool = self._pool
        assert pool is not None, "the HELLO comes first"
        match message:
            case StoreJob():
                pool.submit(message)
            case Probe(probe_id, keys, is_prefix):
                pool.probe(probe_id, keys, is_prefix=is_prefix)
            case Names(prefix, layout_id):
                pool.set_names(StorageNames(prefix, layout_id))
            case Abandon(job_id):
                pool.abandon(job_id)
            case Release(job_id):
                pool.release(job_id)
            case Limits():
                pool.set_limits(message)
            case Close(seconds):
                self._close(pool, seconds)

    def _begin(self, reader: FrameReader) -> None:
        with plugin_boundary() as setting_up:
            hello = _read_hello(reader)
            if hello is None:
                return
            self._set_up(hello)
        if setting_up.error:  # the engine's log has to say why there is no host, or stderr if it cannot read us
            _log.error("no tier host: %s", setting_up.error, extra={"once": True})
            self._emit(Opened(setting_up.error))
            self._writer.close(_LAST_WORDS_SECONDS)
            os._exit(1)

    def _set_up(self, hello: dict[str, Any]) -> None:
        if "tier" in hello:
            send_logs(hello["tier"]["name"], hello["log_level"], self._send_line)
        release, protocol = hello.get("release", "another release"), hello.get("protocol", "unknown")
        if release != __version__ or protocol != wire.PROTOCOL_FORMAT:
            raise ProtocolError(
                f"kvtiers' files are of {__version__} now, and the engine that runs is of {release} (protocol "
                f"{protocol}, expected {wire.PROTOCOL_FORMAT}): they were replaced; restart the engine"
            )
        _use_processors(hello["cpus"])
        region = hello["region"]
        nbytes, mapped = region["nbytes"], region["map_bytes"]
        core_dumps = region.get("core_dumps", False)
        self._mapping = map_memory(self._region_fd, mapped, mapped, core_dumps=core_dumps, for_children=False)
        os.close(self._region_fd)
        self._region_fd = -1
        memory, tier = self._mapping.view[:nbytes], hello["tier"]
        _give_way(tier["options"]["nice"])
        largest = max(value for _, value in tier["sizes"])
        views = value_views(memory, region["row_stride"], largest)
        callers = None
        if "callers" in region:
            callers = BounceBufferViews(
                memory, region["row_stride"], largest, self._callers_region(**region["callers"])
            )
        self._pool = self._open(tier, views, callers, memory, region["row_stride"])

    def _callers_region(self, fd: int | None, at: int, nbytes: int) -> memoryview:
        """Return the memory of a client's caller: of the mapped region, or of a descriptor of the caller's own."""
        assert self._mapping is not None
        mapping = self._mapping
        if fd is not None:  # its number in the engine's process
            [fd], self._callers_fds = self._callers_fds, ()
            mapping = self._callers_mapping = map_memory(fd, at + nbytes, at + nbytes, for_children=False)
            os.close(fd)
        return mapping.view[at : at + nbytes]

    def _open(
        self,
        tier: dict[str, Any],
        views: ValueViews,
        callers: BounceBufferViews | None,
        memory: memoryview,
        row_stride: int,
    ) -> TransferPool:
        options = tier["options"]
        common = load_resolved(TierConfig, {name: options[name] for name in TierConfig.model_fields})
        context = TierContext(
            tier_name=tier["name"],
            value_bytes=max(value for _, value in tier["sizes"]),
            namespace=tier["namespace"],
            read_only=common.read_only,
            region=memory,
            row_stride=row_stride,
        )
        sizes = [(payload, value) for payload, value in tier["sizes"]]
        return TransferPool(
            _opener(common.type, options, context),
            views,
            StorageNames(tier["prefix"], bytes.fromhex(tier["layout_id"])),
            PoolOptions.of(common, sizes, os.sched_yield if common.nice else None),
            self._emit,
            described=Described(tier["prefix"], tier["layout"]) if tier["layout"] else None,
            callers=callers,
            encryption=load_sources(tier["encryption"]) if "encryption" in tier else None,
        )

    def _emit(self, event: Event) -> None:
        message = wire.encode(event)
        match event:
            case JobStarted(job_id):
                self._writer.post_start(job_id, message)
            case JobDone(job_id):
                self._writer.post_end(job_id, message)
            case _:
                self._writer.post(message)

    def _send_line(self, level: int, text: str) -> bool:
        return self._writer.post_line(wire.encode(LogLine(level, text)))

    def _figures(self) -> bytes:
        """Return a message with the store's figures, if they have changed."""
        figures = {} if self._pool is None else self._pool.stats()
        if figures == self._reported:
            return b""
        self._reported = figures
        return wire.encode(Stats(figures))

    def _check_kept(self) -> bool:
        return self._pool is not None and self._pool.check_kept()

    def _close(self, pool: TransferPool, seconds: float) -> None:
        pool.close(seconds)
        self._writer.close(_LAST_WORDS_SECONDS)
        os._exit(0)  # a thread that hangs in a store must not hold the process


def _read_hello(reader: FrameReader) -> dict[str, Any] | None:
    """Return what the first message says: None until it has come, nothing if it is of a protocol that is not ours."""
    with contextlib.suppress(ProtocolError):
        for message in reader.messages(1):
            request = wire.decode_request(message)
            return json.loads(request.document) if isinstance(request, Hello) else {}
        return None
    return {}


def _opener(type_name: str, options: dict[str, Any], context: TierContext) -> Callable[[], ChunkStore]:
    def open_store() -> ChunkStore:
        plugin = load_tier(type_name)
        store: ChunkStore = open_plugin(plugin, load_resolved(plugin.config, options), context, ChunkStore)
        return store

    return open_store


def _use_processors(cpus: Sequence[int]) -> None:
    """Let all threads of this process, also those that a library has started at its import, run on these only."""
    if not cpus:
        return
    try:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), cpus)
    except OSError as error:
        _log.warning("its 'cpus' %s cannot be used: %s; it runs on all", list(cpus), error)


def _give_way(nice: int) -> None:
    """Lower the priority of all threads of this process, those to come included, by so much below the engine's.

    0: not a batch process either, which would wait for running processes at each step of a request.
    """
    for thread in Path("/proc/self/task").iterdir():
        number = int(thread.name)
        if not nice:
            with contextlib.suppress(OSError):  # forbidden in some containers, as was becoming one
                os.sched_setscheduler(number, os.SCHED_OTHER, os.sched_param(0))
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            before = os.getpriority(os.PRIO_PROCESS, number)
            os.setpriority(os.PRIO_PROCESS, number, min(before + nice, _LOWEST_PRIORITY))
