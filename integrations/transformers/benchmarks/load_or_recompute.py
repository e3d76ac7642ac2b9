"""The first token of a prompt, recomputed by the model and loaded from each tier, by the prompt's length.

A model of Llama's shape on random weights: small in float32 on the CPU, of 8 billion parameters in bfloat16 with
`--device cuda`. For each length and tier, in turns with new prompts: `recompute` is generate() alone; `cold` the same
through a cache that finds nothing, and hands the prompt's values over; `stored` is until the tier has them all; `load`
is the prompt again, up to its first token, of which all but the last chunk is loaded. Medians.
"""

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtiers_transformers import PrefixCache

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from lib.results import at_least, at_most, options_of, say

CHUNK = 256
LENGTHS = [512, 1024, 2048, 4096, 8192, 16_384]
TIERS = ("memory", "fs")
GOAL_LENGTH = 2048  # from here on loading has to pay
GOALS = {"cpu": 3.0, "cuda": 1.5}  # recompute over load
GOAL_COLD = 1.2  # what a prompt that is not there may take, of the model alone
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "vocab_size": 4096},
    "cuda": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128_256},
}


def make_model(device: str) -> Any:
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device):
        config = LlamaConfig(
            **SHAPES[device], max_position_embeddings=max(LENGTHS) + 8, bos_token_id=None, eos_token_id=None
        )
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def config_of(tier: str, folder: str) -> dict[str, Any]:
    options: dict[str, Any] = {"type": tier, "capacity": "32GiB", "store_queue": 1 << 16}
    if tier == "fs":
        options |= {"path": folder, "min_free": 0}
    return {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [options]}


def seconds_of(work: Callable[[], Any], device: str) -> float:
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(model: Any, tier: str, lengths: list[int], rounds: int, device: str, top: str) -> list[dict[str, Any]]:
    """Return the medians for prompts of each length in this tier."""
    config = config_of(tier, f"{top}/{tier}")
    with PrefixCache(config, model, chunk_tokens=CHUNK, load_wait=60.0, pending_bytes=16 << 30) as cache:
        return [measure_one(model, cache, length, rounds, device) | {"tier": tier} for length in lengths]


def measure_one(model: Any, cache: PrefixCache, length: int, rounds: int, device: str) -> dict[str, Any]:
    """Return the medians for prompts of this length."""
    found: dict[str, list[float]] = {"recompute": [], "cold": [], "stored": [], "load": []}
    loaded = (length - 1) // CHUNK * CHUNK
    for turn in range(rounds + 1):
        ids = torch.randint(model.config.vocab_size, (1, length), device=device)
        before = cache.stats()

        def first_token(by: Any, ids: torch.Tensor = ids) -> None:
            by.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)

        taken = {"recompute": seconds_of(lambda: first_token(model), device)}
        taken["cold"] = seconds_of(lambda: first_token(cache), device)
        taken["stored"] = taken["cold"] + seconds_of(lambda: cache.flush(600.0), device)
        taken["load"] = seconds_of(lambda: first_token(cache), device)
        after = cache.stats()
        assert after["loaded_tokens"] - before["loaded_tokens"] == loaded, (length, before, after)
        nbytes = after["client"]["found_bytes"] - before["client"]["found_bytes"]
        if turn:  # the first one warms up
            for name, seconds in taken.items():
                found[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    return {"tokens": length, "nbytes": nbytes, "seconds": medians}


def goals_of(sizes: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    goals = []
    for tier in TIERS:
        own = [one["seconds"] for one in sizes if one["tier"] == tier and one["tokens"] >= GOAL_LENGTH]
        if own:
            least = min(one["recompute"] / one["load"] for one in own)
            cold = max(one["cold"] / one["recompute"] for one in own)
            name = f"{tier}: first token, recomputed over loaded, from {GOAL_LENGTH} tokens on"
            goals.append(at_least(name, least, GOALS[device]))
            name = f"{tier}: first token of a new prompt over the model's alone"
            goals.append(at_most(name, cold, GOAL_COLD))
    return goals


def report(found: dict[str, Any]) -> None:
    print(f"{found['device']}\ntier    tokens  recompute      cold    stored      load   faster   GB/s loaded")
    for one in found["sizes"]:
        at = one["seconds"]
        print(
            f"{one['tier']:7}{one['tokens']:7}{at['recompute']:10.3f} {at['cold']:9.3f} {at['stored']:9.3f}"
            f" {at['load']:9.3f} {at['recompute'] / at['load']:7.1f}x {one['nbytes'] / at['load'] / 1e9:9.2f}"
        )


def main() -> None:
    parser = options_of(__doc__, "short prompts and few rounds")
    parser.add_argument("--device", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--path", type=Path, help="a folder on the disk for fs (the one for temporary files)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here")
    logging.getLogger("kvtiers").setLevel(logging.ERROR)
    model = make_model(options.device)
    lengths, rounds = (LENGTHS[:3], 1) if options.quick else (LENGTHS, 3)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="kvtiers-bench-") as top:
        sizes = [one for tier in TIERS for one in measure(model, tier, lengths, rounds, options.device, top)]
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = {"device": device, "sizes": sizes, "goals": goals_of(sizes, options.device)}
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
