"""The chart of a plan: well-formed, complete, inside its picture, and it loads nothing."""

import xml.etree.ElementTree as ET

import pytest

from kvtiers_replay.plan import Plan, PlanCase, PlanSizes, PlanTier, PlanTrace, as_bars, as_html, as_svg, simulate
from kvtiers_replay.workload import ReplayRequest, Workload

from .made_up import WIDE


def finished(trace: PlanTrace, cases: list[PlanCase], sizes: PlanSizes | None = None, **more) -> Plan:
    points = [simulate(trace, case) for case in cases]
    return Plan("<a & b>", trace, sizes or PlanSizes(trace.unique), points=points, **more)


def shapes(svg: str, name: str) -> list[ET.Element]:
    return list(ET.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def text_of(svg: str) -> list[str]:
    return [element.text for element in shapes(svg, "text")]


@pytest.mark.parametrize("value_bytes", [None, 4096, 64 << 20])
def test_a_chart_has_a_line_for_each_series_in_each_panel_and_all_of_it_is_in_the_picture(trace, value_bytes):
    tiers = [(), (PlanTier("disk", 200),), (PlanTier("disk"),)]
    cases = [PlanCase(rows, tiers=held, budgets=WIDE) for held in tiers for rows in (70, 150, 400, 3000)]
    svg = as_svg(finished(trace, cases, PlanSizes(trace.unique, value_bytes), wish=0.3))
    lines = shapes(svg, "polyline")
    # Hits: three lines; origins: primary, and twice primary and disk; written: two.
    assert len(lines) == 3 + 5 + 2
    width, height = (float(ET.fromstring(svg).get(name)) for name in ("width", "height"))
    for line in lines:
        places = [tuple(map(float, place.split(","))) for place in line.get("points").split()]
        assert len(places) == 4
        assert sorted(places) == places
        assert all(0 < x < width and 0 < y < height for x, y in places)
    assert len(shapes(svg, "circle")) == 4 * len(lines)
    assert any(text.startswith("wish 30 %") for text in text_of(svg))
    assert f"infinite cache {100 * trace.infinite_hits / trace.references:.3g} %" in text_of(svg)


def test_more_hits_stand_higher(trace):
    plan = finished(trace, [PlanCase(70), PlanCase(400), PlanCase(3000)])
    (line,) = shapes(as_svg(plan), "polyline")
    heights = [float(place.split(",")[1]) for place in line.get("points").split()]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[-1]


def test_the_size_with_the_most_values_goes_from_left_to_right(trace):
    cases = [PlanCase(100, tiers=(PlanTier("disk", chunks),), budgets=WIDE) for chunks in (100, 300, 900)]
    svg = as_svg(finished(trace, cases))
    assert "disk: share of the trace's chunks" in text_of(svg)
    assert any(text.startswith("lru, primary ") for text in text_of(svg))


def test_one_point_and_no_hit_at_all_are_charts_too(trace):
    nothing = PlanTrace(Workload("w", 16, [ReplayRequest(17, [b"1"])]))
    for plan in (finished(trace, [PlanCase(100)]), finished(nothing, [PlanCase(1, tiers=(PlanTier("t", 1),))])):
        assert len(shapes(as_svg(plan), "polyline")) >= 1


def test_a_page_has_the_chart_and_the_tables_loads_nothing_and_escapes_names(trace):
    plan = finished(trace, [PlanCase(70), PlanCase(400, tiers=(PlanTier("<disk>", 300),))], wish=0.2)
    plan.smallest = plan.points[1:]
    page = as_html(plan)
    assert page.count("<figure") == page.count("<svg") == 3
    assert page.count("<table>") == 2
    assert "&lt;a &amp; b&gt;" in page
    assert "<disk>" not in page
    assert page.count("http:") == page.count("http://www.w3.org/2000/svg") == 3
    assert not {"<script", "<link", "<img", "src=", "@import", "url("} & {part for part in PARTS if part in page}


def test_in_a_terminal_each_case_has_a_bar_as_long_as_its_hit_rate(trace):
    cases = [PlanCase(rows, tiers=held, budgets=WIDE) for held in ((), (PlanTier("disk"),)) for rows in (70, 400, 3000)]
    plan = finished(trace, cases)
    heading, *lines = as_bars(plan)
    assert heading.startswith("Hit rate by primary: █ from primary, ▒ from disk; | infinite cache, ")
    bars = [line for line in lines if "|" in line]
    assert len(bars) == 6
    drawn = [(line.count("█"), line.count("▒")) for line in bars]
    ordered = sorted(plan.points, key=lambda point: len(point.case.tiers))
    for point, (first, second) in zip(ordered, drawn, strict=True):
        assert abs(first + second - 48 * point.rate / plan.infinite_rate) <= 1
        assert abs(first - 48 * point.hits["primary"] / point.references / plan.infinite_rate) <= 1
    assert drawn[2] == (48, 0)  # it holds everything, so it hits what an infinite cache hits
    assert len({line.index("|") for line in bars}) == 1
    assert "\n".join(as_bars(plan, "ascii")).isascii()


def test_no_point_and_far_too_many_are_not_drawn_in_a_terminal(trace):
    plan = finished(trace, [PlanCase(70)])
    plan.points *= 101
    assert as_bars(plan) == []
    plan.points.clear()
    assert as_bars(plan) == []


PARTS = ["<script", "<link", "<img", "src=", "@import", "url("]
