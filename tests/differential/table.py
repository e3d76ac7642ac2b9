"""The table of ``docs/what-works-where.md``, from the outcomes that a run has kept; this file writes it again.

A row for each tier kind, a column for each integration; numbers lead to the reasons below, where a scene does not apply
or works with a limit.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "what-works-where.md"
OUTCOMES = HERE / "outcomes.json"
BEGIN, END = "<!-- begin: written by make test-differential -->", "<!-- end -->"
NAMES = {
    "client": "client",
    "replay": "replay",
    "transformers": "transformers",
    "sglang": "SGLang",
    "lmcache": "LMCache, its server",
    "lmcache-in-process": "LMCache, in an engine",
    "vllm": "vLLM, whole stack",
    "vllm-own-tiering": "vLLM, own tiering",
}


def table_of(kept):
    """Return the table in Markdown."""
    integrations = list(kept["outcomes"])
    kinds = list(dict.fromkeys(kind for played in kept["outcomes"].values() for kind in played))
    reasons = {}
    lines = [
        "| tier | " + " | ".join(NAMES[it] for it in integrations) + " |",
        "|---" * (1 + len(integrations)) + "|",
        "| *release* | " + " | ".join(kept["releases"][it] for it in integrations) + " |",
    ]
    for kind in kinds:
        cells = [_cell(kept["outcomes"][it].get(kind, {}), reasons) for it in integrations]
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}." for reason, number in reasons.items())]
    return "\n".join(lines)


def _cell(scenes, reasons):
    """Return how many scenes work, and the numbers of the reasons for what does not."""
    if not scenes:
        return "not run"
    works = sum(outcome.startswith("works") for outcome in scenes.values())
    whys = {_reason(scene, outcome) for scene, outcome in scenes.items() if ":" in outcome}
    if not works and len(set(scenes.values())) == 1:
        whys = {next(iter(scenes.values())).partition(": ")[2]}
    numbers = sorted(reasons.setdefault(why, len(reasons) + 1) for why in sorted(whys))
    how_many = "all" if works == len(scenes) else f"{works} of" if works else "none of"
    return f"{how_many} {len(scenes)}" + (f" ({', '.join(map(str, numbers))})" if numbers else "")


def _reason(scene, outcome):
    what, _, why = outcome.partition(": ")
    return f"*{scene}* works, but {why}" if what == "works" else f"*{scene}* {what}: {why}"


def written(page, kept):
    """Return the page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table_of(kept)}\n\n{END}{after}"


def write_table(kept):
    """Put the table into the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


if __name__ == "__main__":
    write_table(json.loads(OUTCOMES.read_text(encoding="utf-8")))
