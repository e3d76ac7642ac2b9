"""LMCache's own ``lmcache bench l2`` over kvtiers and over LMCache's adapter for files, in turns.

`fs` is LMCache's adapter, which checks nothing that it loads; `control` is `fs` once more: what its share of `fs`
differs from 1 is noise. `fs, AES-GCM` is that adapter with LMCache's own encryption, which checks what is loaded, and
`kvtiers, AES-GCM` is kvtiers with its own; `kvtiers` has the plain seal, a hash over each byte. The tool drops an
adapter's `serde`, so `EncryptedFs` puts it around the adapter as LMCache's server does.

``python integrations/lmcache/benchmarks/bench_l2.py`` in LMCache's environment.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import create_serde_processor

HERE = Path(__file__).resolve().parent
LANES = ("fs", "fs, AES-GCM", "kvtiers", "kvtiers, AES-GCM", "control")
SHARES = (("kvtiers", "fs, AES-GCM"), ("kvtiers, AES-GCM", "fs, AES-GCM"), ("kvtiers", "fs"), ("control", "fs"))
KEYS, KIB = 32, 2048


class EncryptedFs(SerdeL2AdapterWrapper):  # type: ignore[misc] # LMCache has no types for others
    """LMCache's adapter for files and its AES-GCM, put together as its ``StorageManager`` does."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        spec = {"type": "fs", "base_path": params["base_path"], "serde": {"type": "aesgcm", **params["serde"]}}
        config_class = get_l2_adapter_config_class("fs")
        config = config_class.from_dict(spec)
        memory = L1MemoryManagerConfig(4 * KEYS * (KIB << 10), use_lazy=False, shm_name="")
        super().__init__(
            inner=create_l2_adapter_from_registry(config, l1_memory_desc),
            serde=create_serde_processor(config_class._parse_serde_config(spec)),  # noqa: SLF001 -- as for its options
            l1_manager=L1Manager(L1ManagerConfig(memory)),
        )

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects."""
        return int(super().submit_store_task(keys, _with_parts(objects)))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load objects."""
        return int(super().submit_load_task(keys, _with_parts(objects)))


def _with_parts(objects: list[Any]) -> list[Any]:
    """Return objects that say of which parts they are: those of the tool do not, and encryption asks them."""
    for it in objects:
        it.meta.shapes, it.meta.dtypes = [it.meta.shape], [it.meta.dtype]
    return objects


def spec_of(lane: str, folder: Path, key: Path) -> dict[str, Any]:
    """Return the adapter that ``--l2-adapter`` names."""
    if lane in {"fs", "control"}:
        return {"type": "fs", "base_path": str(folder)}
    if lane == "fs, AES-GCM":
        params = {"base_path": str(folder), "serde": {"master_key_path": str(key), "aes_bits": 256}}
        return {"type": "plugin", "module_path": "bench_l2", "class_name": "EncryptedFs", "adapter_params": params}
    tier = {"type": "fs", "path": str(folder), "capacity": "8GiB", "min_free": 0}
    config: dict[str, Any] = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "30s", "secondary": [tier]}
    if lane == "kvtiers, AES-GCM":
        config |= {"encryption": {"key": {"file": str(key)}}}
    params = {"config": config, "weights": "none", "kv_dtype": "bytes"}
    plugin = {"module_path": "kvtiers_lmcache", "class_name": "KvtiersL2Adapter", "adapter_params": params}
    return {"type": "plugin", **plugin}


def bench(lane: str, top: Path, rounds: int) -> dict[str, float]:
    """Return the rates that the tool prints, in MB/s, and how many objects it found."""
    folder, key, out = top / "store", top / "key", top / "out.json"
    command = [str(Path(sys.executable).with_name("lmcache")), "bench", "l2", "--format", "json", "--output", str(out)]
    command += ["--num-keys", str(KEYS), "--data-size-kb", str(KIB), "--rounds", str(rounds)]
    command += [
        "--lookup-max-hit-rate",
        "1",
        "--no-skip-verify",
        "--l2-adapter",
        json.dumps(spec_of(lane, folder, key)),
    ]
    variables = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    shutil.rmtree(folder)
    found = {it["operation"]: it for it in json.loads(out.read_text())["metrics"].values() if "operation" in it}
    assert all(it["total_success"] == it["total_keys"] for it in found.values()), found
    return {name.lower(): found[name]["throughput_avg_mbps"] for name in ("Store", "Load")}


def report(found: dict[str, list[dict[str, float]]]) -> None:
    """Print medians and ranges, of the rates and of the shares in the same turn."""

    def middle(values: list[float]) -> str:
        return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"

    print("\n| | store, MB/s | load, MB/s |\n|---|---|---|")
    for lane, turns in found.items():
        print(f"| {lane} | " + " | ".join(middle([turn[way] for turn in turns]) for way in ("store", "load")) + " |")
    for one, other in SHARES:
        pairs = list(zip(found[one], found[other], strict=True))
        shares = [middle([mine[way] / its[way] for mine, its in pairs]) for way in ("store", "load")]
        print(f"| {one}, as a share of {other} | " + " | ".join(shares) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="a folder on the disk (the one for temporary files)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the tool's in each turn, of 64 MiB")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {lane: [] for lane in LANES}
    with tempfile.TemporaryDirectory(dir=options.path, prefix="kvtiers-bench-") as top:
        key = Path(top) / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
        for turn in range(options.turns):
            for lane in LANES[turn % len(LANES) :] + LANES[: turn % len(LANES)]:
                found[lane].append(bench(lane, Path(top), options.rounds))
                print(turn, lane, found[lane][-1], flush=True)
    report(found)


if __name__ == "__main__":
    main()
