"""Request traces in Mooncake's format, plain or gzipped: one JSON object a line.

``timestamp`` (ms, or a count of us or ns since 1970), ``input_length`` (tokens), ``hash_ids`` (one for each 512 tokens,
or for each ``tokens_per_block`` where the lines or the caller say so; an equal id means an equal whole prefix). The
last id may stand for a block that is not full: only full blocks are replayed. A line whose ids do not fit its length is
an error: blocks that are taken for longer ones would make nearly everything a hit. ``output_length`` and the hints
``session``, ``session_ends`` and ``expects_turn_in`` (``RequestHints``) may be missing, as may ``tenant``: equal ids of
two tenants are different prefixes, as if each had a salt. A last line that is cut off, as in the recording of a killed
engine, is left out.
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

__all__ = [
    "GZIP_MAGIC",
    "TRACE_TOKENS_PER_BLOCK",
    "BlockSizeError",
    "chain_hashes",
    "epoch_units",
    "read_trace",
    "tokens_of_block",
    "trace_request",
]

TRACE_TOKENS_PER_BLOCK = 512
_LARGEST_GUESS = 1 << 16  # tokens of a block
_HINTS = ("session", "session_ends", "expects_turn_in")
GZIP_MAGIC = b"\x1f\x8b"


class BlockSizeError(ValueError):
    """A line whose ids do not fit its length: the trace has blocks of another size."""


def read_trace(path: str | os.PathLike[str], limit: int | None = None, tokens_per_block: int | None = None) -> Workload:
    """Return the first ``limit`` requests (default: all) of a trace. ConfigError names the file and the line.

    ``tokens_per_block``: of the trace's blocks; None: what its lines say, or else 512.
    """
    where = os.fspath(path)
    requests: list[ReplayRequest] = []
    given, tokens_per_block = tokens_per_block, tokens_per_block or TRACE_TOKENS_PER_BLOCK
    try:
        with Path(path).open("rb") as raw:
            found = itertools.islice(_requests(where, raw, given), limit)
            for request, tokens_per_block in found:  # noqa: B007 -- the last
                requests.append(request)
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{where}: cannot read the trace: {reason}") from None
    if not any(request.block_hashes for request in requests):
        raise ConfigError(f"{where}: the trace has no request with a full block of {tokens_per_block} tokens")
    # A recording has its requests in the order in which they ended.
    requests.sort(key=lambda request: request.arrival)
    return Workload(Path(where).name, tokens_per_block, requests)


def _requests(where: str, raw: io.BufferedReader, given: int | None) -> Iterator[tuple[ReplayRequest, int]]:
    zipped = raw.peek(2)[:2] == GZIP_MAGIC
    lines = gzip.GzipFile(fileobj=raw) if zipped else raw
    tokens_per_block = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = _fields(line)
            tokens_per_block = tokens_of_block(fields, given, tokens_per_block)
            yield trace_request(fields, tokens_per_block), tokens_per_block
        except BlockSizeError as error:
            raise ConfigError(f"{where}:{number}: {error}") from None
        except ValueError as error:
            if number > 1 and not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
                return
            raise ConfigError(f"{where}:{number}: {error}; expected a line of a Mooncake trace") from None


def tokens_of_block(fields: dict[str, Any], given: int | None, before: int | None) -> int:
    """Return the tokens of a block of a line's trace. ``given``: what the user says; ``before``: of the first line.

    ValueError: the line says something else.
    """
    found = _count(fields, "tokens_per_block", default=given or TRACE_TOKENS_PER_BLOCK)
    if given and found != given:
        raise ValueError(f"'tokens_per_block' is {found}, but --tokens-per-block {given} was given")
    if not found or found != (before or found):
        raise ValueError(
            f"'tokens_per_block' is {found}, expected {(before and f'that of the first line, {before}') or 'a number'}"
        )
    return found


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}, not an object")  # noqa: TRY004 -- the file's mistake
    return fields


def trace_request(fields: dict[str, Any], tokens_per_block: int) -> ReplayRequest:
    """Return the request that a line of a trace stands for. ValueError says what is wrong with it.

    BlockSizeError: its ids are not as many as its tokens have blocks.
    """
    tokens = _count(fields, "input_length")
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(block, int | str) for block in ids):
        raise ValueError(f"'hash_ids' is {'missing' if ids is None else 'not a list of ids'}")
    full = tokens // tokens_per_block
    if not full <= len(ids) <= -(-tokens // tokens_per_block):
        raise BlockSizeError(_other_size(tokens, len(ids), tokens_per_block))
    when, output = _count(fields, "timestamp", default=0), _count(fields, "output_length", default=0)
    arrival = when / max(1e3, epoch_units(when))
    params = {name: fields[name] for name in _HINTS if name in fields}
    tenant = fields.get("tenant", "")
    if not isinstance(tenant, str):
        raise ValueError(f"'tenant' is {tenant!r:.40}, not a text")  # noqa: TRY004 -- the file's mistake
    if tenant:
        params[TENANT_FIELD] = tenant
    return ReplayRequest(tokens, chain_hashes(ids[:full], tenant), arrival, params, output)


def _other_size(tokens: int, ids: int, tokens_per_block: int) -> str:
    """Return what is wrong with a line's number of ids, and which size of a block would be right."""
    sizes = [1 << power for power in range(_LARGEST_GUESS.bit_length())]
    fitting = [size for size in sizes if tokens // size <= ids <= -(-tokens // size)]
    guess = min(fitting, default=-(-tokens // ids) if ids else None)
    blocks = -(-tokens // tokens_per_block)
    advice = ""
    if guess:
        advice = (
            f'; are they of {guess}? Then put "tokens_per_block": {guess} into its lines, or give '
            f"--tokens-per-block {guess}"
        )
    return (
        f"'hash_ids' has {ids} entr{'y' if ids == 1 else 'ies'}, but {tokens} tokens are {blocks} "
        f"block{'s' * (blocks != 1)} of {tokens_per_block} tokens ('tokens_per_block'){advice}"
    )


def epoch_units(value: float) -> float:
    """Return how many units of a time are a second, by its size as a count since 1970: 1e9, 1e6, 1e3, or 1.

    Seconds since 1970 are fewer than 1e11 until the year 5138, and milliseconds are more from 1973 on.
    """
    return next((units for least, units in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)) if value >= least), 1.0)


def _count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        unit = "whole milliseconds" if name == "timestamp" else "a whole number"
        found = "missing" if value is None else repr(value)[:40]
        raise ValueError(f"{name!r} is {found}, not {unit} of 0 or more")
    return value


def chain_hashes(ids: list[int | str], salt: str = "") -> list[bytes]:
    """Return the chained hash of each block, as an engine makes them of its tokens: one hash is one whole prefix."""
    hashes = []
    before = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest() if salt else b""
    for block in ids:
        before = hashlib.sha256(before + str(block).encode()).digest()
        hashes.append(before)
    return hashes
