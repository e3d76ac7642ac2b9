"""The cost of tracing on the engine's thread: a chunk's life with it off, and with 1 % and all of the requests sampled.

The life is that of ``scheduler_cost.py``, with 1,000 chunks resident; times are processor time of the engine's thread,
medians over the rounds, and the managers take turns. Spans are made by the writer's thread and given to a receiver that
throws them away: with all requests sampled that thread wants the interpreter as often as it can get.
"""

import argparse
from typing import Any

from lib.results import at_most, options_of, say
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from rigs.chunk_life import PHASES, measure
from scheduler_cost import SIZES, VALUE_BYTES, in_process

from kvtiers.tracing.span_writer import SpanWriter
from kvtiers.tracing.spans import SpanQueue

SAMPLES = {"1 % of the requests": 0.01, "all requests": 1.0}
GOALS = {"1 % of the requests": 1.1, "all requests": 1.5}  # as shares of the life with tracing off


class Nowhere(SpanExporter):
    """Takes spans and throws them away."""

    def export(self, spans: Any) -> SpanExportResult:
        """Take them."""
        del spans
        return SpanExportResult.SUCCESS


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each manager."""
    queues = {name: SpanQueue(sample, [VALUE_BYTES]) for name, sample in SAMPLES.items()}
    writers = {name: SpanWriter(queue, Nowhere()) for name, queue in queues.items()}
    lives = {"off": in_process(SIZES[0])[0]}
    lives |= {name: in_process(SIZES[0], tracing=writer)[0] for name, writer in writers.items()}
    found = dict(zip(lives, measure(list(lives.values()), 200 if options.quick else 1500), strict=True))
    for writer in writers.values():
        writer.close(10)
    goals = [
        at_most(
            f"a chunk's life with {name} traced, as a share of one with tracing off",
            found[name]["sum"] / found["off"]["sum"],
            goal,
        )
        for name, goal in GOALS.items()
    ]
    return {"us_per_chunk": found, "dropped": {name: queue.lost for name, queue in queues.items()}, "goals": goals}


def report(results: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(f"{'us a chunk, traced:':26}" + "".join(f"{phase:>9}" for phase in (*PHASES, "sum")))
    for name, figures in results["us_per_chunk"].items():
        print(f"{name:26}" + "".join(f"{figures[phase]:9.2f}" for phase in (*PHASES, "sum")))
    print(f"spans that found no room: {results['dropped']}")


def main() -> None:
    results = run(options := options_of(__doc__, "fewer rounds").parse_args())
    say(results, report, as_json=options.json)


if __name__ == "__main__":
    main()
