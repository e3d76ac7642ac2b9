"""The recorder: writes a trace of an engine's requests in Mooncake's format, without any of their contents.

One JSON object a line: ``timestamp`` (ms since the recording began), ``input_length`` and ``output_length`` (tokens),
``hash_ids`` (one for each block of the prompt, the last of which may not be full), and ``tokens_per_block`` where that
is not the format's own 512. What the client has said of the request stands in ``session``, ``session_ends`` and
``expects_turn_in``, its tenant in ``tenant``. Lines stand in the order in which requests ended.

An id is a keyed hash of the block's chained hash, of the session's own id, or of the tenant's name. The key is random,
is for this recording alone and is never written: equal ids mean equal prefixes within the recording, and known prompts
cannot be tested against it.

    the engine's thread    request: copies the list of hashes, or drops the request where too many wait
    the recorder's thread  hashes, writes whole lines, stops for good at ``max_bytes`` or at an error, and logs it
"""

import contextlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kvtiers.types import NO_PARAMS, TENANT_FIELD, request_hints

__all__ = ["Recorder"]

_log = logging.getLogger("kvtiers.record")
_MOST_WAITING = 1 << 18
_MOST_FILES = 1000
_AT_ONCE = 256  # blocks hashed before the engine's thread gets a chance to run: some 0.3 ms
_MOONCAKE_BLOCK = 512


class _Ended(NamedTuple):
    arrival: float
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[bytes]
    params: Mapping[str, object]


class Recorder:
    """One recording, of one engine. ``request``: any one thread, never waits. The file is made with the first line.

    ``path`` is never overwritten: where it is taken, ``-1``, ``-2`` ... come before its ending. ``group``: the KV group
    whose blocks are recorded, of ``tokens_per_block`` tokens each. ``most_waiting``: blocks of requests that are not
    written yet.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int,
        tokens_per_block: int,
        group: int = 0,
        clock: Callable[[], float] = time.time,
        *,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self._path = Path(path)
        self._left = max_bytes
        self._tokens_per_block = tokens_per_block
        self._group = group
        self._most_waiting = most_waiting
        self._begin = clock()
        self._key = secrets.token_bytes(32)
        self._queue: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._put = 0  # blocks handed over, counted by the engine's thread alone
        self._taken = 0  # blocks dealt with, counted by the recorder's thread alone
        self._file: int | None = None
        self._stopped = False
        self.dropped = 0
        """Requests that are missing, since the thread was behind."""
        self.recorded = 0
        self._thread = threading.Thread(target=self._run, name="kvtiers-record", daemon=True)
        self._thread.start()

    def request(
        self,
        arrival: float,
        prompt_tokens: int,
        tokens: int,
        block_hashes: Sequence[Sequence[bytes]],
        params: Mapping[str, object] = NO_PARAMS,
    ) -> None:
        """Record a request that has ended, with ``tokens`` in all; ``block_hashes`` by group, ``arrival`` by the clock.

        ``params``: the request's; only its hints are recorded. Dropped, and counted, where too much is waiting.
        """
        if self._stopped:
            return
        hashes = block_hashes[self._group][: prompt_tokens // self._tokens_per_block]
        blocks = len(hashes) + 1
        if self._put - self._taken + blocks > self._most_waiting:
            self.dropped += 1
            return
        self._put += blocks
        self._queue.put(_Ended(arrival, prompt_tokens, max(0, tokens - prompt_tokens), list(hashes), params))

    def close(self, timeout: float) -> None:
        """Write what is waiting, for ``timeout`` seconds at most, and end."""
        self._queue.put(None)
        self._thread.join(timeout)

    # -- the recorder's thread

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            if not self._stopped:
                try:
                    self._write(self._line(ended))
                except OSError as error:
                    self._stop(f"cannot be written: {error.strerror or error}")
            self._taken += len(ended.hashes) + 1
        if self._file is not None:
            os.close(self._file)
        if self.dropped:
            _log.warning("record: %s: %d requests are missing, since writing was too slow", self._path, self.dropped)

    def _line(self, ended: _Ended) -> bytes:
        fields: dict[str, object] = {
            "timestamp": max(0, int((ended.arrival - self._begin) * 1000)),
            "input_length": ended.prompt_tokens,
            "output_length": ended.output_tokens,
            "hash_ids": self._ids(ended),
        }
        if self._tokens_per_block != _MOONCAKE_BLOCK:
            fields["tokens_per_block"] = self._tokens_per_block
        fields |= self._hints(ended.params)
        return json.dumps(fields, separators=(", ", ": ")).encode() + b"\n"

    def _hints(self, params: Mapping[str, object]) -> dict[str, object]:
        """Return the columns of what a client has said of the request, its session by an id of this recording's."""
        hints = request_hints(params)
        columns: dict[str, object] = {}
        if hints.session:
            columns["session"] = f"{self._id(b'session ' + hints.session.encode(errors='replace')):x}"
        if isinstance(tenant := params.get(TENANT_FIELD), str) and tenant:
            columns["tenant"] = f"{self._id(b'tenant ' + tenant.encode(errors='replace')):x}"
        if hints.session_ends:
            columns["session_ends"] = True
        if hints.expects_turn_in is not None:
            columns["expects_turn_in"] = hints.expects_turn_in
        return columns

    def _ids(self, ended: _Ended) -> list[int]:
        ids: list[int] = []
        for start in range(0, len(ended.hashes), _AT_ONCE):
            ids += [self._id(each) for each in ended.hashes[start : start + _AT_ONCE]]
            time.sleep(0)  # the engine's thread may be waiting for the interpreter
        if ended.prompt_tokens % self._tokens_per_block:
            # Of a block that is not full there is no hash: an id that nothing else has.
            ids.append(self._id(secrets.token_bytes(32)))
        return ids

    def _id(self, block_hash: bytes) -> int:
        # 53 bits: every reader of JSON can hold them.
        return int.from_bytes(blake2b(block_hash, key=self._key, digest_size=8).digest(), "little") >> 11

    def _write(self, line: bytes) -> None:
        if len(line) > self._left:
            self._stop("max_bytes is reached")
            return
        if self._file is None:
            self._file = self._open()
        written = os.write(self._file, line)
        if written < len(line):  # the disk is full: no half of a line stays
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            self._stop("cannot be written: no space left")
            return
        self._left -= written
        self.recorded += 1

    def _open(self) -> int:
        """Make the file, under the first name that is free: for this user alone, and through no link."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        path = self._path
        for number in range(1, _MOST_FILES):
            try:
                file = os.open(path, flags, 0o600)
            except FileExistsError:
                path = self._path.with_name(f"{self._path.stem}-{number}{self._path.suffix}")
                continue
            self._path = path
            _log.info("record: requests are recorded in %s", path)
            return file
        raise FileExistsError(None, f"there are {_MOST_FILES} recordings already; move some away")

    def _stop(self, why: str) -> None:
        self._stopped = True
        _log.warning("record: %s: %s; the recording ends after %d requests", self._path, why, self.recorded)
