"""An evaluation: a plan of memory sizes, alone and each with a tier of several sizes behind it, and their worth.

Memory and tiers cost money. The primary is the one with which, and with its best tier, most is left of what is saved.

A chunk of the log is one value. The engine's own prefix cache on the GPU is taken as a cache of its size in front of
all: what it hits is there without any tier, and only what the tiers hit beyond it counts as saved.

A log may be of several engines. Sizes are of all of them together, as if requests with one prefix went to one engine.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtiers_replay.evaluate.offers import DAY, DISK, GIB_MONTH, MEMORY, TIER_TYPES, Offer, Pricing, offer_of
from kvtiers_replay.logs import ReadLog
from kvtiers_replay.plan import Change, PlanCase, PlanPoint, PlanSizes, PlanTier, PlanTrace, cases_of_interest, changes
from kvtiers_replay.plan.sweep import sweep
from kvtiers_replay.sizing import LINKS, Link, ModelShape, TierSuggestion, suggest

__all__ = ["Evaluation", "Question", "Trial", "evaluate"]

_GIB = 1 << 30
_NEAR = 0.01  # two amounts this close, as a share of the larger one, are as good as equal
_NOISE = 0.001  # of all chunks asked for
_MOST_SIZES = 6
_TIER_SIZES = 4
_TIER = "tier"

Progress = Callable[[str, float], None]
"""Called with what is being done, and how much of it is done (0 to 1). Its exceptions end the evaluation."""


@dataclass(frozen=True, slots=True)
class Question:
    """The machine and the prices to evaluate for.

    ``gpus``: of one engine. ``gpu_hour``: the price of one for an hour. ``gpu_cache``: KV that those of an engine hold
    together, bytes. ``most_memory``: the largest primary of an engine, bytes; ``memory``: sizes of all primaries
    together to try instead. ``prices``: for a GiB and month, by type of tier. ``hours``: how long the log's traffic
    took, where it has no times. ``engines``: whose log it is; 0: as many as its prompts keep busy.
    """

    shape: ModelShape
    tokens_per_block: int = 16
    prefill_speed: float = 10_000.0
    gpus: int = 1
    gpu_hour: float = 2.5
    currency: str = "$"
    gpu_cache: int = 40 * _GIB
    most_memory: int = 128 * _GIB
    memory: Sequence[int] = ()
    links: Sequence[Link] = LINKS
    prices: Mapping[str, float] = field(default_factory=dict)
    hours: float | None = None
    engines: int = 0
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Trial:
    """What the whole stack did with the log's first requests, with real tiers and bytes, and what the plan said.

    Its primary holds ``primary_chunks``, which is another size than those of the evaluation.
    """

    requests: int
    seconds: float
    rate: float
    planned: float
    wrong_bytes: int
    step_p99: float
    tier: str
    primary_chunks: int


@dataclass(slots=True)
class Evaluation:
    """All figures of an evaluation; rates are shares of the full chunks asked for.

    ``gpu``: the engine's own cache alone. ``memory``: a primary alone, by size. ``grid``: each of them with a tier
    behind it, some with tiers of several sizes. ``primary``: the chosen one of ``memory``. ``asked``: the sizes that
    were tried, bytes by the chunks that they have room for.
    """

    question: Question
    log: ReadLog
    trace: PlanTrace
    sizes: PlanSizes
    pricing: Pricing
    suggestions: Sequence[TierSuggestion]
    gpu: PlanPoint
    memory: list[PlanPoint]
    primary: PlanPoint
    grid: list[PlanPoint]
    asked: Mapping[int, int]
    changes: list[Change] = field(default_factory=list)
    offers_by_memory: dict[int, list[Offer]] = field(default_factory=dict)
    trial: Trial | None = None

    @property
    def infinite_rate(self) -> float:
        """The hit rate of a cache without bounds."""
        return self.trace.infinite_hits / self.trace.references

    @property
    def behind(self) -> list[PlanPoint]:
        """The chosen primary with a tier behind it, by size."""
        return self.behind_of(self.primary)

    def behind_of(self, memory: PlanPoint) -> list[PlanPoint]:
        """Return a primary with a tier behind it, by size."""
        return [point for point in self.grid if point.case.primary == memory.case.primary]

    @property
    def offers(self) -> list[Offer]:
        """Each type of tier behind the chosen primary, at its best size."""
        return self.offers_by_memory[self.primary.case.primary]

    @property
    def chosen(self) -> Offer | None:
        """The tier that pays most, if any pays."""
        return _best(self.offers)

    def disk_of(self, memory: PlanPoint) -> Offer | None:
        """Return a local disk behind this primary at its best size; None: it adds nothing."""
        found = next(each for each in self.offers_by_memory[memory.case.primary] if each.tier.link == DISK)
        return found if found.adds_hits else None

    @property
    def pays(self) -> bool:
        """Whether something is left of what the chosen primary and tier save, beyond noise."""
        is_noise = self.saved_chunks(self.primary) / self.trace.references < _NOISE and self.chosen is None
        return not is_noise and self.net(self.primary, self.chosen) > 0

    def hardware(self, memory: PlanPoint, offer: Offer | None) -> float:
        """Return what this primary and tier cost a day."""
        room = self.pricing.room(MEMORY, self.bytes_of(memory.case.primary))
        return room + (offer.cost if offer and offer.cost is not None else 0.0)

    def net(self, memory: PlanPoint, offer: Offer | None) -> float:
        """Return what is left of what both save: money a day, or GPU seconds where money is not known."""
        seconds = self.gpu_seconds(memory)
        saved = self.pricing.by_day(self.pricing.money(seconds))
        own = seconds if saved is None else saved - self.pricing.room(MEMORY, self.bytes_of(memory.case.primary))
        return own + (offer.net if offer else 0.0)

    def saved_chunks(self, point: PlanPoint) -> int:
        """Return the hits of a case beyond those of the GPU's own cache."""
        return max(0, hits_of(point) - hits_of(self.gpu))

    def rate(self, point: PlanPoint) -> float:
        """Return the hit rate of a case and the GPU's own cache together."""
        return max(point.rate, self.gpu.rate)

    def gpu_seconds(self, point: PlanPoint) -> float:
        """Return what a case saves over the log, if all of it may be loaded."""
        return self.pricing.gpu_seconds(self.saved_chunks(point) * self.trace.tokens_per_chunk)

    def bytes_of(self, chunks: int | None) -> int:
        """Return the size that was tried with so many chunks, or their bytes; None: of all."""
        value_bytes = self.sizes.value_bytes or 1
        return self.trace.unique * value_bytes if chunks is None else self.asked.get(chunks, chunks * value_bytes)

    def tier_bytes(self, point: PlanPoint) -> int:
        """Return the size of the tier of a case; of one that holds everything, the bytes of that."""
        chunks = point.case.tiers[0].chunks
        return self.bytes_of(None if chunks == self.trace.unique else chunks)

    def total_saved(self) -> float:
        """Return the GPU seconds that the chosen primary and the chosen tier save together, over the log."""
        return self.gpu_seconds(self.primary) + (self.chosen.gpu_seconds if self.chosen else 0.0)

    def prefill_seconds(self) -> float:
        """Return the GPU seconds that all of the log's prompts take without any cache."""
        return self.pricing.gpu_seconds(sum(request.num_tokens for request in self.log.workload.requests))

    def as_data(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        question, pricing, log = self.question, self.pricing, self.log
        saved = self.total_saved()
        return {
            "log": log.workload.name,
            "lines": log.lines,
            "requests": len(log.workload.requests),
            "problems": [
                {"what": kind, "lines": count, "first_line": first} for kind, (count, first) in log.problems.items()
            ],
            "notes": log.notes,
            "seconds": pricing.seconds,
            "model": question.shape.name,
            "bytes_per_token": question.shape.bytes_per_token,
            "tokens_per_chunk": self.trace.tokens_per_chunk,
            "references": self.trace.references,
            "different_chunks": self.trace.unique,
            "different_bytes": self.bytes_of(None),
            "prefill_tokens_per_second": question.prefill_speed,
            "engines": pricing.engines,
            "gpus": question.gpus,
            "gpu_hour": question.gpu_hour,
            "hit_rates": {"infinite": self.infinite_rate, "gpu": self.gpu.rate},
            "memory": [self._case(point) for point in self.memory],
            "primary_bytes": self.bytes_of(self.primary.case.primary),
            "behind": [self._case(point) for point in self.behind],
            "grid": [self._case(point) for point in self.grid],
            "tiers": [_offer_data(offer) for offer in self.offers],
            "chosen": self.chosen.tier.link if self.chosen else None,
            "gpu_seconds_saved": saved,
            "gpu_seconds_of_prefill": self.prefill_seconds(),
            "money_saved_a_day": pricing.by_day(pricing.money(saved)),
            "hardware_a_day": self.hardware(self.primary, self.chosen),
            "prices_a_gib_month": GIB_MONTH | dict(question.prices),
            "models": dict(log.models),
            "replayed": None if self.trial is None else {name: getattr(self.trial, name) for name in _TRIAL_FIELDS},
        }

    def _case(self, point: PlanPoint) -> dict[str, Any]:
        seconds = self.gpu_seconds(point)
        return {
            "primary_bytes": self.bytes_of(point.case.primary),
            "tier_bytes": self.tier_bytes(point) if point.case.tiers else 0,
            "hit_rate": self.rate(point),
            "gpu_seconds_saved": seconds,
            "money_saved_a_day": self.pricing.by_day(self.pricing.money(seconds)),
        }


_TRIAL_FIELDS = ("requests", "seconds", "rate", "planned", "wrong_bytes", "step_p99", "tier", "primary_chunks")


def _offer_data(offer: Offer) -> dict[str, Any]:
    return {
        "type": offer.tier.link,
        "bytes": offer.size,
        "points": offer.points,
        "gpu_seconds_saved": offer.gpu_seconds,
        "money_saved_a_day": offer.saved,
        "cost_a_day": offer.cost,
        "break_even_tokens": offer.break_even,
        "pays": offer.pays,
        "why": offer.why,
    }


def _best(offers: Sequence[Offer]) -> Offer | None:
    return max((offer for offer in offers if offer.pays), key=lambda offer: offer.net, default=None)


def hits_of(point: PlanPoint) -> int:
    """Return the hits of a case, wherever they came from."""
    return sum(point.hits.values())


def evaluate(log: ReadLog, question: Question, progress: Progress = lambda _doing, _share: None) -> Evaluation:
    """Return what tiers are worth for this log. Blocks for seconds, or for minutes with a large log."""
    trace = PlanTrace(log.workload)
    sizes = PlanSizes.of_tokens(trace.unique, trace.tokens_per_chunk, question.shape.bytes_per_token)
    value_bytes = sizes.value_bytes or 1
    whole = trace.unique * value_bytes
    pricing = _pricing(log, question, trace, value_bytes)
    memory = question.memory or _memory_sizes(question.most_memory * pricing.engines, whole)
    gpu_case = PlanCase(_chunks(question.gpu_cache * pricing.engines, value_bytes, trace))
    asked: dict[int, int] = {}
    for size in sorted(memory):
        chunks = _chunks(size, value_bytes, trace)
        asked.setdefault(chunks, max(size, chunks * value_bytes))
    sized = [PlanCase(chunks) for chunks in asked]
    points = _simulate("sizes of memory", trace, list(dict.fromkeys([gpu_case, *sized])), question, progress)
    alone = {point.case: point for point in points}
    found = Evaluation(
        question, log, trace, sizes, pricing,
        suggest(question.shape, question.tokens_per_block, question.links, question.prefill_speed),
        alone[gpu_case], [alone[case] for case in sized], alone[sized[0]], [], asked,
    )  # fmt: skip
    room = {size // value_bytes: size for size in _ladder(whole, _TIER_SIZES) if value_bytes <= size < whole}
    found.asked = room | asked

    def add(memory: Sequence[PlanPoint], least: int, most: int) -> None:
        """Put tiers behind these primaries: the first ``most`` sizes that are larger than memory and ``least``."""
        cases = []
        for point in memory:
            above = max(asked[point.case.primary], least - 1)
            sizes = [*(chunks for chunks, size in room.items() if size > above), trace.unique][:most]
            cases += [PlanCase(point.case.primary, tiers=(PlanTier(_TIER, chunks),)) for chunks in sizes]
        known = {point.case for point in found.grid}
        new = [case for case in cases if case not in known]
        found.grid += _simulate("tiers behind memory", trace, new, question, progress) if new else []
        found.grid.sort(key=lambda point: (point.case.primary, point.case.tiers[0].chunks or 0))
        found.offers_by_memory |= {point.case.primary: _offers(found, point) for point in memory}

    # All sizes behind one memory, the best of them behind the others, and all behind the memory that is best then.
    usual = found.memory[-2:][0]
    add([usual], 0, _TIER_SIZES + 1)
    (disk,) = (offer for offer in found.offers_by_memory[usual.case.primary] if offer.tier.link == DISK)
    add(found.memory, disk.size, 1)
    found.primary = _chosen(found)
    add([found.primary], 0, _TIER_SIZES + 1)
    learning = cases_of_interest(trace, [found.primary.case])
    learnt = _simulate("another eviction policy", trace, learning, question, progress)
    found.changes = changes(trace, [found.primary], learnt, question.prefill_speed)
    return found


def _chosen(evaluation: Evaluation) -> PlanPoint:
    """Return the primary with which most is left, with its best tier; of those that are nearly equal, the smallest."""
    worth = [
        evaluation.net(point, _best(evaluation.offers_by_memory[point.case.primary])) for point in evaluation.memory
    ]
    best = max(worth)
    return next(point for point, each in zip(evaluation.memory, worth, strict=True) if each >= best - abs(best) * _NEAR)


def _chunks(size: int, value_bytes: int, trace: PlanTrace) -> int:
    return min(max(1, size // value_bytes), 4 * trace.unique)


def _memory_sizes(most: int, whole: int) -> list[int]:
    """Return powers of two up to all there is, or else the most that there may be and its halves."""
    return _ladder(whole, _MOST_SIZES) if whole <= most else [most >> step for step in range(_MOST_SIZES)][::-1]


def _ladder(most: int, steps: int) -> list[int]:
    """Return powers of two from 1 MiB on, the largest of which is the first that is no smaller than ``most``."""
    top = max(20, math.ceil(math.log2(max(2, most))))
    return [1 << power for power in range(max(20, top - steps + 1), top + 1)]


def _simulate(
    what: str, trace: PlanTrace, cases: Sequence[PlanCase], question: Question, progress: Progress
) -> list[PlanPoint]:
    done, whole = 0, len(cases) * len(trace.requests)

    def served(requests: int) -> None:
        nonlocal done
        done += requests
        progress(f"simulating {what}", done / max(1, whole))

    found = sweep(trace, cases, processes=question.processes, progress=served)
    return [point for _, point in sorted(found, key=lambda item: item[0])]


def _pricing(log: ReadLog, question: Question, trace: PlanTrace, value_bytes: int) -> Pricing:
    seconds = question.hours * 3600 if question.hours else log.seconds
    busy = sum(request.num_tokens for request in log.workload.requests) / question.prefill_speed
    return Pricing(
        question.shape,
        {link.name: link for link in question.links},
        question.prefill_speed,
        question.gpus,
        question.gpu_hour,
        question.currency,
        question.prices,
        seconds,
        question.engines or max(1, math.ceil(busy / seconds) if seconds else 1),
        [hits * trace.tokens_per_chunk for hits in _runs(trace) if hits],
        trace.tokens_per_chunk,
        value_bytes,
    )


def _runs(trace: PlanTrace) -> list[int]:
    """Return how many chunks each request would hit in a cache without bounds."""
    seen: set[bytes] = set()
    runs = []
    for _, keys, usable in trace.requests:
        runs.append(next((at for at in range(usable) if keys[at] not in seen), usable))
        seen.update(keys)
    return runs


def _offers(evaluation: Evaluation, memory: PlanPoint) -> list[Offer]:
    """Return each type of tier behind a primary, at the size that is worth most, of those that add hits.

    Of equals, the smallest.
    """
    pricing, floor, behind = evaluation.pricing, hits_of(evaluation.gpu), evaluation.behind_of(memory)
    found = []
    for tier in TIER_TYPES:
        offers = [offer_of(tier, evaluation.tier_bytes(point), memory, point, floor, pricing) for point in behind]
        # Where none pays, the smallest loses least: but the reason is that of one that has what comes back.
        offers = [offer for offer in offers if offer.adds_hits] or offers
        best = max(offer.net for offer in offers)
        near = abs(best) * _NEAR
        found.append(next(offer for offer in offers if offer.net >= best - near))
    return found


def span_text(seconds: float) -> str:
    """Return how long a log is, as people say it."""
    units = ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes"))
    unit, name = next((each for each in units if seconds >= 2 * each[0]), (1.0, "seconds"))
    length = seconds / unit
    text = f"{length:,.0f}" if length >= 100 else f"{length:.3g}"
    return f"{text} {name.removesuffix('s') if text == '1' else name}"
