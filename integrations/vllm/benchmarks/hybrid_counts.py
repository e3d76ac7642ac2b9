"""What a prompt of many KV groups costs in questions and lookups, counted in the real vLLM on the CPU.

The model has Gemma 3's layers in small: of six one sees the whole prompt and five a window, which makes six KV
groups. An engine stores prompts; another one over the same store is asked for all of them at once. Its questions to the
tier and the lookups that vLLM makes of kvtiers are counted. A busy machine changes them less than seconds: vLLM looks
up again in each scheduling pass until the answers are there.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

LAYERS = ["sliding"] * 5 + ["full"]
WINDOW = 256
MOST_QUESTIONS = 2.0
"""To a tier, a request: for its prefix, and for what is behind it."""
MOST_LOOKUPS_BESIDE = 8.0
"""A request, beside one of each chunk that is loaded."""


def note_lookups() -> int:
    """Count the lookups of this engine's manager from now on; return how many there have been. In its process."""
    from kvtiers_vllm.stack.manager import KvtiersManager

    kind: Any = KvtiersManager
    if not hasattr(kind, "noted"):
        kind.noted, look = 0, kind.lookup

        def noted(manager: Any, *arguments: Any) -> Any:
            kind.noted += 1
            return look(manager, *arguments)

        kind.lookup = noted
    return int(kind.noted)


def count(prompts: int, tokens: int) -> dict[str, float]:
    """Return the counts of an engine that is asked for prompts which another one has stored."""
    from integrations.vllm.tests.real_vllm.engines import Engine, Interpreter
    from integrations.vllm.tests.real_vllm.models import make_prompt, make_window_model
    from integrations.vllm.tests.real_vllm.ways import fs, whole_stack

    asked = [make_prompt(seed, tokens) for seed in range(prompts)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_window_model(folder / "model", seed=0, window=WINDOW, layers=LAYERS)
        config = whole_stack(fs(folder / "store"))
        interpreter = Interpreter(folder / "interpreter.log")
        try:
            first = Engine(interpreter, model, folder / "first.log", config, num_gpu_blocks_override=4096)
            right, _ = first.generate(*asked, tokens=1)
            first.settle()
            first.shutdown()
            second = Engine(interpreter, model, folder / "second.log", config, num_gpu_blocks_override=4096)
            second.do("call", path=__file__, name="note_lookups")
            answers, cached = second.generate(*asked, tokens=1)
            lookups = second.do("call", path=__file__, name="note_lookups")["result"]
            figures = second.metrics()
            second.shutdown()
        finally:
            interpreter.close()
    assert answers == right, "tokens are those that were computed"
    loaded = figures.get("kvtiers_tier_loaded_chunks{fs}", 0)
    return {
        "cached": sum(cached) / (prompts * tokens),
        "questions": figures["kvtiers_tier_lookup_questions{fs}"] / prompts,
        "lookups": lookups / prompts,
        "loaded": loaded / prompts,
    }


def goals(counts: dict[str, float]) -> list[dict[str, Any]]:
    """Return the goals, as ``benchmarks/run.py`` prints them."""
    most = counts["loaded"] + MOST_LOOKUPS_BESIDE
    at_most = [
        ("questions to the tier, a request", counts["questions"], MOST_QUESTIONS),
        ("lookups by vLLM, a request", counts["lookups"], most),
    ]
    found = [{"name": name, "value": value, "goal": goal, "met": value <= goal} for name, value, goal in at_most]
    return [*found, {"name": "share cached", "value": counts["cached"], "goal": 0.9, "met": counts["cached"] >= 0.9}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    counts = count(*((4, 700) if options.quick else (12, 2000)))
    found = {**counts, "goals": goals(counts)}
    if options.json:
        print(json.dumps(found))
        return
    missed = [goal["name"] for goal in found["goals"] if not goal["met"]]
    for goal in found["goals"]:
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {goal['value']:.4g} (goal {goal['goal']:.4g})")
    print(f"missed goals: {'; '.join(missed) or 'none'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    from vllm_engines import run_in_engines_environment  # not in the engines' processes, which load this file, too

    run_in_engines_environment()
    main()
