"""An engine and its tiers played by the clock: the real ``TieringManager``, with nothing that moves bytes or waits.

::

    engine   one GPU. Each step computes up to 8,192 tokens of the oldest requests that are ready, as vLLM's does;
             a request with chunks on their way is passed over, and asked about again in the next step
    tier     answers lookups after ``answer`` seconds; loads first come, first served: a job's first byte comes after
             ``latency`` seconds, its chunks one after another at ``per_chunk`` seconds each, which may change; with
             several ``hosts`` so many jobs at a time, each as much slower

A chunk is 16 MiB and holds 128 tokens, as of Llama 3.1 8B. Times are in seconds of the played clock, sizes in tokens.

A model may have windows or states beside full attention: a tier that has so many tokens of a prompt has the windows
before their end, and none before an earlier one. The engine scans for them from the right, as vLLM does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import (
    JobResult,
    LookupResult,
    OffloadKey,
    TierRequest,
    TransferJob,
    make_offload_key,
)
from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.secondary.tier_jobs import EventTier
from kvtiers.tiering.estimates import PRIOR_BYTES_PER_SECOND
from kvtiers.tiering.jobs import TieringOptions
from kvtiers.tiering.manager import TieringManager
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers.types import PromptGroup, RequestContext

__all__ = ["CHUNK_BYTES", "CHUNK_TOKENS", "Arrival", "Outcome", "Scene", "Tier", "play"]

CHUNK_TOKENS, CHUNK_BYTES = 128, 16 << 20
_ROW_BYTES = 16
_JOB_CHUNKS = 8
_STEP_TOKENS = 8192
_IDLE_STEP = 0.001
_STEP_OVERHEAD = 0.004


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, how many tokens its prompt has, and how many of them each tier has, by its place."""

    at: float
    tokens: int
    known: Sequence[int] = (0,)


@dataclass(frozen=True, slots=True)
class Tier:
    """A store. ``per_chunk(t)``: seconds a chunk at time t. ``answer``: seconds until a lookup is answered."""

    per_chunk: Callable[[float], float]
    latency: float = 0.002
    answer: float = 0.0
    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens. ``per_token(t)``: seconds that the GPU takes for a token of a prompt at time t.

    ``rows``: of the primary. ``decoding``: seconds that other work takes in each step. ``estimate``: of the seconds a
    token, by the engine, until a prompt was computed; 0: it has none. ``windows``: of each KV group beside the one of
    full attention, the chunks of its window; 1 for a state.
    """

    arrivals: Sequence[Arrival]
    tiers: Sequence[Tier]
    per_token: Callable[[float], float] = lambda _now: 30e-6
    rows: int = 1536
    decoding: float = 0.0
    estimate: float = 0.0
    windows: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a scene: each request's seconds to its first token, in order; how many tokens were loaded."""

    seconds: Sequence[float]
    loaded_tokens: int
    end: float

    @property
    def total(self) -> float:
        """Seconds to the first token, of all requests together."""
        return sum(self.seconds)


class _PlayedTier(EventTier):
    """A tier by the clock."""

    def __init__(self, tier: Tier, clock: Callable[[], float]) -> None:
        self.there: set[OffloadKey] = set()
        self._tier = tier
        self._clock = clock
        self._free_at = [-math.inf] * tier.hosts
        self._running: list[tuple[float, JobResult]] = []
        self._asked_at: dict[OffloadKey, float] = {}

    def is_available(self) -> bool:
        return True

    def lookup_many(self, keys: Sequence[OffloadKey], context: TierRequest) -> Sequence[LookupResult]:
        del context
        if keys[0] not in self._asked_at:  # one question is about all of them
            for key in keys:
                self._asked_at.setdefault(key, self._clock())
        if self._clock() < self._asked_at[keys[0]] + self._tier.answer:
            return [LookupResult.RETRY]
        return [LookupResult.HIT if key in self.there else LookupResult.MISS for key in keys]

    def submit_store(self, job: TransferJob) -> None:
        self._running.append((self._clock(), JobResult(job.job_id, success=True)))

    def submit_load(self, job: TransferJob) -> None:
        now = self._clock()
        host = self._free_at.index(min(self._free_at))
        begins = max(now, self._free_at[host])
        at = max(now + self._tier.latency, self._free_at[host])
        for _ in job.keys:
            at += self._tier.per_chunk(at) * self._tier.hosts
        self._free_at[host] = at
        seconds = at - begins
        self._running.append((at, JobResult(job.job_id, True, None, CHUNK_BYTES * len(job.keys), seconds)))

    def get_finished_jobs(self) -> Sequence[JobResult]:
        now = self._clock()
        ended = [result for at, result in self._running if at <= now]
        self._running = [(at, result) for at, result in self._running if at > now]
        return ended

    @property
    def next_end(self) -> float:
        """When the next job ends; infinite if there is none."""
        return min((at for at, _ in self._running), default=math.inf)

    def drain(self, timeout: float) -> bool:
        del timeout
        return True


class _Ready:
    """The engine's side: all ranks are there."""

    def ready(self) -> bool:
        return True

    def dma_may_run(self) -> bool:
        return False

    def take_lost_ranks(self) -> Sequence[int]:
        return ()

    def tier_stats(self, name: str) -> dict[str, float]:
        del name
        return {}


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    arrival: Arrival
    keys: list[list[OffloadKey]]
    context: RequestContext
    left: int = 0
    loaded: int = 0
    is_begun: bool = False


@dataclass(slots=True)
class _Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class _Engine:
    """Plays a scene with one way to decide. ``load_wait``: None: the manager decides."""

    scene: Scene
    load_wait: float | None
    loads: bool
    clock: _Clock = field(default_factory=_Clock)

    def run(self) -> Outcome:
        scene, clock = self.scene, self.clock
        tiers = [_PlayedTier(tier, clock) for tier in scene.tiers] if self.loads else []
        manager = self._manager(tiers)
        coming = [self._request(number, arrival, tiers) for number, arrival in enumerate(scene.arrivals)]
        waiting: list[_Request] = []
        ended: dict[int, float] = {}
        loaded = 0
        computed, took = 0, 0.0
        while coming or waiting:
            if not waiting and not manager.has_pending_work():
                clock.now = max(clock.now, coming[0].arrival.at)
            while coming and coming[0].arrival.at <= clock.now:
                request = coming.pop(0)
                manager.on_new_request(request.context, request.arrival.tokens)
                waiting.append(request)
            budget = _STEP_TOKENS
            done: list[_Request] = []
            for request in waiting:
                if not budget:
                    break
                if not request.is_begun and not self._begin(manager, request):
                    continue
                some = min(request.left, budget)
                request.left -= some
                budget -= some
                if not request.left:
                    done.append(request)
            manager.on_schedule_end(computed, took)
            computed = _STEP_TOKENS - budget
            began = clock.now
            if computed:
                clock.now += _STEP_OVERHEAD + scene.decoding + computed * scene.per_token(clock.now)
            else:
                clock.now += _IDLE_STEP + scene.decoding
                if self.load_wait is not None and waiting:  # nothing is decided meanwhile
                    ends = [tier.next_end for tier in tiers] + [one.arrival.at for one in coming[:1]]
                    clock.now = max(clock.now, min(ends)) if min(ends) < math.inf else clock.now
            took = clock.now - began if computed else 0.0
            for request in done:
                waiting.remove(request)
                manager.on_request_finished(request.context)
                ended[request.number] = clock.now - request.arrival.at
                loaded += request.loaded
        return Outcome([ended[number] for number in range(len(ended))], loaded, clock.now)

    def _manager(self, tiers: Sequence[_PlayedTier]) -> TieringManager:
        scene, clock = self.scene, self.clock
        options = TieringOptions(
            load_wait=self.load_wait,
            one_tier=0.25 if self.load_wait is None else 0.9,
            all_tiers=0.5 if self.load_wait is None else 0.9,
            store_reserve=0.05,
            job_bytes=_JOB_CHUNKS * _ROW_BYTES,
            prior_seconds_per_token=CHUNK_BYTES / CHUNK_TOKENS / 1e9,
            estimated_seconds_per_token=scene.estimate,
        )
        view = memoryview(bytearray(scene.rows * _ROW_BYTES))
        primary = CPUPrimaryTier(scene.rows, _ROW_BYTES, view, clock=clock)
        slots = [
            TierSlot(place, tier, TierOptions(f"tier{place}", deadline=math.inf)) for place, tier in enumerate(tiers)
        ]
        groups = [CHUNK_TOKENS] * (1 + len(scene.windows))
        manager = TieringManager("played", primary, slots, groups, _Ready(), options, clock)  # type: ignore[arg-type]
        for slot in slots:
            slot.rate.prior = CHUNK_BYTES / PRIOR_BYTES_PER_SECOND  # the rows here are small
        return manager

    def _request(self, number: int, arrival: Arrival, tiers: Sequence[_PlayedTier]) -> _Request:
        places = range(arrival.tokens // CHUNK_TOKENS)
        hashes = [f"{number:08}-{place:08}".encode() for place in places]
        keys = [[make_offload_key(one, group) for one in hashes] for group in range(1 + len(self.scene.windows))]
        for tier, known in zip(tiers, arrival.known, strict=False):
            end = known // CHUNK_TOKENS
            tier.there.update(keys[0][:end])
            for window, of_group in zip(self.scene.windows, keys[1:], strict=True):
                tier.there.update(of_group[max(0, end - window) : end])
        return _Request(number, arrival, keys, RequestContext(f"r{number}"))

    def _begin(self, manager: TieringManager, request: _Request) -> bool:
        """Look a request up; False: it waits."""
        found = self._found(manager, request) if request.keys[0] else 0
        if found is None:
            return False
        if found:
            wanted = request.keys[0][:found]
            for window, keys in zip(self.scene.windows, request.keys[1:], strict=True):
                wanted = wanted + keys[max(0, found - window) : found]
            plan = manager.prepare_load(wanted, request.context)
            assert plan is not None
            manager.complete_load(plan)
            request.loaded = found * CHUNK_TOKENS
        request.left = max(1, request.arrival.tokens - request.loaded)
        request.is_begun = True
        return True

    def _found(self, manager: TieringManager, request: _Request) -> int | None:
        """Return how many chunks of a prompt can be loaded; None: it is not known yet, or they are on their way."""
        windows = (0, *(window * CHUNK_TOKENS for window in self.scene.windows))
        groups = [PromptGroup(keys, window) for keys, window in zip(request.keys, windows, strict=True)]
        reach = manager.reach(groups, request.context)
        return None if reach.waits else reach.tokens // CHUNK_TOKENS


def play(scene: Scene, way: str) -> Outcome:
    """Play a scene. ``way``: "decide" (``load_wait: auto``), "load" whatever it takes, or "compute" everything."""
    waits = {"decide": None, "load": 1e9, "compute": None}
    return _Engine(scene, waits[way], loads=way != "compute").run()
