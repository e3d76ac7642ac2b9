"""The page of an evaluation: whether it pays, what each size and tier saves, and the config to start with."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvtiers_replay.evaluate import text
from kvtiers_replay.evaluate.evaluation import Evaluation
from kvtiers_replay.evaluate.offers import size_text
from kvtiers_replay.evaluate.starter import start_line, starter_yaml
from kvtiers_replay.plan import PlanPoint
from kvtiers_replay.report.drawing import COLOURS, GREY, Drawing, Marks, draw, level, shares
from kvtiers_replay.report.frame import Figure, render
from kvtiers_replay.report.units import percent

__all__ = ["as_page"]


class _Tile(NamedTuple):
    """One figure at the top of the page, and its label."""

    value: str
    text: str
    bad: bool = False


def as_page(evaluation: Evaluation) -> str:
    """Return an evaluation as one HTML file that loads nothing."""
    wrong = evaluation.trial is not None and evaluation.trial.wrong_bytes
    return render(
        "evaluate.html",
        title=f"Would tiers pay for {evaluation.log.workload.name}?",
        about=text.about(evaluation),
        mood="bad" if wrong else "" if evaluation.pays else "warn",
        verdict=text.verdict(evaluation),
        tiles=_tiles(evaluation),
        figures=[
            Figure("Hit rate by size", "prefix hits, share of full chunks asked for", _by_size(evaluation), wide=True),
            Figure("Where the GPU time for prefill goes", "of all prompts, without any cache", _time(evaluation), True),
        ],
        memory_columns=text.MEMORY_COLUMNS,
        memory=text.memory_rows(evaluation),
        chosen=text.CHOSEN,
        assumed=text.assumed(evaluation),
        tier_columns=text.TIER_COLUMNS,
        tiers=text.tier_rows(evaluation),
        config=starter_yaml(evaluation),
        start=start_line(evaluation),
        suggestions=text.suggestion_rows(evaluation),
        problems=evaluation.log.problem_lines(),
        notes=evaluation.log.notes,
        assumptions=text.assumptions(evaluation),
    )


def _tiles(evaluation: Evaluation) -> list[_Tile]:
    chosen, pricing = evaluation.chosen, evaluation.pricing
    saved = evaluation.total_saved()
    best = evaluation.rate(evaluation.primary) + (chosen.points / 100 if chosen else 0.0)
    tiles = [
        _Tile(percent(evaluation.infinite_rate), "hits of an infinite cache"),
        _Tile(percent(evaluation.gpu.rate), "hits of the GPU's own cache"),
        _Tile(percent(best), "hits with the config below"),
        _Tile(text.gpu_time(saved), f"of GPU time saved, of {text.gpu_time(evaluation.prefill_seconds())}"),
    ]
    if (by_day := pricing.by_day(pricing.money(saved))) is not None:
        currency, cost = evaluation.question.currency, evaluation.hardware(evaluation.primary, chosen)
        tiles.append(_Tile(f"{currency}{by_day:,.2f}", f"saved a day, before {currency}{cost:,.2f} for hardware"))
    return tiles


def _by_size(evaluation: Evaluation) -> Drawing:
    primary = evaluation.primary

    def size(point: PlanPoint) -> int:
        behind = evaluation.bytes_of(point.case.tiers[0].chunks) if point.case.tiers else 0
        return evaluation.bytes_of(point.case.primary) + behind

    def places(points: Sequence[PlanPoint]) -> list[tuple[float, float, str]]:
        return [
            (size(each), evaluation.rate(each), f"{size_text(size(each))}: {percent(evaluation.rate(each))}")
            for each in points
        ]

    def paint(axes: Axes, marks: Marks) -> None:
        axes.set_xscale("log")
        marks.line(axes, places(evaluation.memory), "memory alone", color=COLOURS[0])
        marks.line(axes, places([primary, *evaluation.behind]), "with a tier behind it", color=COLOURS[1])
        level(axes, evaluation.infinite_rate, f"infinite cache {percent(evaluation.infinite_rate)}")
        level(axes, evaluation.gpu.rate, f"the GPU's own cache {percent(evaluation.gpu.rate)}", dotted=True)
        axes.set_ylim(shares(axes.yaxis, max(evaluation.infinite_rate, evaluation.gpu.rate)))
        every = sorted({size(each) for each in evaluation.memory + evaluation.behind})
        # The largest is named in any case; of others, those with room for their names.
        ticks = every[-1:]
        for each in reversed(every[:-1]):
            if ticks[-1] / each > (every[-1] / every[0]) ** 0.075:
                ticks.append(each)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(round(value))))
        low, high = every[0], every[-1]
        axes.set_xlim(
            low / (high / low) ** 0.04 if high > low else low / 2, high * ((high / low) ** 0.04 if high > low else 2)
        )
        axes.set(xlabel="memory and tier together", ylabel="prefix hits")

    return draw("hit rate by size", paint, height=300)


def _time(evaluation: Evaluation) -> Drawing:
    """Draw one bar for all prompts: what the GPU's own cache saves, the memory, the tier, and what is computed."""
    whole = max(1e-9, evaluation.prefill_seconds())
    own = evaluation.pricing.gpu_seconds(sum(evaluation.gpu.hits.values()) * evaluation.trace.tokens_per_chunk)
    chosen = evaluation.chosen
    parts = [("saved by the GPU's own cache", own, COLOURS[2])]
    parts.append(("saved by memory", evaluation.gpu_seconds(evaluation.primary), COLOURS[0]))
    if chosen:
        parts.append((f"saved by {chosen.tier.title}", chosen.gpu_seconds, COLOURS[1]))
    parts.append(("computed", max(0.0, whole - sum(part[1] for part in parts)), GREY))

    def paint(axes: Axes, marks: Marks) -> None:
        axes.grid(visible=False)
        start = 0.0
        for name, value, colour in parts:
            label = f"{name} {percent(value, whole)}"
            bar = (start / whole, value / whole, 0.0, 1.0, f"{label}: {text.gpu_time(value)}")
            marks.bars(axes, [bar], label, color=colour)
            start += value
        axes.set(ylim=(0.0, 1.0), yticks=[], xlabel="share of the GPU time for prefill")
        axes.set_xlim(0.0, 1.0)
        shares(axes.xaxis, 1.0)

    return draw("where the GPU time goes", paint, height=90)
