"""The lifecycle of an engine's region and tiers, as its manager sees it: from the start to the end of the process.

Ranks join and are lost, rows get their memory, weights change, and all is closed: the tiers first, then the region.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection

from kvtiers.api.units import format_size
from kvtiers.config import OffloadConfig
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.storage_name import StorageNames
from kvtiers.model_identity import described, is_shared, with_weights
from kvtiers.pool.loan import PoolLoan
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.region.ranks import PrefaultEnded, RankJoined, RankLost
from kvtiers.region.region import OffloadRegion
from kvtiers.start_line import StartFacts, StartLine, rows_in_words
from kvtiers.tier_set import TierRows, TierSet

__all__ = ["EngineLifecycle"]


class EngineLifecycle:
    """The manager's ``EngineSide``: the region's events, the tiers, and new names when weights change.

    ``release``: the engine's, for what is recorded beside the values. ``release_region``: called when the tiers are
    closed. ``loan``: of the pool whose memory the region's is, which the start waits to have pinned.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: CacheLayout,
        region: OffloadRegion,
        primary: CPUPrimaryTier,
        release: str,
        release_region: Callable[[], None],
        loan: PoolLoan | None = None,
    ) -> None:
        self._release_region = release_region
        self._namespace = config.namespace
        self._layout = with_weights(layout)
        self._region = region
        self._primary = primary
        self._start_wait = config.start_wait
        self._loan = loan
        self._pins_ahead = config.primary.prefault == "ahead" and loan is None
        self._waits_for_all = config.primary.prefault == "all" or loan is not None
        self._ready = region.all_ready
        self._has_shrunk = False
        self._follow_from = region.follow(0)
        self._opened = region.num_rows
        self._lost_ranks: set[int] = set()
        self._absent_ranks: set[int] = set()
        self._names = StorageNames.of_layout(self._namespace, self._layout)
        self._start_line: StartLine | None = None
        self._kinds = {tier.tier_name: tier.type for tier in config.secondary}
        sizes = [(layout.payload_bytes(g), layout.value_bytes(g)) for g in range(len(layout.groups))]
        self.tiers = TierSet(
            config.secondary,
            TierRows(
                region.view,
                region.row_stride,
                sizes,
                region.fd,
                region.map_bytes,
                config.primary.core_dumps,
                lender=loan,
            ),
            self._namespace,
            self._names,
            described(self._names, self._layout, release),
            encryption=config.encryption,
        )
        self.slots = self.tiers.slots

    def write_start_line(self, way_in: str, checkpoints: str) -> None:
        """Write the start line, on its own thread, when the ranks have joined and the tiers report their state."""
        region = self._region
        size = format_size(self._primary.num_rows * region.row_stride)
        if self._loan is not None:
            is_part = self._primary.num_rows < region.num_rows
            size += f" of a pool of {format_size(self._loan.nbytes)}" if is_part else " of a pool"
        facts = StartFacts(
            way_in,
            f"{size} in {self._primary.num_rows} rows {rows_in_words(self._layout, checkpoints)}",
            self._namespace,
            self._names.fingerprint,
            shared=is_shared(self._layout.model),
        )
        tiers = {name: (self._kinds[name], tier) for name, tier in self.tiers.tiers.items()}
        with contextlib.suppress(RuntimeError):  # no thread can be had: the line is for people, the engine starts
            self._start_line = StartLine(facts, tiers, lambda: region.all_joined, self._start_wait)

    def ready(self) -> bool:
        """Return whether all ranks have joined and, with ``prefault: all``, the region is populated and pinned.

        A region whose memory is not all there is not ready. The engine goes on with the rows that have theirs.
        """
        if (pinned := self._region.pinned_rows) != self._opened:
            self._opened = pinned
            self._primary.open_rows(pinned)
        if self._primary.rows_wanted >= self._follow_from:
            self._follow_from = self._region.follow(self._primary.rows_wanted)
        if not self._region.has_events() and (self._ready or not self._waits_for_all):
            return self._ready
        for event in self._region.poll():
            if isinstance(event, RankLost):
                self._lost_ranks.add(event.rank)
                self._absent_ranks.add(event.rank)
            elif isinstance(event, RankJoined):
                self._absent_ranks.discard(event.rank)
            elif isinstance(event, PrefaultEnded) and event.error:
                self._primary.retire_rows(event.rows)
                self._has_shrunk = True
        self._ready = self._region.all_ready or (self._has_shrunk and self._region.all_joined)
        return self._ready

    def take_lost_ranks(self) -> Collection[int]:
        """Return the ranks that were lost since the last call, or before and are not back."""
        if not self._lost_ranks and not self._absent_ranks:
            return ()
        lost, self._lost_ranks = self._lost_ranks | self._absent_ranks, set()
        return lost

    def dma_may_run(self) -> bool:
        """Return whether a lost rank's copies may still run."""
        return bool(self._region.lost_ranks)

    def wait_ready(self, timeout: float) -> None:
        """Wait for the ranks, then ``start_wait`` for what makes first requests fast, then for the required tiers."""
        until = time.monotonic() + timeout
        self._region.wait_ready(timeout)
        soon = min(time.monotonic() + self._start_wait, until)
        if self._pins_ahead:
            self._region.wait_window(max(0.0, soon - time.monotonic()))
        self.tiers.wait_open(soon, until)

    def new_weights(self, version: str) -> None:
        """Give all later keys and values another fingerprint."""
        self._layout = dataclasses.replace(self._layout, model=dataclasses.replace(self._layout.model, weights=version))
        self._names = StorageNames.of_layout(self._namespace, self._layout)
        self.tiers.set_names(self._names)
        if self._loan is not None:
            self._loan.rename(self._names.prefix)

    def fingerprint(self) -> str:
        """Return the fingerprint as it stands in the names of values that are stored from now on."""
        return self._names.fingerprint

    def tier_stats(self, name: str) -> dict[str, float]:
        """Return a tier's own figures."""
        tier = self.tiers.tiers.get(name)
        return {} if tier is None else tier.stats()  # one that was detached meanwhile has none

    def close_tiers(self, timeout: float) -> None:
        """Drain all tiers at the same time, each of which logs what it had to drop, and close them."""
        if self._start_line is not None:
            self._start_line.close()
        self.tiers.close(timeout)

    def close_region(self) -> None:
        """Release the region."""
        self.tiers.release_rows()
        self._release_region()
