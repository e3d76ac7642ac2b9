"""The sentences and tables of an evaluation, as the terminal and the page have them."""

from collections.abc import Sequence

from kvtiers_replay.evaluate.evaluation import Evaluation, span_text
from kvtiers_replay.evaluate.offers import DAY, DISK, GIB_MONTH, MEMORY, Offer, size_text
from kvtiers_replay.plan import PlanPoint, change_line
from kvtiers_replay.report.units import percent, seconds

__all__ = [
    "CHOSEN",
    "MEMORY_COLUMNS",
    "TIER_COLUMNS",
    "about",
    "assumed",
    "assumptions",
    "memory_rows",
    "tier_rows",
    "verdict",
]

CHOSEN = (
    "* what leaves most; the types of tiers are compared behind this memory. The disk is of the size that is worth "
    "most behind the largest memory but one."
)
MEMORY_COLUMNS = (
    "memory", "disk behind it", "hits", "GPU time saved", "of all prefill",
    "saved a day", "hardware a day", "left a day",
)  # fmt: skip
TIER_COLUMNS = (
    "tier", "size", "points of hits", "pays from", "GPU time saved", "saved a day", "costs a day", "pays", "why",
)  # fmt: skip
_NOTHING = 0.001  # of all chunks asked for


def about(evaluation: Evaluation) -> str:
    """Return what was evaluated, in one line."""
    log, trace, pricing = evaluation.log, evaluation.trace, evaluation.pricing
    span = f" in {span_text(pricing.seconds)}" if pricing.seconds else ""
    return (
        f"{len(log.workload.requests):,} requests{span}, {trace.references:,} full chunks of {trace.tokens_per_chunk} "
        f"tokens, {trace.unique:,} of them different, {size_text(evaluation.bytes_of(None))} of KV. "
        f"An infinite cache hits {percent(evaluation.infinite_rate)}."
    )


def verdict(evaluation: Evaluation) -> list[str]:
    """Return what to do, the most important first."""
    lines = [_worth(evaluation)]
    chosen = evaluation.chosen
    if chosen:
        lines.append(f"Behind the memory, {chosen.tier.title} of {size_text(chosen.size)} pays: {chosen.why}.")
    else:
        lines.append("No tier behind the memory pays for this log; the table says why.")
    if line := change_line(evaluation.changes, evaluation.trace, evaluation.question.prefill_speed):
        lines.append(line)
    if trial := evaluation.trial:
        right = "all bytes right" if not trial.wrong_bytes else f"WRONG: {trial.wrong_bytes:,} bytes"
        tier = f" and a real {trial.tier} tier" if trial.tier else ""
        lines.append(
            f"Tried: the first {_counted(trial.requests, 'request')} through the whole stack, with memory for "
            f"{_counted(trial.primary_chunks, 'chunk')}{tier}: {right}, hits {percent(trial.rate)} where the plan for "
            f"that says {percent(trial.planned)}, {seconds(trial.step_p99)} of a step on the engine's thread (p99)."
        )
    return lines


def _worth(evaluation: Evaluation) -> str:
    saved, whole = evaluation.total_saved(), evaluation.prefill_seconds()
    if not evaluation.pays:
        return f"It does not pay: {_nothing_saved(evaluation)}."
    size = _memory_size(evaluation, evaluation.primary)
    with_tier = f" and {evaluation.chosen.tier.title}" if evaluation.chosen else ""
    by_day = evaluation.pricing.by_day(evaluation.pricing.money(saved))
    worth = ""
    if by_day is not None:
        cost = evaluation.hardware(evaluation.primary, evaluation.chosen)
        left = _money(evaluation, by_day - cost)
        worth = f", {_money(evaluation, by_day)} a day before hardware and {left} after it"
    return (
        f"It pays: {size} of memory{with_tier} would save {gpu_time(saved)} of {gpu_time(whole)} of GPU time for "
        f"prefill ({percent(saved, whole)}){worth}, beyond what the GPU's own cache saves."
    )


def _nothing_saved(evaluation: Evaluation) -> str:
    own, infinite = evaluation.gpu.rate, evaluation.infinite_rate
    if infinite < _NOTHING:
        return "nothing comes back in this log"
    if infinite - own < _NOTHING:
        return f"the GPU's own cache hits all of the {percent(infinite)} that an infinite one does"
    return (
        f"the GPU's own cache hits {percent(own)} of the {percent(infinite)} that an infinite one does, and neither "
        "memory nor a tier that could hold the rest is worth its price"
    )


def _money(evaluation: Evaluation, amount: float | None) -> str:
    if amount is None:
        return "-"
    return f"{'-' if amount <= -0.005 else ''}{evaluation.question.currency}{abs(amount):,.2f}"


def gpu_time(value: float) -> str:
    """Return GPU seconds as people say them."""
    return f"{value / 3600:,.1f} h" if value >= 2 * 3600 else f"{value:,.0f} s"


def memory_rows(evaluation: Evaluation) -> list[list[str]]:
    """Return one row for the GPU's own cache, and for each size of memory two: alone, and with a disk behind it."""
    cache = size_text(evaluation.question.gpu_cache * evaluation.pricing.engines)
    rows = [[f"the GPU's own {cache}", "", percent(evaluation.gpu.rate), "", "", "", "", ""]]
    for point in evaluation.memory:
        rows.append(_memory_row(evaluation, point, None))
        if disk := evaluation.disk_of(point):
            rows.append(_memory_row(evaluation, point, disk))
    return rows


def _memory_row(evaluation: Evaluation, point: PlanPoint, disk: Offer | None) -> list[str]:
    saved = evaluation.gpu_seconds(point) + (disk.gpu_seconds if disk else 0.0)
    by_day = evaluation.pricing.by_day(evaluation.pricing.money(saved))
    cost, chosen = evaluation.hardware(point, disk), evaluation.chosen
    is_chosen = point is evaluation.primary and (disk is not None) == (chosen is not None and chosen.tier.link == DISK)
    return [
        _memory_size(evaluation, point) + (" *" if is_chosen else ""),
        size_text(disk.size) if disk else "",
        percent(evaluation.rate(point) + (disk.points / 100 if disk else 0.0)),
        gpu_time(saved),
        percent(saved, evaluation.prefill_seconds()),
        _money(evaluation, by_day),
        _money(evaluation, cost),
        _money(evaluation, None if by_day is None else by_day - cost),
    ]


def _memory_size(evaluation: Evaluation, point: PlanPoint) -> str:
    """Return the size of a primary, and of how many engines it is together."""
    size, engines = evaluation.bytes_of(point.case.primary), evaluation.pricing.engines
    return size_text(size) if engines == 1 else f"{size_text(size)} ({engines} x {size_text(round(size / engines))})"


def tier_rows(evaluation: Evaluation) -> list[list[str]]:
    """Return one row for each type of tier."""
    return [_tier_row(evaluation, offer) for offer in evaluation.offers]


def _tier_row(evaluation: Evaluation, offer: Offer) -> list[str]:
    even = "never" if offer.break_even is None else f"{offer.break_even:,} tokens"
    return [
        offer.tier.title,
        size_text(offer.size),
        f"{offer.points:.1f}",
        even,
        gpu_time(offer.gpu_seconds),
        _money(evaluation, offer.saved),
        _money(evaluation, offer.cost),
        "yes" if offer.pays else "no",
        offer.why,
    ]


def assumed(evaluation: Evaluation) -> list[str]:
    """Return in two lines what matters most of what the figures stand on."""
    question, pricing = evaluation.question, evaluation.pricing
    kept = "" if question.engines else ", as many as the log keeps busy"
    prices = ", ".join(f"{name} {_price(evaluation, name)}" for name in (MEMORY, DISK))
    model = (
        f"Assumed: {question.shape.name}, {size_text(question.shape.bytes_per_token)} of KV a token; "
        f"{_counted(pricing.engines, 'engine')} of {_counted(question.gpus, 'GPU')}{kept}, each with "
        f"{size_text(question.gpu_cache)} of KV on its GPUs and {question.prefill_speed:,.0f} tokens/s of prefill."
    )
    paid = (
        f"Prices: {question.currency}{question.gpu_hour:g} for a GPU's hour; for a GiB and month {prices}, as bought "
        "for three years (--tier-price; 0 for what the machine has anyway)."
    )
    return [model, paid]


def _price(evaluation: Evaluation, kind: str) -> str:
    return f"{evaluation.question.currency}{evaluation.question.prices.get(kind, GIB_MONTH[kind]):.3g}"


def assumptions(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return what the figures stand on, and the option that changes it."""
    question, pricing = evaluation.question, evaluation.pricing
    shape = question.shape
    busy = f" for {pricing.engines} engines" if pricing.engines > 1 else ""
    kept = _counted(pricing.engines, "engine") if question.engines else f"the log keeps {pricing.engines} busy"
    return [
        (f"{shape.name}: {size_text(shape.bytes_per_token)} of KV a token, in {shape.kv_dtype}", "--model, --kv-dtype"),
        (f"{question.prefill_speed:,.0f} tokens/s of prefill an engine: {kept}",
         "--prefill-speed, --engines"),
        (f"{_counted(question.gpus, 'GPU')} an engine, {question.currency}{question.gpu_hour:g} an hour each",
         "--tp, --gpu-price"),
        (f"{size_text(question.gpu_cache)} of KV on an engine's GPUs (vLLM prints its size at the start)",
         "--gpu-cache"),
        (f"at most {size_text(question.most_memory)} of memory an engine, {_price(evaluation, MEMORY)} a GiB and month",
         "--most-memory, --memory, --tier-price"),
        *((_link_text(evaluation, offer), "--gbps, --rtt, --tier-price") for offer in evaluation.offers),
        (f"sizes are of all engines together{busy}: requests with one prefix go to one engine, or share the tier", ""),
        ("a tier is an LRU that answers in time; a hit of it counts where loading it beats computing it", ""),
        (_span_text(evaluation), "--hours"),
    ]  # fmt: skip


def _link_text(evaluation: Evaluation, offer: Offer) -> str:
    question, tier = evaluation.question, offer.tier
    link = evaluation.pricing.links[tier.link]
    calls = f", {question.currency}{tier.put * 1000:g} for 1,000 writes" if tier.put else ""
    return (
        f"{tier.title} ({tier.link}): {link.bytes_per_second / 1e9:g} GB/s, {seconds(link.round_trip)} a round trip, "
        f"{_price(evaluation, tier.link)} a GiB and month{calls}"
    )


def _span_text(evaluation: Evaluation) -> str:
    length = evaluation.pricing.seconds
    if length is None:
        return "the log has no times, so that nothing is said by the day"
    if length >= DAY:
        return f"the log is {span_text(length)} long; a day is like that"
    return (
        f"the log is {span_text(length)} long, and every hour is taken to be like it; with more of it, more comes "
        "back and more room is needed"
    )


def suggestion_rows(evaluation: Evaluation) -> Sequence[tuple[str, str]]:
    """Return the good ``blocks_per_chunk`` of each type of tier, as ``kvtiers size`` finds them."""
    return [
        (
            each.link.name,
            f"{each.layout.blocks_per_chunk} (blocks of {evaluation.question.tokens_per_block} tokens)",
        )
        for each in evaluation.suggestions
    ]


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
