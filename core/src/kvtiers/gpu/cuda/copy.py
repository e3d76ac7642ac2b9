"""The CUDA copier: cuts the worker's transfers into pieces and launches them on lanes."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtiers.gpu.copier import CudaError, Lane
from kvtiers.gpu.copy_plan import GroupCopy, plan_copy, writers_turn
from kvtiers.gpu.cuda.autotune import Choice, Scratch, choose
from kvtiers.gpu.cuda.driver import MAX_ENTRIES, CudaDriver
from kvtiers.gpu.cuda.geometry import GroupGeometry, group_geometry
from kvtiers.gpu.cuda.lane import CudaLane, KernelGroup, UnitTable
from kvtiers.gpu.cuda.pieces import page_pieces, staged_pieces
from kvtiers.gpu.pin_pace import PinPace
from kvtiers.gpu.pinning import PinnedRows
from kvtiers.gpu.settings import CopyMethod, CopySettings
from kvtiers.gpu.tensors import KVPages, blocks_of_groups
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.rank_map import RankMap, runs_of_rank
from kvtiers.region.client import RegionJoin
from kvtiers.types import BlockSpec

__all__ = ["CudaCopies"]

_log = logging.getLogger("kvtiers.gpu")
_EXPEDITED_SHARE = 16  # of the ring, one part: an expedited load is a small one
_EXPEDITED_SLOTS = 2
_PAGES_PER_PIECE = 4096
_UNPINNED_BYTES = 32 << 20
_measured: dict[Any, Choice] = {}
"""The measurements of this process, by device, settings, direction and shape."""


class CudaCopies:
    """One rank's copies on its CUDA device."""

    def __init__(
        self,
        layout: CacheLayout,
        rank: int,
        pages: Sequence[KVPages | None],
        rank_map: RankMap | None,
        settings: CopySettings,
        device: int,
    ) -> None:
        import torch  # late: kvtiers imports without it

        self._torch = torch
        self._layout, self._rank, self._rank_map, self._settings = layout, rank, rank_map, settings
        self._pages = pages
        runs = runs_of_rank(layout, rank, rank_map)
        self._device = torch.device("cuda", device)
        self._driver = CudaDriver(device)
        self.num_blocks = blocks_of_groups(layout, pages)
        self._has_kernel: bool | None = None  # not known before the first ``attach``: compiling takes a while
        self._groups = [
            self._with_units(group_geometry(layout, rank, group, pages, runs)) for group in range(len(layout.groups))
        ]
        self._lanes = self._make_lanes()
        self.num_rows = 0
        self.pinned: PinnedRows | None = None
        self._entered = threading.local()
        self._choices: dict[tuple[int, bool], Choice] = {}

    def mark(self) -> Any:
        """Return an event on the caller's current stream: copies run after the work that is queued there now."""
        try:
            event = self._torch.cuda.Event()
            event.record(self._torch.cuda.current_stream(self._device))
        except Exception:
            self.raise_if_lost()
            raise
        return event

    def attach(self, region: RegionJoin, is_busy: Callable[[], bool]) -> None:
        """Use this region, and begin to pin it. After an error it is as it was before."""
        try:
            self._attach(region, is_busy)
        except BaseException:
            self.detach()
            raise

    def _attach(self, region: RegionJoin, is_busy: Callable[[], bool]) -> None:
        address = np.frombuffer(region.view, np.uint8).ctypes.data
        self.num_rows = region.num_rows
        settings = self._settings
        if settings.pin:  # first: what follows takes a while, and rows that are not pinned are not leased
            pace = PinPace(settings.pin_share, settings.pin_seconds, settings.pin_piece_bytes)
            self.pinned = PinnedRows(self._driver, region, address, self._settle, pace, is_busy)
        self._enter()
        if self._has_kernel is None:
            self._has_kernel = self._load_kernel()
        with self.pinned.paused() if self.pinned is not None else contextlib.nullcontext():
            self._choices = self._measure()
        for lane in self._lanes.values():
            lane.region = address
        if self.pinned is None:
            region.settle()

    def detach(self) -> None:
        """Wait for the copies in flight, unpin, and release the region."""
        try:
            with self._driver.current():
                self._settle()
        except Exception as error:  # noqa: BLE001 -- a lost device runs nothing any more
            _log.debug("detaching: %s", error)
        if self.pinned is not None:
            self.pinned.close()
            self.pinned = None
        self.num_rows = 0

    def copy(self, lane: Lane, blocks: BlockSpec, chunk_ids: npt.NDArray[Any], mark: Any) -> "_CudaCopy":
        """Prepare a copy; GeometryError if its geometry does not add up."""
        self._enter()
        into_rows = lane == "store"
        plan = plan_copy(
            self._layout, blocks, chunk_ids, num_blocks=self.num_blocks, num_rows=self.num_rows, into_rows=into_rows
        )
        if into_rows:
            plan = list(writers_turn(self._layout, self._rank, self._rank_map, plan))
        return _CudaCopy(self, self._lanes[lane], self._pieces(plan, self._lanes[lane], mark.cuda_event), mark)

    def close(self) -> None:
        """Free the ring, and what the driver holds for it. May be called again."""
        if self._lanes:
            self._lanes.clear()
            self._groups.clear()
            try:
                self._driver.close()
            except CudaError as error:  # the device is lost, and all that it held with it
                _log.debug("closing: %s", error)

    def raise_if_lost(self) -> None:
        """LostDeviceError if the device's context is gone."""
        self._driver.is_idle(self._lanes["store"].stream)

    # -- pieces

    def _pieces(self, plan: list[GroupCopy], lane: CudaLane, mark: int) -> Iterator[int]:
        """Launch piece after piece; yields the bytes of each."""
        for part in plan:
            group = self._groups[part.group]
            rest: GroupCopy | None = part if len(part.blocks) and group.geometry.block_bytes else None
            while rest is not None:
                leased = self.pinned
                rows = leased.lease(int(rest.rows.max()) + 1) if leased is not None else 0
                try:
                    now, rest = _cut(rest, rows, group.geometry)
                    pinned = int(now.rows.max()) < rows
                    method = self._method(lane, now, pinned=pinned)
                    yield from self._launch(now, group, method, lane, mark, pinned=pinned)
                finally:
                    if rows and leased is not None:
                        leased.release()

    def _launch(
        self, part: GroupCopy, group: KernelGroup, method: CopyMethod, lane: CudaLane, mark: int, *, pinned: bool
    ) -> Iterator[int]:
        geometry = group.geometry
        if method == "staged":
            for piece in staged_pieces(part, geometry, lane.slot_bytes, MAX_ENTRIES):
                lane.staged(group, piece, mark, pinned=pinned)
                yield len(piece.blocks) * geometry.block_bytes
        elif method == "direct":
            for piece in page_pieces(part, geometry, MAX_ENTRIES):
                lane.direct(group, piece, mark)
                yield len(piece.blocks) * geometry.block_bytes
        else:
            for piece in page_pieces(part, geometry, max(1, _PAGES_PER_PIECE // len(geometry.nbytes))):
                lane.pages(geometry, piece, mark, pinned=pinned)
                yield len(piece.blocks) * geometry.block_bytes

    def _method(self, lane: CudaLane, part: GroupCopy, *, pinned: bool) -> CopyMethod:
        geometry = self._groups[part.group].geometry
        possible = self._possible(lane, geometry, pinned=pinned)
        wanted = self._settings.store if lane.to_rows else self._settings.load
        choice = self._choices.get((part.group, lane.to_rows))
        if wanted == "auto":
            wanted = choice.of(len(part.blocks) * geometry.block_bytes) if choice else possible[0]
        return wanted if wanted in possible else possible[0]

    def _possible(self, lane: CudaLane, geometry: GroupGeometry, *, pinned: bool) -> list[CopyMethod]:
        """Return the possible methods, the one that disturbs a model least first."""
        staged: list[CopyMethod] = ["staged"] if self._has_kernel and geometry.block_bytes <= lane.slot_bytes else []
        direct: list[CopyMethod] = ["direct"] if self._has_kernel and pinned else []
        return [*staged, "pages", *direct]

    # -- the measurement

    def _measure(self) -> dict[tuple[int, bool], Choice]:
        """Return the best method of each group and direction; measure those not measured in this process yet."""
        choices = {}
        for index, group in enumerate(self._groups):
            for name, wanted in (("store", self._settings.store), ("load", self._settings.load)):
                if wanted == "auto" and self._settings.pin and group.geometry.block_bytes:
                    lane = self._lanes["store" if name == "store" else "load"]
                    choices[index, lane.to_rows] = self._choice(group.geometry, lane)
        return choices

    def _choice(self, geometry: GroupGeometry, lane: CudaLane) -> Choice:
        device = self._torch.cuda.get_device_name(self._device)
        shape = (device, self._settings, lane.to_rows, geometry.blocks_per_chunk, tuple(geometry.nbytes.tolist()))
        if shape not in _measured:
            possible = self._possible(lane, geometry, pinned=True)
            try:
                scratch = Scratch(geometry, self._driver, self._new_memory)
                try:
                    _measured[shape] = self._measured_on(scratch, possible, lane)
                finally:
                    lane.settle()  # nothing runs on in memory that is given back
                    scratch.close()
            except (CudaError, RuntimeError) as error:  # nothing can be pinned, or torch has no memory left
                self.raise_if_lost()
                _log.debug("no measurement: %s", error)
                return Choice(possible[0], possible[0], 0)
            _log.info("%s, %s: %s", self._device, "stores" if lane.to_rows else "loads", _measured[shape])
        return _measured[shape]

    def _measured_on(self, scratch: Scratch, possible: list[CopyMethod], lane: CudaLane) -> Choice:
        group = self._with_units(scratch.geometry)
        lane.region = scratch.address
        mark = self._driver.new_event()
        self._driver.record(mark, lane.stream)

        def copy(method: CopyMethod, parts: list[GroupCopy]) -> None:
            for part in parts:
                for _ in self._launch(part, group, method, lane, mark, pinned=True):
                    pass
            lane.settle()

        return choose(scratch, possible, copy)

    # -- parts

    def _load_kernel(self) -> bool:
        try:
            self._driver.load_kernel(*self._torch.cuda.get_device_capability(self._device))
        except (CudaError, OSError) as error:
            _log.warning("copies to and from %s go page by page, slower: %s", self._device, error)
            return False
        return True

    def _with_units(self, geometry: GroupGeometry) -> KernelGroup:
        tables = [self._torch.from_numpy(geometry.units(image=image)).to(self._device) for image in (False, True)]
        return KernelGroup(geometry, *map(UnitTable, tables))

    def _new_memory(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)

    def _make_lanes(self) -> dict[Lane, CudaLane]:
        settings, cuda = self._settings, self._torch.cuda
        programs = settings.staging_programs or cuda.get_device_properties(self._device).multi_processor_count
        expedited = settings.ring_bytes // _EXPEDITED_SHARE
        bulk = (settings.ring_bytes - expedited) // 2
        lanes: list[tuple[Lane, int, int]] = [
            ("store", bulk, settings.slots),
            ("load", bulk, settings.slots),
            ("expedited", expedited, _EXPEDITED_SLOTS),
        ]
        return {
            lane: CudaLane(
                self._driver,
                self._new_memory(nbytes),
                to_rows=lane == "store",
                urgent=lane == "expedited",
                slots=slots,
                staging_programs=programs,
                direct_programs=settings.direct_programs,
            )
            for lane, nbytes, slots in lanes
        }

    def _enter(self) -> None:
        """Make the device the copy thread's own, once."""
        if not getattr(self._entered, "done", False):
            self._driver.enter()
            self._entered.done = True

    def _settle(self) -> None:
        for lane in self._lanes.values():
            lane.settle()


def _cut(part: GroupCopy, pinned_rows: int, geometry: GroupGeometry) -> tuple[GroupCopy, GroupCopy | None]:
    """Return the part to launch now, and the rest: first copies in pinned rows, then a few of the others.

    More rows are pinned meanwhile, so this is called again after each part.
    """
    pinned = part.rows < pinned_rows
    if pinned.all():
        return part, None
    if not pinned.any():
        chunk_bytes = geometry.block_bytes * geometry.blocks_per_chunk
        count = max(1, _UNPINNED_BYTES // chunk_bytes) * geometry.blocks_per_chunk
        pinned[:count] = True
    return part.where(pinned), part.where(~pinned) if not pinned.all() else None


class _CudaCopy:
    """One job's copy: launched piece by piece, ended when its last event is. ``mark`` is kept until then."""

    def __init__(self, copies: CudaCopies, lane: CudaLane, pieces: Iterator[int], mark: Any) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._copies, self._lane, self._pieces, self._mark = copies, lane, pieces, mark
        self._begin = self._end = 0
        self._failure: Exception | None = None

    def advance(self) -> bool:
        try:
            self._begin = self._begin or self._lane.begin_event()
            piece = next(self._pieces, None)
            if piece is None:
                self._end = self._lane.end_event()
                return False
        except Exception:
            self._copies.raise_if_lost()
            self._lane.settle()  # nothing of this copy runs on
            if self._begin:
                self._lane.give_up(self._begin)
            raise
        self.nbytes += piece
        return True

    def ended(self) -> bool:
        if not self._end:
            return True
        if self._failure is None:
            try:
                if not self._lane.has_ended(self._end):
                    return False
                self.seconds = self._lane.recycle(self._begin, self._end)
            except Exception as error:  # noqa: BLE001 -- raised when nothing of this copy runs on
                self._copies.raise_if_lost()
                self._failure = error
        if self._failure is None:
            return True
        if not self._lane.is_idle():
            return False
        self._lane.give_up(self._begin, self._end)
        raise self._failure

    def wait(self) -> None:
        if self._end:
            try:
                self._lane.wait(self._end)
            except CudaError as error:  # ``ended`` raises it when the result is collected
                _log.debug("waiting for a copy: %s", error)
                with contextlib.suppress(CudaError):
                    self._lane.settle()
