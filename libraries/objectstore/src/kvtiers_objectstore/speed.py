"""The cost of a request compared with the bytes that it moves, measured for ``kvtiers check``."""

import mmap
import secrets
import statistics
import time
from collections.abc import Callable, Iterator

from kvtiers.api import ChunkStore, Finding
from kvtiers.api.units import format_duration, format_size

__all__ = ["speed_findings"]

_SMALL = 4096
_READS = 5
_MOST_SUGGESTED = 64 << 20


def speed_findings(store: ChunkStore, value_bytes: int) -> Iterator[Finding]:
    """Write a value of this length and a small one, read each a few times, and compare."""
    small, large = (_seconds_to_read(store, nbytes) for nbytes in (_SMALL, value_bytes))
    both = f"a value of {format_size(value_bytes)} is read in {format_duration(large)}"
    if small < large / 2:
        yield Finding("ok", f"{both}, {format_duration(small)} of it the request itself")
        return
    rate = (value_bytes - _SMALL) / max(large - small, 1e-9)
    better = max(min(max(int(small * rate), 1 << 20), _MOST_SUGGESTED), 2 * value_bytes)
    better = 1 << (better - 1).bit_length()
    yield Finding(
        "warning",
        f"{both}, {format_duration(min(small, large))} of it the request itself: more requests than bytes are paid for",
        f"raise blocks_per_chunk some {better // value_bytes} times, to values of {format_size(better)}",
    )


def _seconds_to_read(store: ChunkStore, nbytes: int) -> float:
    name = f"_check/{secrets.token_hex(16)}"
    value = memoryview(mmap.mmap(-1, nbytes))
    store.write(name, value.toreadonly())
    try:
        return statistics.median(_seconds(lambda: store.read_into(name, value)) for _ in range(_READS))
    finally:
        store.delete([name])


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
