"""An engine's start until its first three answers, in the real vLLM on the CPU: what kvtiers adds to it.

Each engine is forked from a Python that has imported vLLM, so that kvtiers' own imports, which are most of what it adds
on a processor, are not lost in those. The engines take turns; the seconds of a busy machine say little, those of
processors more: the engine's process, and apart from it its tier hosts.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from vllm_engines import run_in_engines_environment

CAPACITY = 512 << 20


class Start(NamedTuple):
    """Seconds: until the engine was built, until its third answer, of processors in its process, in its tier hosts."""

    built: float
    answered: float
    engine: float
    hosts: float


def configs(store: Path) -> dict[str, dict[str, Any] | None]:
    """Return vLLM's kv_connector_extra_config of each kind of engine. ``store``: a folder for its tier."""
    from integrations.vllm.tests.real_vllm.ways import fs, tiers, whole_stack

    primary = {"primary": {"capacity": CAPACITY}}
    return {
        "no connector": None,
        "vLLM's tiering": tiers(cpu_bytes_to_use=CAPACITY),
        "vLLM's tiering, kvtiers-fs": tiers(fs(store), cpu_bytes_to_use=CAPACITY),
        "whole stack": whole_stack(options=primary),
        "whole stack, fs": whole_stack(fs(store), options=primary),
        "whole stack, memory": whole_stack({"type": "memory", "capacity": "256MiB", "required": True}, options=primary),
    }


def start(interpreter: Any, model: Path, log: Path, extra: dict[str, Any] | None) -> Start:
    """Start an engine, ask it for three answers, and end it."""
    from integrations.vllm.tests.real_vllm.engines import Engine
    from integrations.vllm.tests.real_vllm.models import make_prompt

    begun = time.perf_counter()
    engine = Engine(interpreter, model, log, extra)
    built = time.perf_counter() - begun
    for seed in range(3):
        engine.generate(make_prompt(seed, 700), tokens=1)
    answered = time.perf_counter() - begun
    own, hosts = processor_seconds(engine.pid), sum(map(processor_seconds, engine.hosts()))
    engine.shutdown()
    return Start(built, answered, own, hosts)


def processor_seconds(pid: int) -> float:
    """Return for how long a process has worked, ended threads included."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def starts(rounds: int, names: list[str]) -> dict[str, list[Start]]:
    """Start each engine once a round, in turns."""
    from integrations.vllm.tests.real_vllm.engines import Interpreter
    from integrations.vllm.tests.real_vllm.models import make_model

    found: dict[str, list[Start]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder / "model", seed=0)
        interpreter = Interpreter(folder / "interpreter.log")
        try:
            for number in range(rounds + 1):
                for name in names if number % 2 else reversed(names):
                    extra = configs(folder / f"store {number} {name}")[name]
                    one = start(interpreter, model, folder / f"{number} {name}.log", extra)
                    if number:  # the first round compiles, and fills the page cache
                        found[name].append(one)
        finally:
            interpreter.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=configs(Path()), action="append", help="this engine; may be given again")
    options = parser.parse_args()
    found = starts(options.rounds, options.only or list(configs(Path())))
    print("medians, seconds             built  third answer  processors: engine  hosts")
    for name, all_of_it in found.items():
        built, answered, engine, hosts = (statistics.median(each) for each in zip(*all_of_it, strict=True))
        print(f"{name:28} {built:5.2f} {answered:13.2f} {engine:19.2f} {hosts:6.2f}")


if __name__ == "__main__":
    run_in_engines_environment()
    main()
