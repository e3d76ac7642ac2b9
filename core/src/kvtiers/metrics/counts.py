"""The counts: counters, gauges and histograms as plain data, cheap to count on the engine's thread.

Each part counts into an object of its own; ``TieringManager.stats()`` puts them together. A histogram's bounds are
fixed powers of two, in seconds. Help texts stand here alone: exporters of other systems take them from here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = [
    "BUDGET_FIGURES",
    "CLIENT_TIER_FIGURES",
    "PRIMARY_HELP",
    "SILENT_SECONDS",
    "TIER_HELP",
    "WHAT_IF_COUNTERS",
    "WHAT_IF_HELP",
    "WHAT_IF_LABELS",
    "ClientMetrics",
    "EngineMetrics",
    "Histogram",
    "TierMetrics",
    "budget_advice",
    "help_texts",
    "what_if_figures",
]

SILENT_SECONDS = 3.0
"""A store that has done nothing for so long, while calls wait for it, does not answer: it is not slow."""

_SMALLEST = 2.0**-14  # 61 us
_BUCKETS = 20  # up to 32 s


class Histogram:
    """Counts of observations (seconds) by power-of-two buckets; ``bounds[i]`` is bucket i's upper edge."""

    bounds = tuple(_SMALLEST * 2**i for i in range(_BUCKETS))
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (_BUCKETS + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation of this many seconds."""
        index = 0 if seconds <= _SMALLEST else min((int(seconds / _SMALLEST - 1e-9)).bit_length(), _BUCKETS)
        self.counts[index] += 1
        self.total += seconds

    def as_data(self) -> dict[str, Any]:
        """Return count, sum (seconds) and the counts by bucket as plain data."""
        return {"count": sum(self.counts), "sum": self.total, "buckets": self.counts.copy()}

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bucket in which this quantile (0 to 1) lies; 0.0 with no observation."""
        wanted = share * sum(self.counts)
        seen = 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return float(self.bounds[min(index, _BUCKETS - 1)])
        return 0.0


class _Metrics:
    """The base of all metrics classes."""

    __slots__: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return the current numbers and histograms by name, as plain data."""
        figures = {name: getattr(self, name) for name in self.__slots__}
        return {name: it.as_data() if isinstance(it, Histogram) else it for name, it in figures.items()}


def _figure(text: str, start: float = 0) -> Any:
    """Return a field that counts from ``start``; ``text``: its help text wherever it is exported."""
    return field(default=start, metadata={"help": text})


@dataclass(slots=True)
class TierMetrics(_Metrics):
    """The counters of one secondary tier, as the manager sees it. Bytes and seconds are of finished transfers."""

    lookups: int = _figure("Chunks for which the tier has answered a lookup.")
    hits: int = _figure("Chunks loaded from the tier, counted at their first read by each request.")
    prefix_hits: int = _figure("Hits in the prefix group, the KV group by which tokens are counted.")
    loaded_chunks: int = _figure("Chunks loaded from the tier, each checked.")
    loaded_bytes: int = _figure("Bytes of the chunks loaded from the tier.")
    load_seconds: float = _figure("Seconds that loading chunks from the tier took.", 0.0)
    loads: int = _figure("Load jobs that have loaded at least one chunk.")
    computing_seconds: float = _figure("Seconds that computing the loaded tokens would have taken.", 0.0)
    """Of their position, when a request used them; not of those used before a step has shown it."""
    saved_seconds: float = _figure(
        "Seconds of computing less those of the loads instead; a slower load subtracts nothing.", 0.0
    )
    failed_loads: int = _figure("Chunks whose load failed: they were absent, damaged, or too late.")
    stored_chunks: int = _figure("Chunks that the tier has stored, or had already.")
    stored_bytes: int = _figure("Bytes written to the tier.")
    store_seconds: float = _figure("Seconds that writing to the tier took.", 0.0)
    failed_stores: int = _figure("Chunks that were sent to the tier and are not in it.")
    dropped_cascades: int = _figure(
        "Chunks not sent to the tier, since its pin budget was used up or it was not available."
    )
    declined_cascades: int = _figure("Chunks not sent, since they are unlikely to be used again ('expected-reuse').")
    missed_cascades: int = _figure("Chunks asked for again that had been declined and were computed.")
    dropped_promotions: int = _figure("Chunks that the tier has but that got no row in the primary.")
    """Because a pin budget, or all rows outside the stores' reserve, were used up. Once a request and chunk."""
    budget_misses: int = _figure("Lookups that skipped the tier, since its pin budget was used up.")
    over_one_tier: int = _figure("Chunks that got no row or were not sent, since 'budgets.one_tier' was used up.")
    over_all_tiers: int = _figure("Chunks that got no row or were not sent, since 'budgets.all_tiers' was used up.")
    over_store_reserve: int = _figure(
        "Chunks that got no row, since all rows but those of 'budgets.store_reserve' were in use."
    )
    wait_expired: int = _figure("Chunks recomputed because the lookup or load wait budget expired.")
    recomputed_cheaper: int = _figure("Chunks recomputed because computing them was faster than loading them.")
    expired_jobs: int = _figure("Jobs of the tier that did not end within the deadline.")
    refused_results: int = _figure("Results that are of no job in flight, or name chunks that are not of their job.")
    raised: int = _figure("Calls in which the tier raised.")
    unread_bytes: int = _figure("Bytes written to the tier and not read since.")
    pinned_rows: int = _figure("Rows that the tier's jobs, reservations and quarantine hold.")
    quarantined_rows: int = _figure("Rows of failed jobs that something may still touch.")
    running_jobs: int = _figure("Jobs of the tier in flight.")
    loading_chunks: int = _figure("Chunks being loaded, or reserved for a load: the tier's queue.")
    out_of_use: int = _figure("1: the tier reported jobs or chunks that it was never given, and is no longer used.")
    too_slow: int = _figure("1: the tier's answers and loads come too late, so the chunks are computed.")
    switched_off: int = _figure("1: an operator has switched the tier off.")
    switched_read_only: int = _figure("1: an operator has switched the tier to read-only.")
    cancelled_loads: int = _figure("Chunks whose load was cancelled, since an operator has switched the tier off.")
    promotion_latency: Histogram = field(
        default_factory=Histogram, metadata={"help": "Seconds from a load job to its result, if it loaded something."}
    )
    cascade_latency: Histogram = field(
        default_factory=Histogram, metadata={"help": "Seconds from a store job to its result, if it stored something."}
    )


@dataclass(slots=True)
class EngineMetrics(_Metrics):
    """The counters of the manager itself. Chunks are counted once a request."""

    steps: int = _figure("Steps of the engine.")
    lookups: int = _figure("Chunks that requests looked up.")
    primary_hits: int = _figure("Chunks that requests read and that no tier had loaded for them.")
    wait_expired: int = _figure("Chunks recomputed because the lookup or load wait budget expired.")
    """Fewer than those of the tiers together: several tiers may be late with one chunk."""
    recomputed_cheaper: int = _figure("Chunks recomputed because computing them was faster than loading them.")
    unusable_prefixes: int = _figure(
        "Requests that found a prefix of full attention past the engine's own, without a checkpoint in what it adds."
    )
    stored_chunks: int = _figure("Chunks stored in the primary by the engine.")
    refused_stores: int = _figure("Chunks for which there was no room in the primary.")
    refused_tenants: int = _figure("Requests that ran without tiers, since their tenant may not use them.")
    declined_stores: int = _figure(
        "Chunks that were not stored, since those that would have left are likelier to be used."
    )
    failed_gpu_stores: int = _figure("Chunks whose copy out of the engine failed.")
    failed_gpu_loads: int = _figure("Chunks whose copy into the engine failed; they were computed.")
    late_loads: int = _figure(
        "Loads whose first chunks were in the engine when the others came too late or not at all, and were computed."
    )
    dropped_dirty: int = _figure("Chunks evicted from the primary before a tier with 'on_eviction' had stored them.")
    event_batches: int = _figure("Batches of KV events that were published.")
    event_chunks: int = _figure("Chunks in the KV events that were published, each time.")
    dropped_event_chunks: int = _figure("Chunks whose KV events were dropped, since too many waited to be published.")
    replayed_event_batches: int = _figure("Batches of KV events that were sent again to subscribers that asked.")
    dropped_records: int = _figure("Requests missing in the recording, since its writer was too slow.")
    dropped_log_lines: int = _figure("Log lines of this process that were dropped because the log was too slow.")
    dropped_spans: int = _figure("Spans that were dropped, since their writer or the receiver was too slow or away.")
    prefetched_chunks: int = _figure("Chunks loaded into the primary ahead of requests, by warm-ups and prefetches.")
    dropped_prefetches: int = _figure("Keys to be prefetched that were dropped, since too many waited.")
    misuse: int = _figure("Calls that did not fit and were ignored, such as a plan completed twice.")
    generation: int = _figure("Times that all chunks of the primary were forgotten at once.")
    engine_seconds: float = _figure("Seconds that kvtiers took of the engine's thread.", 0.0)
    step_latency: Histogram = field(
        default_factory=Histogram, metadata={"help": "Seconds that the end of a step took of the engine's thread."}
    )


@dataclass(slots=True)
class ClientMetrics(_Metrics):
    """The counters of a client. Values are counted once for each place that they have in a call."""

    puts: int = _figure("Calls of put.")
    put_values: int = _figure("Values given to put.")
    put_bytes: int = _figure("Bytes of the values given to put, each value once.")
    stored_values: int = _figure("Values of put that a tier has now.")
    declined_values: int = _figure("Values of put that were not written, since the session of their request has ended.")
    gets: int = _figure("Calls of get_into.")
    get_values: int = _figure("Values that get_into was asked for.")
    found_values: int = _figure("Values that get_into has found.")
    found_bytes: int = _figure("Bytes of the values that get_into has found, each value once.")
    direct_values: int = _figure(
        "Values of put and get_into that passed no bounce row: they lie in the client's region."
    )
    prefetches: int = _figure("Calls of prefetch.")
    prefetched_values: int = _figure("Values of prefetch that were near when it ended.")
    lookups: int = _figure("Calls of exists and exists_prefix.")
    deletes: int = _figure("Calls of delete.")
    deleted_values: int = _figure("Keys that delete has removed from all tiers that take stores.")
    undeleted_values: int = _figure("Names of values that delete may not have removed from all of them.")
    refused_values: int = _figure("Values and keys that did not fit the client, and were not used.")
    expired_calls: int = _figure("Parts of calls that did not end in time.")
    failed_calls: int = _figure("Calls that failed by a mistake of the caller, or of kvtiers; the log says which.")


_ADVICE = {
    "over_one_tier": "raise 'budgets.one_tier' (at most to 'all_tiers')",
    "over_all_tiers": "raise 'budgets.all_tiers' (and lower 'protected', if they exceed 100% together)",
    "over_store_reserve": "lower 'budgets.store_reserve'",
}
BUDGET_FIGURES = tuple(_ADVICE)
"""Those of a tier's figures that name a budget."""
_UNREAD = 0.05  # of the chunks that a tier said it has: a few are evicted by their store, or come too late
_COSTS_HITS = 0.01  # of the chunks asked for: fewer are no reason to change anything


def budget_advice(figures: Mapping[str, Any], asked: float) -> str:
    """Return which budget of the primary's rows costs a tier hits, and what to change, in one line; "": none does.

    ``figures``: of ``TierMetrics``, those that are missing count as 0. ``asked``: chunks that requests have asked for.
    """
    if figures.get("failed_stores", 0) and not figures.get("stored_chunks", 0):
        return ""  # it takes nothing: rows wait for stores that fail, and more of them would
    over = {name: figures.get(name, 0) for name in _ADVICE}
    most = max(over, key=lambda name: over[name])
    if over[most] <= _COSTS_HITS * asked:
        return ""
    return (
        f"'budgets.{most.removeprefix('over_')}' costs hits: {over[most]:,.0f} chunks got no row or were not sent; "
        f"{_ADVICE[most]}, or raise 'primary.capacity'"
    )


def unread_chunks(name: str, figures: Mapping[str, Any]) -> str:
    """Return how many of the chunks that a tier said it has were not loaded, and why, in one line; "": next to none.

    ``figures``: ``loaded_chunks`` and ``failed_loads``, of which ``seal_failures`` were damaged and ``missing`` not
    there. ``name``: the tier's, or "it".
    """
    loaded, failed = figures.get("loaded_chunks", 0), figures.get("failed_loads", 0)
    if not failed or failed < _UNREAD * (loaded + failed):
        return ""
    damaged, missing = figures.get("seal_failures", 0), figures.get("missing", 0)
    reasons = {
        "were damaged": damaged,
        "were not there": missing,
        "failed or came too late": max(0, failed - damaged - missing),
    }
    why = ", ".join(f"{count:,.0f} {reason}" for reason, count in reasons.items() if count)
    read = f"only {loaded:,.0f} could be read" if loaded else "none could be read"
    return f"of {loaded + failed:,.0f} chunks that {name} said it has, {read}: {why}"


CLIENT_TIER_FIGURES = (
    "loaded_chunks", "loaded_bytes", "load_seconds", "loads", "failed_loads", "promotion_latency", "stored_chunks",
    "stored_bytes", "store_seconds", "failed_stores", "cascade_latency", "expired_jobs", "refused_results", "raised",
    "running_jobs", "quarantined_rows", "out_of_use",
)  # fmt: skip
"""Those of a tier's figures that a client counts: it has no requests, rows of a primary, or pin budgets."""


def help_texts(figures: type[TierMetrics | EngineMetrics | ClientMetrics]) -> dict[str, str]:
    """Return the help text of each figure of a class, by its name."""
    return {field.name: field.metadata["help"] for field in fields(figures)}


TIER_HELP: Mapping[str, str] = {
    **help_texts(TierMetrics),
    "already_present": "Values not written, since the store had them already.",
    "breaker_opened": "Times that the breaker opened.",
    "breaker_seconds": "Seconds since the breaker opened, or since the tier is in use again.",
    "breaker_state": "The breaker's state: 0 in use, 1 out of use, 2 being tried.",
    "dropped_full": "Values dropped since the store was full.",
    "dropped_queue": "Values dropped since too many were waiting to be written.",
    "dropped_quota": "Values dropped since their tenant had no room under its quota.",
    "dropped_refused": "Values dropped since a part of the store did not answer, or did not take them.",
    "dropped_shutdown": "Values dropped since the engine ended before their turn.",
    "errors": "Calls of the store that failed.",
    "full": "1: the tier's store did not take values in the last five minutes; the log says what to do.",
    "host_starts": "Times that a host of the tier was started.",
    "hosts": "The tier's hosts (helper processes).",
    "hosts_open": "The tier's hosts in which the store is open.",
    "lookup_questions": "Lookups that the tier has answered, each of chunks of one prefix.",
    "lookup_seconds": "Seconds from lookups to their answers.",
    "missing": "Values that were absent when they were read, though a lookup had found them.",
    "not_taken": "Values that the store has not taken since it is full, or refuses some; 0 while it is neither.",
    "not_taken_seconds": "Seconds since the store last did not take a value, while it is full or refuses some.",
    "open": "1: the tier's store is open.",
    "open_probes": "Questions in flight about what the store has.",
    "queued_loads": "Parts of load jobs that wait for a thread.",
    "queued_stores": "Parts of store jobs that wait for a thread.",
    "quota_deleted": "Values deleted since their tenant had no room under its quota.",
    "refusing": "1: the tier's store refused some values in the last five minutes; the log says why.",
    "retries": "Calls of the store repeated after a transient error.",
    "seal_failures": "Values whose bytes were not those that were stored.",
    "silent_seconds": "Seconds in which the store did nothing of what it was asked for, while calls wait for it.",
    "storing_chunks": "Chunks being stored in the tier.",
    "taken_meanwhile": "Values that the store has taken since it is full, or refuses some; 0 while it is neither.",
    "waiting_calls": "Jobs and questions that wait for the store.",
}
"""The help texts of a tier's figures: the manager's, and what tiers that are made of a store count themselves."""

PRIMARY_HELP: Mapping[str, str] = {
    "rows": "Rows of the primary.",
    "free_rows": "Rows that hold nothing.",
    "pending_rows": "Rows into which something is being copied.",
    "pinned_rows": "Rows that a copy or a tier holds.",
    "protected_rows": "Rows of loaded chunks that are not evicted before their first read, for a while.",
    "quarantined_rows": "Rows of failed jobs that something may still touch.",
    "closed_rows": "Rows that are not used yet, since a rank has not pinned them.",
    "evictable_rows": "Rows whose chunk could be evicted now.",
    "clean_rows": "Rows of chunks that their tiers have stored, so that they can be evicted without loss.",
    "kept_rows": "Rows of chunks that a hint keeps: they are evicted when nothing else can be.",
    "kept_over_share": "Hints to keep a chunk that were dropped, since no more chunks may be kept.",
    "kept_given_up": "Kept chunks that were evicted, or could be, before their time: there was nothing else to evict.",
    "misuse": "Calls of the primary that did not fit and were ignored.",
    "pool": "The pool in the config: 0 none, 1 in use, 2 in use but nothing new is kept, 3 not had: own memory.",
    "retired_rows": "Rows that are never used, since their memory was not available when needed.",
}
"""The help texts of the primary's figures."""

WHAT_IF_HELP: Mapping[str, str] = {
    "hit_rate": "Hit rate that this policy would have with so many times the primary, tiers included (0 to 1).",
    "adds": "Hit rate that would be lost without the tier (0 to 1).",
    "infinite": "Hit rate of a cache without bounds (0 to 1).",
    "sampled": "Share of the chunks that the shadow caches see (0 to 1).",
    "chunks": "Full chunks that requests have asked for since the shadow caches began.",
    "dropped": "Requests that the shadow caches left out, since they were behind.",
    "seconds": "Processor seconds of the shadow caches.",
}
"""The help texts of the shadow caches' figures."""
WHAT_IF_LABELS: Mapping[str, tuple[str, ...]] = {"hit_rate": ("policy", "times"), "adds": ("tier",)}
WHAT_IF_COUNTERS = frozenset({"dropped", "seconds"})


def what_if_figures(report: Mapping[str, Any] | None) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the figures of a report of the shadow caches: name, labels, value; none of an empty one."""
    if not report:
        return
    for policy, rates in report["hit_rates"].items():
        for times, rate in rates.items():
            yield "hit_rate", {"policy": policy, "times": times}, rate
    for tier, rate in report["adds"].items():
        yield "adds", {"tier": tier}, rate
    for name in WHAT_IF_HELP:
        if name not in WHAT_IF_LABELS:
            yield name, {}, report[name]
