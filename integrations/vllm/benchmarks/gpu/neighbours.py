"""Two engines on one GPU over one pool: what each has of the other's chunks, and a restart of one after the other.

Both are processes of their own (`engine_run.py orders`), of Llama's shape, with a part of the pool each.

1. One computes six prompts of 16k tokens and a burst of 12 x 8k. The other asks for them: for the first time, when the
   chunks are hashed before they are used, and three times more; in turns with the first one, from its own part.
2. Both answer prompts of 8k tokens that one of them has computed, more than their own GPU caches hold. One is ended and
   started again while the other goes on, then the other one. Of each answer: when, how long, how much of it hit.

    python neighbours.py --model llama-8b-shape --json out.json      some three minutes
"""

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import vllm_gpu

PART_GIB, GPU_GIB = 32, 12
LONE = {"seed": 77, "count": 6, "tokens": 16_384, "at_once": False}
BURST = {"seed": 24, "count": 12, "tokens": 8_192, "at_once": True}
LOAD = {"seed": 55, "count": 24, "tokens": 8_192, "at_once": True, "answer": 16}


class Replica:
    """An engine that does what it is told, one order at a time."""

    def __init__(self, model: str, logs: Path, name: str) -> None:
        command = [sys.executable, str(vllm_gpu.FOLDER / "engine_run.py"), model, "pool", str(logs), "orders"]
        self.name, self.begun = name, time.perf_counter()
        self._log = (logs / f"{name}.log").open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1,
            env={**os.environ, "PRIM": "1", "GPU_GIB": str(GPU_GIB), "GRAPHS": "1"}, start_new_session=True,
        )  # fmt: skip
        self._found: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                self._found.put(json.loads(line[7:]))
            else:
                self._log.write(line)
        self._found.put(None)

    def result(self, seconds: float = 240) -> dict[str, Any]:
        """Return its next result."""
        found = self._found.get(timeout=seconds)
        if found is None:
            raise RuntimeError(f"{self.name} has ended")
        return found

    def do(self, order: Any) -> dict[str, Any]:
        """Give it an order, and return what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        return self.result()

    def end(self) -> dict[str, Any]:
        """End it as a server ends; return its figures."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = self.result()
        self._process.wait(60)
        return found

    def kill(self) -> None:
        """End its processes, whatever they do."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()


def wait_until_published(keeper: vllm_gpu.Keeper, replica: Replica) -> None:
    """Wait until the pool has all that this engine has computed."""
    chunks, before = -1, -2
    while chunks != before:
        replica.do({"seed": 998, "count": 1, "tokens": 32, "at_once": True})  # the last stores begin in the next step
        time.sleep(1)
        before, chunks = chunks, keeper.ask()["chunks"]


def lone_and_burst(keeper: vllm_gpu.Keeper, owner: Replica, other: Replica) -> list[dict[str, Any]]:
    """Return what the other one has of the owner's chunks, and the owner itself, in turns."""
    found = []

    def note(who: str, what: str, one: dict[str, Any]) -> None:
        seconds = one.get("median_s", one.get("s"))
        of = one.get("of", LONE["count"] * LONE["tokens"])
        cached = one["cached"] if isinstance(one["cached"], int) else sum(one["cached"])
        found.append({**one, "scene": "share", "who": who, "what": what, "s": seconds, "hit": round(cached / of, 4)})
        print(f"  {what}, {who}: {seconds} s, hit {cached / of:.3f} {one.get('all', '')}", flush=True)

    for replica, seed in ((owner, 991), (other, 992)):  # kernels are loaded
        replica.do({"seed": seed, "count": 1, "tokens": 16_384, "at_once": True})
        replica.do({"seed": seed + 10, "count": 4, "tokens": 8_192, "at_once": True})
    for what, order in (("lone 16k", LONE), ("burst of 12 x 8k", BURST)):
        note("computed", what, owner.do(order))
        wait_until_published(keeper, owner)
        time.sleep(6)  # chunks that were looked up and not loaded have been given back
        note("another's, first use", what, other.do(order))
        for _ in range(3):
            owner.do("forget")
            note("its own", what, owner.do(order))
            other.do("forget")
            note("another's", what, other.do(order))
        owner.do("forget")
        other.do("forget")
    return found


def rolling_restart(keeper: vllm_gpu.Keeper, model: str, logs: Path, replicas: list[Replica]) -> list[dict[str, Any]]:
    """Restart one engine after the other while the other one answers; return the answers in order."""
    for number, replica in enumerate(replicas):
        replica.do({**LOAD, "only": list(range(number, LOAD["count"], 2))})
        wait_until_published(keeper, replica)
    chance, answers, begun = random.Random(3), [], time.perf_counter()
    turns = [threading.Lock() for _ in replicas]
    stop = threading.Event()

    def serve(number: int) -> None:
        while not stop.is_set():
            with turns[number]:
                ask(number)
            time.sleep(0.001)  # a restart gets its turn

    def ask(number: int) -> None:
        at = time.perf_counter() - begun
        one = replicas[number].do({**LOAD, "only": [chance.randrange(LOAD["count"])]})
        hit = min(1.0, one["cached"] / (one["of"] - 64))  # the last chunk is computed in any case
        answers.append({"at": at, "replica": number, "s": one["s"], "ttft": one["first_s"][0], "hit": hit})

    threads = [threading.Thread(target=serve, args=[number], daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(5)
    starts = []
    for number, replica in enumerate(list(replicas)):
        with turns[number]:  # its last answer has come
            ended = time.perf_counter()
            replica.end()
            replicas[number] = Replica(model, logs, f"replica-{number}-again")
            start = replicas[number].result()["s"]
            starts.append({"down_s": round(time.perf_counter() - ended, 2), "start_s": start})
        print(f"  replica {number}: down {starts[-1]['down_s']} s, of that its start {start} s", flush=True)
        time.sleep(5)
    stop.set()
    for thread in threads:
        thread.join(60)
    answers.sort(key=lambda one: one["at"])
    windows = [answers[first : first + 10] for first in range(len(answers) - 9)]
    least = min(statistics.mean(one["hit"] for one in window) for window in windows)
    share = statistics.mean(one["hit"] for one in answers)
    ttft = sorted(one["ttft"] for one in answers)
    print(f"  {len(answers)} answers: hit {share:.4f}, in the worst ten {least:.4f}; TTFT p50 {ttft[len(ttft) // 2]}, "
          f"p99 {ttft[len(ttft) * 99 // 100]} s")  # fmt: skip
    return [{"scene": "rolling", "hit": share, "worst_ten": least, "starts": starts, "answers": answers}]


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with the model's config.json")
    parser.add_argument("--json", metavar="FILE", default="neighbours.json", help="results (default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": vllm_gpu.machine(), "link_gb_s": vllm_gpu.link_gb_s(), "results": []}
    replicas: list[Replica] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        keeper = vllm_gpu.Keeper(2 * PART_GIB, Path(folder), engines=2)
        try:
            replicas += [Replica(options.model, logs, f"replica-{number}") for number in range(2)]
            starts = [replica.result()["s"] for replica in replicas]
            print(f"starts, side by side: {starts}; link {found['link_gb_s']:.1f} GB/s", flush=True)
            found["results"] += lone_and_burst(keeper, *replicas)
            found["results"] += rolling_restart(keeper, options.model, logs, replicas)
            found["results"] += [{**replica.end(), "scene": "figures"} for replica in replicas]
        finally:
            Path(options.json).write_text(json.dumps(found), encoding="utf-8")
            for replica in replicas:
                replica.kill()
            print(json.dumps(keeper.ask()))
            keeper.close()


if __name__ == "__main__":
    main()
