"""The config to start with: the YAML that an evaluation leads to, and the line that starts vLLM with it."""

from kvtiers_replay.evaluate.evaluation import Evaluation
from kvtiers_replay.evaluate.offers import config_size, size_text

__all__ = ["start_line", "starter_yaml"]

_GIB = 1 << 30


def starter_yaml(evaluation: Evaluation) -> str:
    """Return a config with the chosen primary and tier; sizes are of one engine."""
    engines, chosen = evaluation.pricing.engines, evaluation.chosen
    least = evaluation.sizes.value_bytes or 1
    own = max(least, -(-evaluation.bytes_of(evaluation.primary.case.primary) // engines))
    whole = f"one of {engines} engines" if engines > 1 else "the engine"
    lines = [
        f"# tiers.yaml: from kvtiers evaluate, of {evaluation.log.workload.name}",
        "version: 1",
        "namespace: prod",
        f"primary: {{capacity: {config_size(own)}}}   # memory of the machine of {whole}",
    ]
    if chosen is None:
        return "\n".join([*lines, "secondary: []   # no tier behind it pays for this log"]) + "\n"
    share = max(least, -(-chosen.size // engines)) if chosen.tier.link == "disk" else chosen.size
    tier = chosen.tier.yaml.format(size=config_size(share))
    room = f", {size_text(chosen.size)} of room"
    if chosen.tier.link == "disk":
        all_of_it = config_size(share * engines)
        room = f"; of {whole}: give engines that share the folder {all_of_it} together" if engines > 1 else ""
    return (
        "\n".join(
            [*lines, "secondary:", f"  - {{{tier}}}   # pip install --find-links wheels {chosen.tier.install}{room}"]
        )
        + "\n"
    )


def start_line(evaluation: Evaluation) -> str:
    """Return the commands that use the config in vLLM."""
    plugin = f" {evaluation.chosen.tier.install}" if evaluation.chosen else ""
    return (
        f'pip install --find-links wheels "kvtiers[vllm]"{plugin}   # until 0.1 is released: `make wheels` in a clone\n'
        "kvtiers check tiers.yaml\nKVTIERS_CONFIG=tiers.yaml vllm serve MODEL"
    )
