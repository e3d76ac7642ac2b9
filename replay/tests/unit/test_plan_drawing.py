"""The chart of a plan: well-formed, complete, inside its picture, and it loads nothing."""

import xml.etree.ElementTree as ET

import pytest

from kvtiers_replay.plan import Plan, PlanCase, PlanSizes, PlanTier, PlanTrace, simulate
from kvtiers_replay.plan.page import as_html, as_svg
from kvtiers_replay.workload import ReplayRequest, Workload

from .synthetic import WIDE


def finished(trace: PlanTrace, cases: list[PlanCase], sizes: PlanSizes | None = None, **more) -> Plan:
    points = [simulate(trace, case) for case in cases]
    return Plan("<a & b>", trace, sizes or PlanSizes(trace.unique), points=points, **more)


SVG = "{http://www.w3.org/2000/svg}"


def marks(svg: str) -> dict[str, list[tuple[float, float]]]:
    """What each mark says, and where its dots are: of a line, none."""
    found: dict[str, list[tuple[float, float]]] = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        if group.get("class") == "mark":
            said = group.find(f"{SVG}title").text
            found.setdefault(said, []).extend(
                (float(at.get("x")), float(at.get("y"))) for at in group.iter(f"{SVG}use")
            )
    return found


def text_of(svg: str) -> list[str]:
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.slow
@pytest.mark.parametrize("value_bytes", [None, 4096, 64 << 20])
def test_a_chart_has_a_line_for_each_series_and_a_dot_for_each_point_and_all_are_in_the_picture(trace, value_bytes):
    tiers = [(), (PlanTier("disk", 200),), (PlanTier("disk"),)]
    cases = [PlanCase(rows, tiers=held, budgets=WIDE) for held in tiers for rows in (70, 150, 400, 3000)]
    plan = finished(trace, cases, PlanSizes(trace.unique, value_bytes), wish=0.3)
    svg = as_svg(plan)
    dots = [place for places in marks(svg).values() for place in places]
    # Hits: three lines of four; origins: primary, and twice primary and disk; written: two.
    assert len(dots) == 4 * (3 + 5 + 2)
    lines = {said for said, places in marks(svg).items() if not places}
    assert {"lru, disk none", "lru, disk unlimited: from disk"} <= lines
    width, height = (float(ET.fromstring(svg).get(name)) for name in ("width", "height"))
    assert all(0 < x < width and 0 < y < height for x, y in dots)
    for point in plan.points:
        assert any(said.endswith(f": {100 * point.rate:.1f} %") for said in marks(svg))
    assert "wish 30 %" in text_of(svg)
    assert f"infinite cache {100 * trace.infinite_hits / trace.references:.3g} %" in text_of(svg)
    assert [text for text in text_of(svg) if text in ("Hit rate", "Where the hits came from", "Written to the tiers")]


def test_more_hits_stand_higher_and_larger_sizes_further_right(trace):
    plan = finished(trace, [PlanCase(70), PlanCase(400), PlanCase(3000)])
    places = [at for at in marks(as_svg(plan)).values() if at]
    assert len(places) == 3
    xs, ys = zip(*(place for (place,) in places), strict=True)
    assert sorted(xs) == list(xs)
    assert sorted(ys, reverse=True) == list(ys)
    assert ys[0] > ys[-1]


def test_the_size_with_the_most_values_goes_from_left_to_right(trace):
    cases = [PlanCase(100, tiers=(PlanTier("disk", chunks),), budgets=WIDE) for chunks in (100, 300, 900)]
    svg = as_svg(finished(trace, cases))
    assert "disk: share of the trace's chunks" in text_of(svg)
    assert any(text.startswith("lru, primary ") for text in text_of(svg))


def test_one_point_and_no_hit_at_all_are_charts_too(trace):
    nothing = PlanTrace(Workload("w", 16, [ReplayRequest(17, [b"1"])]))
    for plan in (finished(trace, [PlanCase(100)]), finished(nothing, [PlanCase(1, tiers=(PlanTier("t", 1),))])):
        assert len(marks(as_svg(plan))) >= 2


def test_a_page_has_the_chart_and_the_tables_loads_nothing_and_escapes_names(trace):
    plan = finished(trace, [PlanCase(70), PlanCase(400, tiers=(PlanTier("<disk>", 300),))], wish=0.2)
    plan.smallest = plan.points[1:]
    page = as_html(plan)
    assert page.count("<figure ") == page.count("<svg ") == 3
    assert page.count("<table>") == 2
    assert "&lt;a &amp; b&gt;" in page
    assert "<disk>" not in page
    # Names of namespaces, and of parts of the page itself; nothing else has an address.
    assert page.count("://") == page.count('xmlns="http://www.w3.org/2000/svg"') + page.count("/1999/xlink") == 6
    assert page.count("url(") == page.count("url(#")
    assert page.count("href=") == page.count('href="#')
    assert not [part for part in ("<script", "<link", "<img", "src=", "@import") if part in page]


def test_names_with_dollars_and_quotes_are_names(trace):
    plan = finished(trace, [PlanCase(70, tiers=(PlanTier('$a$ "b" & <c>', 300),))])
    for drawn in (as_svg(plan), as_html(plan)):
        assert "$a$" in drawn
        assert "<c>" not in drawn
    assert any('$a$ "b" & <c>' in said for said in marks(as_svg(plan)))
