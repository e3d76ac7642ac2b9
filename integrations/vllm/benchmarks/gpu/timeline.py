"""Timeline of one request: where the time between its arrival and its first token goes, with real vLLM on a GPU.

The engine runs in this process. Calls of vLLM and of kvtiers that lie on a load's way are timed; what one prompt costs
is printed as a table of calls, and as the gaps between them, for a prompt in the GPU's own cache and for the same
prompt in the primary; with MODE `stack_fs` also for one in the store alone. Then the same for a burst of 24 prompts of
half as many tokens. With `restart`, over a store (`STORE`) that an earlier run has filled, only the burst is asked, as
the first thing of the process. Usage: timeline.py MODEL [TOKENS] [MODE] [restart]
"""

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

SPANS: list[tuple[float, float, str, str]] = []
"""Start, end, thread, name."""

PLACES = {
    "vllm.v1.engine.core:EngineCore": ("preprocess_add_request", "add_request", "step", "step_with_batch_queue"),
    "vllm.v1.core.sched.scheduler:Scheduler": ("schedule", "update_from_output"),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler": (
        "on_new_request", "_lookup", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
        "request_finished",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker:OffloadingConnectorWorker": (
        "start_kv_transfers", "get_finished",
    ),
    "vllm.v1.worker.gpu_worker:Worker": ("execute_model", "sample_tokens"),
    "kvtiers.gpu.cuda.driver:CudaDriver": ("copy_batch", "launch", "wait"),
    "kvtiers.gpu.worker:GpuWorker": ("_submit", "_advance", "_harvest", "wait"),
    "kvtiers.gpu.cuda.copy:CudaCopies": ("copy",),
    "kvtiers.tiering.manager:TieringManager": ("waits_on", "reach", "prepare_load", "on_schedule_end", "prepare_store"),
    "kvtiers.tiering.jobs:JobTable": ("submit", "poll"),
    "kvtiers_vllm.stack.manager:KvtiersManager": ("back_off",),
}  # fmt: skip


def timed(owner: type, name: str) -> None:
    """Have every call of a method recorded."""
    original = getattr(owner, name)
    label = f"{owner.__name__}.{name}"

    @functools.wraps(original)  # its signature, too: kvtiers checks vLLM's
    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            SPANS.append((begun, time.perf_counter(), threading.current_thread().name, label))

    setattr(owner, name, call)


def install() -> None:
    """Time what there is of the calls above."""
    for place, names in PLACES.items():
        module, _, owner = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), owner)
        except (ImportError, AttributeError) as error:
            print(f"not timed: {place}: {error}")
            continue
        for name in names:
            if hasattr(found, name):
                timed(found, name)


def cpu_by_thread() -> dict[str, float]:
    """Return the processor seconds of each thread of this process, Python's by their names."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        try:
            ticks = int((task / "schedstat").read_text().split()[0])
            found[names.get(task.name, "native " + (task / "comm").read_text().strip())] += ticks / 1e9
        except OSError:
            continue
    return found


def show(title: str, begun: float, ended: float, *, least: float = 0.0008) -> None:
    """Print what happened between two moments."""
    spans = sorted(span for span in SPANS if begun <= span[0] <= ended)
    print(f"\n## {title}: {(ended - begun) * 1e3:.1f} ms")
    for start, end, thread, label in spans:
        if end - start >= least:
            print(f"{(start - begun) * 1e3:8.2f} +{(end - start) * 1e3:7.2f} ms  {thread[:12]:12s} {label}")
    totals: dict[tuple[str, str], list[float]] = defaultdict(list)
    for start, end, thread, label in spans:
        totals[thread[:12], label].append(end - start)
    print("calls:")
    for (thread, label), seconds in sorted(totals.items(), key=lambda item: -sum(item[1])):
        print(f"  {sum(seconds) * 1e3:8.2f} ms in {len(seconds):5d}  {thread:12s} {label}")


def open_engine(model: str, tokens: int, mode: str) -> Any:
    """Return vLLM with an engine that is watched."""
    from engine_run import connector_config, load_libraries

    load_libraries()
    from vllm import LLM

    install()
    if os.environ.get("NOREST"):
        from kvtiers_vllm.own_tiering.idle_backoff import IdleBackoff

        IdleBackoff.step = lambda *_args, **_options: None
    config = connector_config(mode, float(os.environ.get("PRIM", "24")), os.environ.get("STORE", ""))
    return LLM(
        model=model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=tokens + 64,
        enforce_eager=True, gpu_memory_utilization=0.6, max_num_batched_tokens=8192, kv_transfer_config=config,
        enable_prefix_caching=True, disable_log_stats=False, seed=0,
    )  # fmt: skip


def main() -> None:
    """Run the engine and print its timelines."""
    model, tokens = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 16_384
    mode = sys.argv[3] if len(sys.argv) > 3 else "stack"
    llm = open_engine(model, tokens, mode)
    from engine_run import Engine
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def ask(scene: str, prompts: list[list[int]]) -> tuple[float, float]:
        SPANS.clear()
        begun = time.perf_counter()
        llm.generate([TokensPrompt(prompt_token_ids=one) for one in prompts], sampling, use_tqdm=False)
        ended = time.perf_counter()
        print(json.dumps({"scene": scene, "ms": round((ended - begun) * 1e3, 2)}))
        return begun, ended

    burst, at_once = Engine.prompts(24, 24, tokens // 2), f"burst of 24 x {tokens // 2}"
    if "restart" in sys.argv[4:]:
        show("burst, from the store, first of its process", *ask(f"{at_once}, restart", burst), least=0.004)
        return
    time.sleep(float(os.environ.get("SETTLE", "30")))
    prompts = Engine.prompts(77, 4, tokens)
    for prompt in prompts:
        ask("computed", [prompt])
    time.sleep(3)
    for name, forget in (("GPU hit", False), ("from the primary", True)):
        for prompt in prompts:
            if forget:
                llm.reset_prefix_cache()
            else:
                ask("GPU hit, before", [prompt])
            time.sleep(float(os.environ.get("PAUSE", "0")))
            before = cpu_by_thread()
            begun, ended = ask(name, [prompt])
            used = {thread: round((s - before.get(thread, 0)) * 1e3, 2) for thread, s in cpu_by_thread().items()}
        show(name, begun, ended)
        print("processor ms by thread:", {thread: ms for thread, ms in used.items() if ms >= 0.1})
    if "fs" in mode:
        for prompt in prompts:
            llm.reset_prefix_cache(reset_connector=True)
            time.sleep(0.5)
            begun, ended = ask("from the store", [prompt])
        show("from the store", begun, ended)
    ask(f"{at_once}, computed", burst)
    time.sleep(4)
    for name, forget in (("GPU hit", False), ("from the primary", True)):
        for _ in range(3):
            if forget:
                llm.reset_prefix_cache()
            begun, ended = ask(f"{at_once}, {name}", burst)
        show(f"burst, {name}", begun, ended, least=0.004)


if __name__ == "__main__":
    main()
