"""The commands that this distribution adds to ``kvtiers``."""

from kvtiers.api.command import CommandPlugin

__all__ = ["BENCH", "EVALUATE", "PLAN", "REPLAY", "SIZE"]

BENCH = CommandPlugin(
    name="bench",
    help="Measure tiers on this machine: latency and GB/s, beside its limits, and what suits them.",
    target="kvtiers_replay.cli.bench_command:bench",
    api_version=1,
)
EVALUATE = CommandPlugin(
    name="evaluate",
    help="Find out what tiers would save on a request log, without a GPU, as one page.",
    target="kvtiers_replay.cli.evaluate:evaluate_command",
    api_version=1,
)
PLAN = CommandPlugin(
    name="plan",
    help="Find the sizes and policies that reach a hit rate on a trace, without moving bytes.",
    target="kvtiers_replay.cli.plan:plan",
    api_version=1,
)
REPLAY = CommandPlugin(
    name="replay",
    help="Drive the whole stack from a trace or a workload, and check every byte.",
    target="kvtiers_replay.cli.replay:replay",
    api_version=1,
)
SIZE = CommandPlugin(
    name="size",
    help="Compute a model's KV cache size, and good chunk sizes.",
    target="kvtiers_replay.cli.size:size",
    api_version=1,
)
