"""Drawings: where the legend's names stand."""

import xml.etree.ElementTree as ET

from kvtiers_replay.report.drawing import draw, level

SVG = "{http://www.w3.org/2000/svg}"


def test_a_legend_is_read_row_by_row_in_the_order_of_the_lines_and_levels_come_last():
    lines = [f"{tier} {way}" for tier in ("files", "slab") for way in ("hot", "cold", "write")]

    def paint(axes, marks):
        level(axes, 0.5, "limit")
        for height, name in enumerate(lines):
            marks.line(axes, [(0.0, height, "a"), (1.0, height, "b")], name)

    for columns in (2, 3, 4, 99):
        texts = ET.fromstring(draw("x", paint, legend_columns=columns).svg).iter(f"{SVG}text")
        at = {
            text.text: (float(text.get("y")), float(text.get("x"))) for text in texts if text.text in {*lines, "limit"}
        }
        assert sorted(at, key=at.__getitem__) == [*lines, "limit"]
        rows = {y for y, _ in at.values()}
        assert len(rows) == -(-7 // min(columns, 7))
