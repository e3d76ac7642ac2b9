"""KVCache.AI's ``kvcache-simulator`` beside ``kvtiers plan --second-half``: the hit rates of LRU, on one trace.

``.venv-vllm/bin/python tests/judges/kvcache_simulator.py [TRACE]``. pip fetches their wheel, pinned by hash in
``wheels.txt``, into ``.judges``. Without a trace of Mooncake's format, one is made up.

Their cache holds the last, partial block of a prompt as well, which no engine can share; so each prompt is cut to its
whole blocks, and one token that is always computed.
"""

import gzip
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".judges"
POINTS = 0.2
TOKENS = 512
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)


def fetched():
    """Return the folder with their package."""
    folder = CACHE / "kvcache-simulator"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        command += ["--no-compile", "--require-hashes", f"--target={folder}", f"--requirement={HERE / 'wheels.txt'}"]
        subprocess.run(command, check=True)
    return folder


def invented():
    """Yield (input tokens, block ids) of chats that go on from some point of an earlier one."""
    chance, unused = random.Random(1), iter(range(10**9))
    prompts = [[next(unused) for _ in range(20)]]
    for _ in range(6000):
        start = chance.choice(prompts[-600:])
        shared = start[: chance.randint(0, len(start))]
        prompts.append((shared + [next(unused) for _ in range(chance.choice([1, 2, 4, 12]))])[:120])
    for blocks in prompts:
        yield len(blocks) * TOKENS, blocks


def recorded(path):
    """Yield (input tokens, block ids) of a trace."""
    with gzip.open(path, "rt") if path.endswith(".gz") else Path(path).open() as lines:
        for line in lines:
            record = json.loads(line)
            yield record["input_length"], record["hash_ids"]


def main(path=""):
    sys.path.insert(0, str(fetched()))
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_file

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        with trace.open("w") as out:
            for at, (tokens, blocks) in enumerate(recorded(path) if path else invented()):
                if whole := tokens // TOKENS:
                    record = {"timestamp": at, "input_length": whole * TOKENS + 1, "output_length": 1}
                    out.write(json.dumps(record | {"hash_ids": blocks[:whole]}) + "\n")
        theirs = build_execution_plan(parse_trace_file(trace, block_size=TOKENS))
        command = [
            Path(sys.executable).with_name("kvtiers"),
            "plan",
            f"--trace={trace}",
            "--second-half",
            "--policy=lru",
        ]
        command += [f"--primary={','.join(f'{share:.0%}' for share in SHARES)}", "--json"]
        ours = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    print(
        f"{'blocks':>8}  {'kvcache-simulator':>17}  {'kvtiers plan':>12}   of {theirs.unique_blocks:,} different ones"
    )
    apart = []
    for point in ours["points"]:
        blocks, rate = point["primary"]["chunks"], 100 * point["hit_rate"]
        found = simulate_policy(theirs, "lru", blocks)
        if found.measurementMode != "fixed_window":
            sys.exit(f"kvcache-simulator does not fill {blocks} blocks in the first half")
        print(f"{blocks:>8,}  {100 * found.hitRate:>15.2f} %  {rate:>10.2f} %")
        apart.append(abs(100 * found.hitRate - rate))
    print(f"at most {max(apart):.2f} points apart; goal: {POINTS}")
    return max(apart) > POINTS


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
