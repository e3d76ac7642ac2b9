"""The advice for a primary that is too small for the requests in flight.

Each request in flight needs rows for what it loads and for what it stores, until it ends. Where all of them together
need more rows than there are, each evicts what the next is about to read, and the hits are gone that fewer requests
at a time would have had.
"""

import bisect
from collections import Counter
from collections.abc import Sequence

from kvtiers.config import OffloadConfig
from kvtiers_replay.engine.measures import Measures
from kvtiers_replay.options import ReplayOptions, replay_layout
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["chunks_in_flight", "primary_advice"]

_FEW = 0.01  # of all chunks asked for: fewer without a row are no reason to change anything
_MIB = 1 << 20


def primary_advice(
    workload: Workload, config: OffloadConfig, options: ReplayOptions, measures: Sequence[Measures]
) -> str:
    """Return one line if the primary was too small for this many requests at a time; else ""."""
    layout = replay_layout(config, workload.tokens_per_block, options)
    engines = [workload.requests[number :: options.engines] for number in range(options.engines)]
    rows = min(each.stats["primary"]["rows"] for each in measures)
    refused = sum(_without_a_row(each) for each in measures)
    asked = sum(each.references for each in measures) / options.blocks_per_chunk

    def needed(concurrency: int) -> int:
        return max(chunks_in_flight(requests, concurrency, options.blocks_per_chunk) for requests in engines)

    most = needed(options.concurrency)
    if most <= rows or refused <= _FEW * asked:
        return ""
    fitting = bisect.bisect_right(range(1, options.concurrency), rows, key=needed)
    fewer = f", or lower --concurrency to {fitting}" if fitting else ""
    who = "one request takes" if options.concurrency == 1 else f"{options.concurrency} requests in flight take"
    return (
        f"The primary is too small: it holds {rows:,} chunks, and {who} up to {most:,}, so that chunks are evicted "
        f"before they are read ({refused:,} times one got no row). Give primary.capacity at least "
        f"{-(-most * layout.row_stride // _MIB):,}MiB (--primary-chunks {most}){fewer}."
    )


def chunks_in_flight(requests: Sequence[ReplayRequest], concurrency: int, blocks_per_chunk: int) -> int:
    """Return the most different chunks that this many successive requests have together."""
    live: Counter[bytes] = Counter()
    most = 0
    for number, request in enumerate(requests):
        live.update(request.block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk])
        if number >= concurrency:
            for chunk in requests[number - concurrency].block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk]:
                live[chunk] -= 1
                if not live[chunk]:
                    del live[chunk]
        most = max(most, len(live))
    return most


def _without_a_row(measures: Measures) -> int:
    tiers = sum(tier["dropped_promotions"] for tier in measures.stats["tiers"].values())
    return int(tiers + measures.stats["engine"]["refused_stores"])
