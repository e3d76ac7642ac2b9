"""The first token of a prompt, recomputed by the model and loaded from each tier, by the prompt's length.

Tiers: ``memory``; ``fs``, a directory; ``redis`` and ``s3``, each with a real server of its own on this machine, which
is started here as the tests of these plugins start theirs (S3: Ceph's gateway, over an object store in memory). They
need the plugins: ``pip install --editable plugins/redis_tier --editable libraries/objectstore --editable
plugins/s3_tier``.

A model of Llama's shape on random weights: small in float32 on the CPU, of 8 billion parameters in bfloat16 with
`--device cuda`. For each length and tier, in turns with new prompts: `recompute` is generate() alone; `cold` the same
through a cache that finds nothing, and hands the prompt's values over; `stored` is until the tier has them all; `load`
is the prompt again, up to its first token, of which all but the last chunk is loaded. Each ends when the token is on
the host. Medians.
"""

import contextlib
import importlib.util
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtiers_transformers import PrefixCache

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from lib.results import at_least, at_most, options_of, say

from kvtiers.region.limits import usable_processors

ROOT = Path(__file__).resolve().parents[3]

CHUNK = 256
LENGTHS = [512, 1024, 2048, 4096, 8192, 16_384]
TIERS = ("memory", "fs", "redis", "s3")
PLUGINS = {"memory": "kvtiers_example", "fs": "kvtiers_fs", "redis": "kvtiers_redis", "s3": "kvtiers_s3"}
PROGRAMS = {"redis": ["redis-server"], "s3": ["ceph-mon", "ceph-osd", "radosgw"]}
REDIS_THREADS_FROM = 8  # processors, as the plugin's README says
GOAL_LENGTH = 2048  # from here on loading has to pay
GOALS = {"cpu": 3.0, "cuda": 1.5}  # recompute over load
GOAL_COLD = 1.2  # what a prompt that is not there may take, of the model alone
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "vocab_size": 4096},
    "cuda": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128_256},
}


def make_model(device: str, longest: int) -> Any:
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device):
        config = LlamaConfig(
            **SHAPES[device], max_position_embeddings=longest + 8, bos_token_id=None, eos_token_id=None
        )
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def problem_of(tier: str) -> str:
    """Return what this tier lacks here, "" if nothing."""
    if importlib.util.find_spec(PLUGINS[tier]) is None:
        return f"{PLUGINS[tier].replace('_', '-')} is not installed"
    missing = [name for name in PROGRAMS.get(tier, ()) if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def servers_of(plugin: str) -> Any:
    """Return the module that starts servers for the tests of a plugin."""
    place = ROOT / "plugins" / plugin / "tests" / "servers.py"
    spec = importlib.util.spec_from_file_location(f"{plugin}_servers", place)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def options_of_tier(tier: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Give the tier's own options; its server runs meanwhile."""
    if tier == "redis":
        is_large = usable_processors() >= REDIS_THREADS_FROM
        threads = ["--io-threads", "4", "--io-threads-do-reads", "yes"] if is_large else []
        server = servers_of("redis_tier").Server(folder, *threads).start()
        try:
            yield {"url": server.url} | ({"threads": 8, "window": "128KiB"} if is_large else {})
        finally:
            server.kill()
    elif tier == "s3":
        servers = servers_of("s3_tier")
        with servers.Radosgw(memory_bytes=8 << 30) as gateway:
            keys = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY, "region": "us-east-1"}
            yield {"endpoint": gateway.endpoint, "bucket": servers.new_bucket(gateway.endpoint), "prefix": "kv"} | keys
    else:
        yield {"capacity": "64GiB"} | ({"path": str(folder), "min_free": 0} if tier == "fs" else {})


def seconds_of(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(model: Any, tier: str, lengths: list[int], rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the medians for prompts of each length in this tier."""
    with options_of_tier(tier, folder) as options:
        secondary = {"type": tier, "store_queue": 1 << 16, "deadline": "120s", **options}
        config = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s", "secondary": [secondary]}
        options_of_cache = {"chunk_tokens": CHUNK, "load": "always", "load_wait": 60.0, "pending_bytes": 16 << 30}
        with PrefixCache(config, model, **options_of_cache) as cache:
            for length in lengths:
                found = measure_one(model, cache, length, rounds) | {"tier": tier}
                print(line_of(found), file=sys.stderr, flush=True)
                yield found


def measure_one(model: Any, cache: PrefixCache, length: int, rounds: int) -> dict[str, Any]:
    """Return the medians for prompts of this length."""
    found: dict[str, list[float]] = {"recompute": [], "cold": [], "stored": [], "load": []}
    loaded = (length - 1) // CHUNK * CHUNK
    for turn in range(rounds + 1):
        ids = torch.randint(model.config.vocab_size, (1, length), device=model.device)
        before = cache.stats()

        def first_token(by: Any, ids: torch.Tensor = ids) -> None:
            by.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)[0, -1].item()

        taken = {"recompute": seconds_of(lambda: first_token(model))}
        taken["cold"] = seconds_of(lambda: first_token(cache))
        taken["stored"] = taken["cold"] + seconds_of(lambda: cache.flush(600.0))
        taken["load"] = seconds_of(lambda: first_token(cache))
        after = cache.stats()
        if after["loaded_tokens"] - before["loaded_tokens"] != loaded:
            sys.exit(f"error: not all of a prompt of {length} tokens was loaded; see the log: {after}")
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


def line_of(one: dict[str, Any]) -> str:
    at = one["seconds"]
    return (
        f"{one['tier']:7}{one['tokens']:7}{at['recompute']:10.3f} {at['cold']:9.3f} {at['stored']:9.3f}"
        f" {at['load']:9.3f} {at['recompute'] / at['load']:7.2f}x {one['nbytes'] / at['load'] / 1e9:9.2f}"
    )


def report(found: dict[str, Any]) -> None:
    print(f"{found['device']}\ntier    tokens  recompute      cold    stored      load   faster   GB/s loaded")
    for one in found["sizes"]:
        print(line_of(one))


def main() -> None:
    parser = options_of(__doc__, "short prompts and few rounds")
    parser.add_argument("--device", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--path", type=Path, help="a folder on the disk for fs (the one for temporary files)")
    parser.add_argument("--tiers", default=",".join(TIERS), help="those to measure, by default all: %(default)s")
    parser.add_argument("--lengths", help="of the prompts, in tokens")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here")
    tiers = options.tiers.split(",")
    if unknown := sorted({*tiers} - {*TIERS}):
        parser.error(f"--tiers: {', '.join(unknown)}; expected some of {', '.join(TIERS)}")
    if problems := [f"{tier}: {problem}" for tier in tiers if (problem := problem_of(tier))]:
        sys.exit(f"error: {'; '.join(problems)}; choose others with --tiers")
    lengths, rounds = (LENGTHS[:3], 1) if options.quick else (LENGTHS, 3)
    if options.lengths:
        lengths = [int(length) for length in options.lengths.split(",")]
    logging.getLogger("kvtiers").setLevel(logging.ERROR)
    model = make_model(options.device, max(lengths))
    sizes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.path, prefix="kvtiers-bench-") as top:
        for tier in tiers:
            sizes += measure(model, tier, lengths, rounds, Path(top, tier))
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = {"device": device, "sizes": sizes, "goals": goals_of(sizes, options.device)}
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
