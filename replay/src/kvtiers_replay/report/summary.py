"""The summary of what the engines of a replay have measured."""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtiers.api.units import format_size
from kvtiers.config import OffloadConfig
from kvtiers.metrics import BUDGET_FIGURES, budget_advice, unread_chunks
from kvtiers_replay.engine.measures import Curve, Measures
from kvtiers_replay.options import ReplayOptions, replay_layout
from kvtiers_replay.results import Latencies, Link, OverTime, ReplayResults, TimeToFirstToken, config_as_data
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["chunks_in_flight", "summarize"]

_INTERVALS = 60
_DROPPED = {
    "dropped_full": "chunks not stored, since the store is full",
    "dropped_quota": "chunks not stored, since their tenant had no room under its quota",
    "dropped_refused": "chunks not stored, since a part of the store did not answer, or took no writes",
    "dropped_queue": "chunks not stored, since its queue was full",
    "dropped_shutdown": "chunks not stored, since the replay ended before their turn",
}  # of a tier's own figures
_TIER_ERRORS = {
    "failed_loads": "chunks not loaded, since they were not there, damaged or late",
    "dropped_promotions": "chunks that got no row (raise primary.capacity, or see budgets)",
    "expired_jobs": "jobs that took too long",
    "refused_results": "results that fit no job",
    "raised": "calls that raised",
}
_FEW_MISSING = 8  # chunks: so many may be evicted by their store between a lookup and its load
_FEW = 0.01  # of all chunks asked for: fewer without a row are no reason to change anything
_MIB = 1 << 20


def summarize(
    workload: Workload, config: OffloadConfig, options: ReplayOptions, measures: Sequence[Measures]
) -> ReplayResults:
    """Return the results of all engines together."""

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in measures)

    results = ReplayResults(
        workload.name,
        len(workload.requests),
        requests=total("requests"),
        seconds=max(each.seconds for each in measures),
        interrupted=any(each.interrupted for each in measures),
        references=total("references"),
        prefix_hits=total("gpu_hits") + total("loaded"),
        infinite_hits=total("infinite_hits"),
        hits=_sums(each.hits for each in measures),
        tokens=total("tokens"),
        tokens_saved=total("tokens_saved"),
        preemptions=total("preemptions"),
        wrong_bytes=total("wrong_bytes"),
        tenants=_tenants(measures),
        links=_links(measures),
        over_time=_over_time([each.curve for each in measures]),
        latencies=_latencies(measures),
        stalls=Latencies.of_samples(chain.from_iterable(each.stalls for each in measures)),
        first_token=_first_token(measures, options.prefill_speed),
        errors=_errors(measures),
        dropped_cascades=_sums(_of_tiers(each.stats, "dropped_cascades") for each in measures),
        last_troubles={name: text for each in measures for name, text in each.last_troubles.items()},
        own_figures=_own_figures(measures),
        warm=_is_warm(measures),
        settings=_settings(options),
        config=config_as_data(config),
    )
    results.verdict = _verdict(results)
    for tier, engines in _by_tier(measures).items():
        trouble = results.last_troubles.get(tier, "")
        results.verdict += filter(None, (_did_not_come(tier, engines, trouble), _did_not_go(tier, engines, trouble)))
        if _is_unreadable(engines):
            results.unreadable_tiers.append(tier)
    if advice := _primary_advice(workload, config, options, measures):
        results.verdict.append(advice)  # its budgets are shares of a primary that is too small
    else:
        results.verdict += _budget_advice(measures)
    return results


def _tenants(measures: Sequence[Measures]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for each in measures:
        for tenant, counts in each.by_tenant.items():
            found.setdefault(tenant, Counter()).update(counts)
    return {tenant: dict(found[tenant]) for tenant in sorted(found)}


def _budget_advice(measures: Sequence[Measures]) -> list[str]:
    """Return one line for each tier that a budget of the primary's rows costs hits."""
    asked = sum(each.stats["engine"]["lookups"] for each in measures)
    lines = []
    for tier, engines in _by_tier(measures).items():
        if _is_unreadable(engines):
            continue  # with more rows it would bring nothing either
        figures = _total(engines, *BUDGET_FIGURES, "stored_chunks", "failed_stores")
        if advice := budget_advice(figures, asked):
            lines.append(f"{tier}: {advice}.")
    return lines


def _by_tier(measures: Sequence[Measures]) -> dict[str, list[Mapping[str, Any]]]:
    """Return each tier's figures in the engines that have it: one may have been attached to some of them only."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for each in measures:
        for tier, figures in each.stats["tiers"].items():
            found.setdefault(tier, []).append(figures)
    return found


def _sums(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            sums[name] = sums.get(name, 0) + count
    return sums


def _of_tiers(stats: Mapping[str, Any], name: str) -> dict[str, int]:
    return {tier: figures[name] for tier, figures in stats["tiers"].items()}


def _is_warm(measures: Sequence[Measures]) -> bool:
    """Return whether there were hits of what this replay had not stored.

    Of one engine this is exact; of several, each may hit what the others have stored, and the sum must show it.
    """
    hits = sum(each.gpu_hits + each.loaded for each in measures)
    foreign = measures[0].foreign_hits if len(measures) == 1 else 0
    return foreign > 0 or hits > sum(each.infinite_hits for each in measures)


def _own_figures(measures: Sequence[Measures]) -> dict[str, list[dict[str, float]]]:
    """Return, by tier, what it counts itself in each engine: some are sums, some are of the moment, nothing adds up."""
    return {
        tier: [
            {name: value for name, value in figures["own"].items() if isinstance(value, int | float)}
            for figures in engines
        ]
        for tier, engines in _by_tier(measures).items()
    }


def _links(measures: Sequence[Measures]) -> dict[str, Link]:
    links: dict[str, Link] = {}
    for each in measures:
        found = dict(each.links)
        for name, tier in each.stats["tiers"].items():
            found[f"primary -> {name}"] = Link(int(tier["stored_bytes"]), tier["store_seconds"])
            found[f"{name} -> primary"] = Link(int(tier["loaded_bytes"]), tier["load_seconds"])
        for name, link in found.items():
            links[name] = links.get(name, Link()).plus(*link)
    return links


def _latencies(measures: Sequence[Measures]) -> dict[str, Latencies]:
    found = {
        "lookup": Latencies.of_samples(chain.from_iterable(each.asked for each in measures)),
        "load to the gpu": Latencies.of_samples(chain.from_iterable(each.waited for each in measures)),
    }
    for text, name in (("promotion from", "promotion_latency"), ("cascade to", "cascade_latency")):
        for tier, engines in _by_tier(measures).items():
            histograms = [figures[name] for figures in engines]
            buckets = [sum(column) for column in zip(*(each["buckets"] for each in histograms), strict=True)]
            seconds = sum(each["sum"] for each in histograms)
            found[f"{text} {tier}"] = Latencies.of_histogram({"buckets": buckets, "sum": seconds})
    return found


def _first_token(measures: Sequence[Measures], speed: float) -> TimeToFirstToken:
    """Estimate: without tiers the whole prompt is computed; with them the rest, after the waits that were measured."""
    prompts = chain.from_iterable(each.prompts for each in measures)
    computed = (zip(each.computed, each.delays, strict=True) for each in measures)
    return TimeToFirstToken(
        speed,
        with_tiers=Latencies.of_samples(delay + rest / speed for rest, delay in chain.from_iterable(computed)),
        without=Latencies.of_samples(tokens / speed for tokens in prompts),
    )


def _errors(measures: Sequence[Measures]) -> dict[str, int]:
    """Return what went wrong, by a text that names it; what never happened is left out."""
    found: dict[str, int] = {}
    for each in measures:
        counts = {"gpu: loads that failed": each.failed_loads, "gpu: stores that failed": each.failed_stores}
        for tier, figures in each.stats["tiers"].items():
            counts |= {f"{tier}: {text}": figures[name] for name, text in _TIER_ERRORS.items()}
            own = figures["own"]
            dropped = {text: int(own.get(name, 0)) for name, text in _DROPPED.items()}
            counts |= {f"{tier}: {text}": count for text, count in dropped.items()}
            others = max(0, figures["failed_stores"] - sum(dropped.values()))
            counts[f"{tier}: chunks not stored, since a call failed or was too late"] = others
            counts[f"{tier}: chunks not sent down, since {_why_not_sent(own)}"] = figures["dropped_cascades"]
            counts[f"{tier}: breaker opened"] = int(own.get("breaker_opened", 0))
        engine = each.stats["engine"]
        refused = "chunks without room in the primary (raise primary.capacity, or have fewer requests in flight)"
        counts[f"engine: {refused}"] = engine["refused_stores"]
        counts["engine: calls that did not fit"] = engine["misuse"]
        found = _sums([found, counts])
    return {name: count for name, count in found.items() if count}


def _why_not_sent(own: Mapping[str, Any]) -> str:
    budget = "its pin budget was used up (budgets.one_tier, or a larger primary)"
    return f"it was out of use, or {budget}" if own.get("breaker_opened") or own.get("breaker_state") else budget


# -- over time


def _over_time(curves: Sequence[Curve]) -> OverTime:
    """Return how all engines together went, in intervals of equal length; between two points by interpolation."""
    end = max(curve.seconds[-1] for curve in curves)
    ends = np.linspace(0.0, end, min(_INTERVALS, max(len(curve.seconds) for curve in curves)) + 1)[1:]
    asked = _growth(ends, curves, "references")
    origins = [name for name in dict.fromkeys(chain.from_iterable(c.counts for c in curves)) if name != "references"]
    rates = {name: _growth(ends, curves, name) for name in origins}
    # All hits of an interval are known exactly; which of them came from where is apportioned again at each point.
    hits = sum(np.diff(_counted(ends, curves, name), prepend=0.0) for name in origins)
    seen = sum(rates.values())
    scale = np.divide(hits, seen, out=np.zeros(len(ends)), where=seen > 0)
    rates = {name: grown * scale for name, grown in rates.items()}
    return OverTime(
        seconds=ends.tolist(),
        hit_rates={
            name: [part / whole if whole > 0 else None for part, whole in zip(grown.tolist(), asked, strict=True)]
            for name, grown in rates.items()
        },
        queue_depths={
            name: sum(
                np.interp(ends, curve.seconds, curve.depths[name]) for curve in curves if name in curve.depths
            ).tolist()  # type: ignore[union-attr]
            for name in dict.fromkeys(chain.from_iterable(curve.depths for curve in curves))
        },
    )


def _growth(ends: npt.NDArray[np.float64], curves: Sequence[Curve], name: str) -> npt.NDArray[np.float64]:
    # Shares of what was loaded move a little: what looks like less than nothing is nothing.
    return np.maximum(np.diff(_counted(ends, curves, name), prepend=0.0), 0.0)


def _counted(ends: npt.NDArray[np.float64], curves: Sequence[Curve], name: str) -> npt.NDArray[np.float64]:
    values = np.zeros(len(ends))
    for curve in curves:
        if name not in curve.counts:
            continue
        values += np.interp(ends, [0.0, *curve.seconds], [0.0, *curve.counts[name]])
    return values


# -- texts


def _settings(options: ReplayOptions) -> dict[str, str]:
    arrivals = "back to back" if options.speed is None else f"{options.speed:g} times as fast as recorded"
    return {
        "engines": f"{options.engines}",
        "workers": f"{options.workers} processes an engine" if options.workers else "in the engine's process",
        "requests in flight": f"{options.concurrency} an engine, {arrivals}",
        "prefill": f"at most {options.step_tokens:,} tokens a step",
        "chunks": f"{format_size(options.bytes_per_chunk)}, {options.blocks_per_chunk} blocks each",
        "model": options.model or "none, bytes of a chunk as given",
        "gpu blocks": f"{options.gpu_blocks:,} an engine" if options.gpu_blocks else "no prefix cache of its own",
        "store": options.store,
    }


def _verdict(results: ReplayResults) -> list[str]:
    if results.wrong_bytes:
        return [f"WRONG: {results.wrong_bytes:,} bytes that came back are not those that were stored."]
    stopped = f"Stopped after {results.requests:,} of {results.requests_in_all:,} requests. "
    right = "Every chunk that came back was compared byte by byte: all bytes are right."
    return [(stopped if results.interrupted else "") + right]


def _own(engines: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(figures["own"].get(name, 0)) for figures in engines)


def _is_unreadable(engines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether none of the chunks that a tier said it has could be read, through a fault of its store."""
    if not any(figures["failed_loads"] for figures in engines) or any(figures["loaded_chunks"] for figures in engines):
        return False
    faults = _own(engines, "seal_failures") + _own(engines, "errors")
    return faults > 0 or _own(engines, "missing") >= _FEW_MISSING


def _did_not_come(tier: str, engines: Sequence[Mapping[str, Any]], trouble: str) -> str:
    """Return one line if a tier did not bring what it said it has, with the reasons; else ""."""
    figures = _total(engines, "loaded_chunks", "failed_loads")
    line = unread_chunks(tier, figures | {name: _own(engines, name) for name in ("seal_failures", "missing")})
    said = f" Its last warning: {trouble}" if trouble else ""
    return f"{line[0].upper()}{line[1:]}.{said}" if line else ""


def _did_not_go(tier: str, engines: Sequence[Mapping[str, Any]], trouble: str) -> str:
    """Return one line if a tier took nothing of what was to be stored, as it failed or was out of use; else ""."""
    stored, failed, not_sent = _total(engines, "stored_chunks", "failed_stores", "dropped_cascades").values()
    was_out = _own(engines, "breaker_opened") or _own(engines, "breaker_state")
    if stored or not (failed or (not_sent and was_out)):
        return ""
    said = f" Its last warning: {trouble}" if trouble else ""
    return f"Of {failed + not_sent:,} chunks that {tier} was to store, none was.{said}"


def _total(engines: Sequence[Mapping[str, Any]], *names: str) -> dict[str, int]:
    return {name: sum(each[name] for each in engines) for name in names}


def _primary_advice(
    workload: Workload, config: OffloadConfig, options: ReplayOptions, measures: Sequence[Measures]
) -> str:
    """Return one line if the primary was too small for this many requests at a time; else "".

    Each request in flight needs rows for what it loads and for what it stores, until it ends. Where all of them
    together need more rows than there are, each evicts what the next is about to read, and the hits are gone that fewer
    requests at a time would have had.
    """
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
