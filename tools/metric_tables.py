"""Tables of all metrics, from the code that counts them, for docs/metrics.md.

``python tools/metric_tables.py`` prints them, ``--write`` puts them into the page. A tier type's own figures appear
when its plugin is installed. A test compares the page with the code.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvtiers.cli.metrics import OF_THE_PAGE
from kvtiers.metrics import described, name_of_own
from kvtiers.plugins import installed_tiers, load_tier
from kvtiers_vllm.own_tiering.metrics import COUNTERS, GAUGES, tier_definitions
from kvtiers_vllm.plugin_figures import OTHERS
from kvtiers_vllm.stack.figures import definitions

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- begin: python tools/metric_tables.py --write -->\n", "<!-- end -->\n"
PARTS = {
    "": "The engine: `kvtiers_`",
    "primary": "The primary: `kvtiers_primary_`",
    "tier": "A tier: `kvtiers_tier_`",
    "client": "A client: `kvtiers_client_`",
    "what_if": "Shadow caches, with `what_if: true`: `kvtiers_what_if_`",
}
HEAD = "| metric | type | labels | vLLM | meaning |\n|---|---|---|---|---|\n"


class Row(NamedTuple):
    """A metric by its name in queries."""

    part: str
    name: str
    type: str
    labels: tuple[str, ...]
    vllm: str
    help: str


def rows() -> Iterator[Row]:
    """Yield a row for each metric of core's and of vLLM's pages; not those of tiers' own stores."""
    kinds = {name: kind for name, (kind, _, _) in _vllm(definitions).items()}
    own_tiering = set(_vllm(tier_definitions, COUNTERS, GAUGES))
    known = set()
    for each in described():
        known.add(each.name)
        where = ("whole stack", "both")[each.name in own_tiering] if each.name in kinds else "no"
        if kinds.get(each.name) == "counter" and each.type == "gauge":
            where += ", as a counter: `_total`"
        yield Row(each.part, _queried(each.name, each.type), each.type, each.labels, where, each.help)
    for name, (kind, text, labels) in _vllm(tier_definitions, COUNTERS, GAUGES).items():
        if name not in known and name.removeprefix("kvtiers_tier_") not in _own_figures() and name != OTHERS:
            yield Row("tier", _queried(name, kind), kind, tuple(labels), "both; there alone", text)
    yield Row("tier", OTHERS, "gauge", ("tier", "figure"), "both; there alone", "A figure of the tier's own store.")
    for name, text in OF_THE_PAGE.items():
        yield Row("", name, "gauge", (), "no; `kvtiers metrics` alone", text)


def _vllm(make: object, *arguments: object) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    def kind(of: str) -> object:
        return lambda text, labels=(): (of, text, labels)

    return make(kind("counter"), kind("gauge"), *arguments)  # type: ignore[operator,no-any-return]


def _queried(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def _own_figures() -> dict[str, dict[str, str]]:
    """Return the tier types that name a figure of their store, by its name; with what it is."""
    found: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys(entry.name for entry in installed_tiers()):
        for figure, text in load_tier(kind).figures.items():
            found.setdefault(name_of_own(figure), {})[kind] = text
    return found


def tables() -> str:
    """Return all of it in Markdown."""
    found = list(rows())
    text = ""
    for part, title in PARTS.items():
        text += f"### {title}\n\n{HEAD}{''.join(_line(row) for row in found if row.part == part)}\n"
    text += "### Figures of a tier's own store: `kvtiers_tier_`\n\nGauges with the label `tier`, on every page.\n\n"
    return text + "| metric | tier types | meaning |\n|---|---|---|\n" + "".join(_own_lines()) + "\n"


def _line(row: Row) -> str:
    return f"| {_code([row.name])} | {row.type} | {_code(row.labels)} | {row.vllm} | {row.help} |\n"


def _own_lines() -> Iterator[str]:
    for figure, texts in sorted(_own_figures().items()):
        if len(set(texts.values())) == 1:
            meaning = next(iter(texts.values()))
        else:
            meaning = " ".join(f"{kind}: {text}" for kind, text in texts.items())
        yield f"| `kvtiers_tier_{figure}` | {_code(texts)} | {meaning} |\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    """Return the page with tables that are in step with the code."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(tables(), end="")
