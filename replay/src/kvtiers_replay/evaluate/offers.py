"""Offers: one type of tier at one size, what it saves, what it costs, and whether that pays.

**Saved**: the chunks that are hits with the tier and not without it, where loading them beats computing them, times the
seconds that the GPUs compute their tokens for. Runs shorter than the break-even of the tier's link do not count.

**Costs**: its bytes at a price for a GiB and month, and for a bucket its requests. So does the memory in front of it.
Prices and speeds are assumptions that options replace: those of memory and local disks are what they cost to buy, over
three years, since nobody pays for them by the hour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtiers_replay.plan import PlanPoint
from kvtiers_replay.sizing import Link, ModelShape
from kvtiers_replay.sizing.links import PRIMARY, break_even_tokens

__all__ = [
    "DAY",
    "DISK",
    "GIB_MONTH",
    "MEMORY",
    "TIER_TYPES",
    "Offer",
    "Pricing",
    "TierType",
    "config_size",
    "offer_of",
    "size_text",
]

GIB = 1 << 30
DAY = 86_400.0
_DAYS_OF_A_MONTH = 30.4
_LEAST_POINTS = 0.1  # of hits: less is noise
_NEARLY_ALL = 0.95
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class TierType:
    """A type of tier that is evaluated: its link, its usual price, and how it stands in a config.

    ``gib_month``: what a GiB costs a month. ``put``, ``get``: what a write and a read cost.
    """

    link: str
    title: str
    yaml: str
    install: str
    gib_month: float
    put: float = 0.0
    get: float = 0.0


TIER_TYPES = (
    # Server memory at some 10.80 a GiB, and NVMe drives for writes at some .36, over 36 months.
    TierType("disk", "a local disk (fs)", "type: fs, path: /var/cache/kvtiers, capacity: {size}", "kvtiers-fs", 0.01),
    TierType("network", "a cache server (redis)", "type: redis, url: redis://HOST:6379/0", "kvtiers-redis", 5.0),
    # AWS S3 Standard: a GB and month, 1,000 PUT and 1,000 GET requests, in us-east-1.
    TierType("object", "a bucket (s3)", "type: s3, bucket: BUCKET", "kvtiers-s3", 0.023 * 1.0737, 0.005e-3, 0.0004e-3),
)

MEMORY, DISK = "memory", "disk"
GIB_MONTH = {MEMORY: 0.3} | {tier.link: tier.gib_month for tier in TIER_TYPES}
"""What a GiB costs a month, by type of tier and for memory, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """What all offers are reckoned with.

    ``seconds``: how long the log's traffic took; None: not known, so that nothing can be said by the day. ``runs``:
    tokens that each request would hit in a cache without bounds. ``value_bytes``: of a chunk. ``engines``: that served
    the log, each with links of its own.
    """

    shape: ModelShape
    links: Mapping[str, Link]
    prefill_speed: float
    gpus: int
    gpu_hour: float
    currency: str
    prices: Mapping[str, float]
    seconds: float | None
    engines: int
    runs: Sequence[int]
    tokens_per_chunk: int
    value_bytes: int

    def gpu_seconds(self, tokens: float) -> float:
        """Return the seconds of GPUs, all of an engine's together, that computing these tokens takes."""
        return tokens / self.prefill_speed * self.gpus

    def money(self, gpu_seconds: float) -> float:
        """Return what these seconds cost."""
        return gpu_seconds / 3600 * self.gpu_hour

    def by_day(self, amount: float) -> float | None:
        """Return how much of something that the log has once there is a day."""
        return amount * DAY / self.seconds if self.seconds else None

    def room(self, kind: str, nbytes: int) -> float:
        """Return what so many bytes of a type of tier, or of memory, cost a day."""
        return nbytes / GIB * self.prices.get(kind, GIB_MONTH[kind]) / _DAYS_OF_A_MONTH

    def break_even(self, link: str) -> int | None:
        """Return the tokens from which on a load over this link beats computing; None: it never does."""
        way = [self.links[link], self.links[PRIMARY]]
        return break_even_tokens(self.shape, way, self.prefill_speed, step=self.tokens_per_chunk)

    def worth_loading(self, link: str) -> float:
        """Return the share of what comes back that is in runs of at least the break-even."""
        least, whole = self.break_even(link), sum(self.runs)
        return sum(run for run in self.runs if run >= least) / whole if least is not None and whole else 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """A type of tier at a size, behind a primary. ``saved`` and ``cost``: money a day; None: the log has no times.

    ``points``: of hits that it adds, in percent of all chunks asked for. ``gpu_seconds``: that it saves, over the log.
    """

    tier: TierType
    size: int
    points: float
    gpu_seconds: float
    saved: float | None
    cost: float | None
    break_even: int | None
    pays: bool
    why: str

    @property
    def adds_hits(self) -> bool:
        """Whether its hits are more than noise."""
        return self.points >= _LEAST_POINTS

    @property
    def net(self) -> float:
        """What is left of what it saves: money a day, or GPU seconds where money is not known."""
        return self.gpu_seconds if self.saved is None or self.cost is None else self.saved - self.cost


def offer_of(tier: TierType, size: int, before: PlanPoint, point: PlanPoint, floor: int, pricing: Pricing) -> Offer:
    """Return what this tier is worth. ``before``: the same primary alone; ``floor``: hits that the GPU's cache has.

    ``size``: bytes that it holds.
    """
    gained = max(0, sum(point.hits.values()) - max(floor, sum(before.hits.values())))
    points = 100 * gained / point.references
    share = pricing.worth_loading(tier.link)
    seconds = pricing.gpu_seconds(gained * pricing.tokens_per_chunk * share)
    saved = pricing.by_day(pricing.money(seconds))
    cost = _cost(tier, size, point, pricing)
    pays, why = _verdict(tier, points, share, point, saved, cost, pricing)
    return Offer(tier, size, points, seconds, saved, cost, pricing.break_even(tier.link), pays, why)


def _cost(tier: TierType, size: int, point: PlanPoint, pricing: Pricing) -> float | None:
    """Return what it costs a day: room, and requests where the log says how many there are a day."""
    room = pricing.room(tier.link, size)
    calls = sum(point.written.values()) * tier.put + sum(point.promoted.values()) * tier.get
    by_day = pricing.by_day(calls)
    return None if by_day is None else room + by_day


def _verdict(
    tier: TierType,
    points: float,
    share: float,
    point: PlanPoint,
    saved: float | None,
    cost: float | None,
    pricing: Pricing,
) -> tuple[bool, str]:
    """Return whether it pays, and why or why not, in one sentence."""
    link, shape, speed = pricing.links[tier.link], pricing.shape, pricing.prefill_speed
    if pricing.break_even(tier.link) is None:
        needed = shape.bytes_per_token * speed
        return False, (
            f"computing is faster at any length: {speed:,.0f} tokens/s are {needed / 1e9:.2g} GB/s of KV, and it reads "
            f"{link.bytes_per_second / 1e9:.2g} GB/s"
        )
    if points < _LEAST_POINTS:
        return False, "what comes back is in the GPU's cache and the memory in front of it already"
    if not share:
        return False, f"no prompt has a prefix of {pricing.break_even(tier.link):,} tokens, from which loading pays"
    if pricing.seconds:
        moved = max(sum(point.written.values()), sum(point.promoted.values())) * pricing.value_bytes / pricing.seconds
        if moved > link.bytes_per_second * pricing.engines:
            links = f"{pricing.engines} such links" if pricing.engines > 1 else "such a link"
            return False, (
                f"the log moves {moved / 1e9:.2g} GB/s on average, more than the "
                f"{link.bytes_per_second * pricing.engines / 1e9:.2g} GB/s of {links}"
            )
    if saved is not None and cost is not None and cost >= saved:
        return False, f"it costs {pricing.currency}{cost:,.2f} a day and saves {pricing.currency}{saved:,.2f}"
    part = f", of which {100 * share:.0f} % are long enough to load" if share < _NEARLY_ALL else ""
    return True, f"{points:.1f} points more hits than without it{part}"


def size_text(nbytes: int) -> str:
    """Return a size as people read it, with three digits at most."""
    unit, text = next((each for each in _UNITS if nbytes >= each[0]), _UNITS[-1])
    return f"{nbytes / unit:.3g} {text}" if nbytes < 999.5 * unit else f"{nbytes / unit:,.0f} {text}"


def config_size(nbytes: int) -> str:
    """Return a size of at least so many bytes, as a config has it."""
    # The largest unit that is exact, or that rounds up by an eighth at most.
    unit, text = next((each for each in _UNITS[1:] if not nbytes % each[0] or nbytes >= 8 * each[0]), _UNITS[-1])
    return f"{-(-nbytes // unit)}{text}"
