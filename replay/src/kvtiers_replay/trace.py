"""Request traces in Mooncake's format, plain or gzipped: one JSON object a line.

``timestamp`` (ms), ``input_length`` (tokens), ``hash_ids`` (one for each 512 tokens, or for each ``tokens_per_block``
where a recording says so; an equal id means an equal whole prefix). The last id may stand for a block that is not full:
only full blocks are replayed. ``output_length`` and the hints ``session``, ``session_ends`` and ``expects_turn_in``
(``RequestHints``) may be missing, as may ``tenant``: equal ids of two tenants are different prefixes, as if each had a
salt. A last line that is cut off, as in the recording of a killed engine, is left out.
"""

import gzip
import hashlib
import io
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtiers.api import ConfigError
from kvtiers.types import TENANT_FIELD
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["GZIP_MAGIC", "TRACE_TOKENS_PER_BLOCK", "chain_hashes", "read_trace", "trace_request"]

TRACE_TOKENS_PER_BLOCK = 512
_HINTS = ("session", "session_ends", "expects_turn_in")
GZIP_MAGIC = b"\x1f\x8b"


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> Workload:
    """Return the first ``limit`` requests (default: all) of a trace. ConfigError names the file and the line."""
    where = os.fspath(path)
    requests: list[ReplayRequest] = []
    tokens_per_block = TRACE_TOKENS_PER_BLOCK
    try:
        with Path(path).open("rb") as raw:
            for request, tokens_per_block in itertools.islice(_requests(where, raw), limit):  # noqa: B007 -- the last
                requests.append(request)
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{where}: cannot read the trace: {reason}") from None
    if not any(request.block_hashes for request in requests):
        raise ConfigError(f"{where}: the trace has no request with a full block of {tokens_per_block} tokens")
    # A recording has its requests in the order in which they ended.
    requests.sort(key=lambda request: request.arrival)
    return Workload(Path(where).name, tokens_per_block, requests)


def _requests(where: str, raw: io.BufferedReader) -> Iterator[tuple[ReplayRequest, int]]:
    zipped = raw.peek(2)[:2] == GZIP_MAGIC
    lines = gzip.GzipFile(fileobj=raw) if zipped else raw
    first: int | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = _fields(line)
            tokens_per_block = _count(fields, "tokens_per_block", default=TRACE_TOKENS_PER_BLOCK)
            first = first or tokens_per_block
            if tokens_per_block != first or not first:
                raise ValueError(f"'tokens_per_block' is {tokens_per_block}, expected that of the first line, {first}")  # noqa: TRY301
            yield trace_request(fields, tokens_per_block), tokens_per_block
        except ValueError as error:
            if number > 1 and not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
                return
            raise ConfigError(f"{where}:{number}: {error}; expected a line of a Mooncake trace") from None


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}, not an object")  # noqa: TRY004 -- the file's mistake
    return fields


def trace_request(fields: dict[str, Any], tokens_per_block: int) -> ReplayRequest:
    """Return the request that a line of a trace stands for. ValueError says what is wrong with it."""
    tokens = _count(fields, "input_length")
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(block, int | str) for block in ids):
        raise ValueError(f"'hash_ids' is {'missing' if ids is None else 'not a list of ids'}")
    full = tokens // tokens_per_block
    if len(ids) < full:
        raise ValueError(f"'hash_ids' has {len(ids)} entries, but {tokens} tokens have {full} full blocks")
    arrival, output = _count(fields, "timestamp", default=0) / 1000, _count(fields, "output_length", default=0)
    params = {name: fields[name] for name in _HINTS if name in fields}
    tenant = fields.get("tenant", "")
    if not isinstance(tenant, str):
        raise ValueError(f"'tenant' is {tenant!r:.40}, not a text")  # noqa: TRY004 -- the file's mistake
    if tenant:
        params[TENANT_FIELD] = tenant
    return ReplayRequest(tokens, chain_hashes(ids[:full], tenant), arrival, params, output)


def _count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name!r} is {'missing' if value is None else repr(value)[:40]}, not a number of 0 or more")
    return value


def chain_hashes(ids: list[int | str], salt: str = "") -> list[bytes]:
    """Return the chained hash of each block, as an engine makes them of its tokens: one hash is one whole prefix."""
    hashes = []
    before = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest() if salt else b""
    for block in ids:
        before = hashlib.sha256(before + str(block).encode()).digest()
        hashes.append(before)
    return hashes
