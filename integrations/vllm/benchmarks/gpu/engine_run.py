"""One engine on a GPU, in a process of its own: the scenes of `vllm_gpu.py` that it can play, timed by a user's clock.

Usage: engine_run.py MODEL MODE STORE SCENE[,SCENE ...]; prints one JSON object a scene, on a line that begins with
RESULT. Weights are random ones: what is measured does not look at them.
"""

import functools
import json
import os
import random
import signal
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

GIB = 1 << 30
LIBRARIES = (
    "_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so", "vllm_flash_attn/_vllm_fa3_C.abi3.so",
)  # fmt: skip


def load_libraries() -> None:
    """Load vLLM's compiled operations by their path: a release that was unpacked and not installed needs it."""
    import torch
    import vllm

    folder = Path(vllm.__file__).parent
    for name in LIBRARIES:
        if (folder / name).exists():
            torch.ops.load_library(str(folder / name))


def connector_config(mode: str, primary_gib: float, store: str) -> dict[str, Any] | None:
    """Return vLLM's `kv_transfer_config` for this way of keeping KV; None without any."""
    nbytes = int(primary_gib * GIB)

    def under(extra: dict[str, Any], connector: str = "OffloadingConnector") -> dict[str, Any]:
        return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def fs(name: str) -> dict[str, Any]:
        return {"type": name, "path": store, "capacity": "60GiB", **json.loads(os.environ.get("TIER", "{}"))}

    def stack(tiers: list[dict[str, Any]], **primary: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "version": 1, "namespace": "gpu", "model": {"name": "llama8b-shape", "revision": "v1"},
            "primary": {"capacity": nbytes, **primary, **json.loads(os.environ.get("PRIMARY", "{}"))},
            "secondary": tiers,
            **json.loads(os.environ.get("STACK", "{}")),
        }  # fmt: skip
        return under({"kvtiers_config": config}, "KvtiersConnector")

    tiering = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": nbytes}
    return {
        "none": None,
        "cpu": under({"cpu_bytes_to_use": nbytes}),
        "tiering_fs": under({**tiering, "secondary_tiers": [{"type": "fs", "root_dir": store}]}),
        "tiers_fs": under(
            {**tiering, "secondary_tiers": [fs("kvtiers-fs")], "kvtiers": {"namespace": "gpu", "weights": "v1"}}
        ),
        "simple": under({"cpu_bytes_to_use": nbytes}, "SimpleCPUOffloadConnector"),
        "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        "stack": stack([]),
        "pool": stack([], pool=os.environ.get("POOL")),
        "stack_fs": stack([fs("fs")]),
    }[mode]


GAINS = {"out_proj": 0.3, "o_proj": 10.0, "down_proj": 0.2}
"""How much larger a layer's output is than its input; 1 where none is named."""


def spread(model: Any) -> None:
    """Make random weights as large as trained ones, so that tokens depend on all KV and on the states.

    vLLM's are within .001: there the last token alone decides the next, and a state forgets in ten tokens, with these
    in some hundred.
    """
    for name, weight in model.named_parameters():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if layer == "dt_bias":
            weight.data.fill_(-7.0)
        elif layer == "A_log":
            weight.data.fill_(0.0)
        elif name.endswith("linear_attn.norm.weight"):
            weight.data.fill_(1.0)
        elif weight.dim() > 1:
            deviation = 0.3 if layer == "embed_tokens" else GAINS.get(layer, 1.0) * weight.shape[-1] ** -0.5
            weight.data.mul_(deviation / (0.001 * 3**-0.5))


class Engine:
    """A `vllm.LLM` and a clock. Prompts come from a seed, so that another process asks the same ones."""

    def __init__(self, model: str, mode: str, store: str, *, most_tokens: int) -> None:
        os.environ["PYTHONHASHSEED"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `spread` is sent to the engine's process
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # kernels chosen once: the same rounding in all engines
        os.environ.update(LMCACHE_LOCAL_CPU="True", LMCACHE_MAX_LOCAL_CPU_SIZE=os.environ.get("PRIM", "24"))
        load_libraries()
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt

        self._prompt, self._sampling = TokensPrompt, SamplingParams
        self.mode, self.store = mode, store
        begun = time.perf_counter()
        config = connector_config(mode, float(os.environ.get("PRIM", "24")), store)
        more: dict[str, Any] = {"enforce_eager": True}
        if os.environ.get("GRAPHS"):  # steps that only decode are captured, as a server has them; nothing is compiled
            sizes = [1, 2, 4, 8, 16, 24, 32, 40, 48]
            more = {
                "compilation_config": {
                    "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes,
                },
            }  # fmt: skip
        if gib := os.environ.get("GPU_GIB"):
            more["kv_cache_memory_bytes"] = int(float(gib) * GIB)
        has_states = "linear_key_head_dim" in json.loads((Path(model) / "config.json").read_text())
        if has_states:  # FlashInfer's kernels, the default on an H100 or H200, are compiled for minutes
            more["additional_config"] = {"gdn_prefill_backend": "triton"}
        if (drafts := int(os.environ.get("MTP", "0"))) > 0:
            more["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
        self.llm = LLM(
            model=model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **more,
            max_model_len=most_tokens + 64, gpu_memory_utilization=0.6, max_num_batched_tokens=8192,
            enable_prefix_caching=True, kv_transfer_config=config, disable_log_stats=False, seed=0,
            tensor_parallel_size=int(os.environ.get("RANKS", "1")), disable_custom_all_reduce=True,
        )  # fmt: skip
        self.start_seconds = time.perf_counter() - begun
        if has_states:
            self.llm.apply_model(spread)

    @staticmethod
    def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
        """Return prompts that share nothing."""
        random_tokens = random.Random(seed)
        return [[random_tokens.randrange(10, 120_000) for _ in range(tokens)] for _ in range(count)]

    def ask(self, prompts: list[list[int]], answer: int = 1) -> dict[str, Any]:
        """Send these prompts at once and wait for all answers."""
        sampling = self._sampling(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        given = [self._prompt(prompt_token_ids=prompt) for prompt in prompts]
        begun = time.perf_counter()
        outputs = self.llm.generate(given, sampling, use_tqdm=False)
        return {
            "s": round(time.perf_counter() - begun, 4),
            "cached": sum(output.num_cached_tokens or 0 for output in outputs),
            "of": sum(map(len, prompts)),
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "first_s": [round(getattr(output.metrics, "first_token_latency", 0.0), 3) for output in outputs],
            "cached_each": [output.num_cached_tokens or 0 for output in outputs],
        }

    def figures(self) -> dict[str, float]:
        """Return kvtiers' own figures that are not zero, as vLLM exports them: why a request was loaded or computed."""
        time.sleep(0.3)  # those of the last step come with the next report
        self.ask(self.prompts(998, 1, 32))
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples if family.name.startswith("kvtiers_") else ():
                if sample.value and not sample.name.endswith(("_bucket", "_created")):
                    found[sample.name] = round(found.get(sample.name, 0.0) + sample.value, 4)
        return found

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; the tiers keep what they have."""
        self.llm.reset_prefix_cache()


def one_by_one(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Return what asking one after the other took."""
    asked = [engine.ask([prompt]) for prompt in prompts]
    seconds = [one["s"] for one in asked]
    return {
        "median_s": statistics.median(seconds), "all": seconds, "cached": [one["cached"] for one in asked],
        "tokens": [one["tokens"] for one in asked],
    }  # fmt: skip


# -- scenes


def check(engine: Engine) -> dict[str, Any]:
    """Ask short prompts that differ only far from their ends: their tokens differ if KV and states matter.

    Then one of 16k tokens, so that what comes next finds all kernels compiled.
    """
    (end,) = engine.prompts(998, 1, 250)
    begun = time.perf_counter()
    found = engine.ask([head + end for head in engine.prompts(997, 16, 1_800)])
    engine.ask(engine.prompts(996, 1, 16_384))
    different = len({str(answer) for answer in found["tokens"]})
    return {**found, "different": different, "all_s": round(time.perf_counter() - begun, 2)}


def tokens(engine: Engine) -> dict[str, Any]:
    """Ask four prompts of 3k tokens, 32 answers each, cold and from the tiers; in another process: from the store."""
    prompts = engine.prompts(61, 4, 3_000)
    first = [engine.ask([prompt], 32) for prompt in prompts]
    time.sleep(float(os.environ.get("SETTLE", "5")))
    engine.forget()
    again = [engine.ask([prompt], 32) for prompt in prompts]
    return {
        "s": [one["s"] for one in first], "tokens": [one["tokens"] for one in first],
        "cached": [one["cached"] for one in first], "again_s": [one["s"] for one in again],
        "again_tokens": [one["tokens"] for one in again], "cached_again": [one["cached"] for one in again],
    }  # fmt: skip


def warm_up(engine: Engine) -> dict[str, Any]:
    """Compute a prompt, so that the engines after this one find what was compiled."""
    return {"s": engine.ask(engine.prompts(999, 2, 16_384))["s"]}


def startup(engine: Engine) -> dict[str, Any]:
    """Ask new prompts of 16k tokens for fifteen seconds from the start on; then hits in the GPU's own cache."""
    seconds, until, seed = [], time.perf_counter() + float(os.environ.get("STARTUP", "15")), 1_000
    while time.perf_counter() < until:
        seed += 1
        seconds.append(engine.ask(engine.prompts(seed, 1, 16_384))["s"])
    (prompt,) = engine.prompts(seed, 1, 16_384)
    return {
        "first_three_s": round(engine.start_seconds + sum(seconds[:3]), 3), "worst_s": max(seconds),
        "median_s": statistics.median(seconds), "all": seconds, "gpu_hit": one_by_one(engine, [prompt] * 5)["median_s"],
    }  # fmt: skip


def primary(engine: Engine) -> dict[str, Any]:
    """Ask prompts of several lengths cold, from the GPU's own cache, and from the primary."""
    found: dict[str, Any] = {}
    for tokens, count in ((2_048, 6), (8_192, 6), (16_384, 6)):
        prompts = engine.prompts(tokens, count, tokens)
        cold = one_by_one(engine, prompts)
        hit = one_by_one(engine, prompts)
        time.sleep(float(os.environ.get("SETTLE", "5")))
        engine.forget()
        again = one_by_one(engine, prompts)
        found[str(tokens)] = {"cold": cold, "gpu_hit": hit, "primary": again}
        engine.forget()
    return found


def long(engine: Engine) -> dict[str, Any]:
    """Ask two prompts of 64k tokens cold, from the GPU's own cache, and from the primary."""
    prompts = engine.prompts(65_536, 2, 65_536)
    cold, hit = one_by_one(engine, prompts), one_by_one(engine, prompts)
    time.sleep(float(os.environ.get("SETTLE", "5")))
    engine.forget()
    return {"cold": cold, "gpu_hit": hit, "primary": one_by_one(engine, prompts)}


def beside_stores(engine: Engine) -> dict[str, Any]:
    """Ask short new prompts one after the other, and each at once again: what requests feel of stores in flight."""
    cold, hit, before = [], [], processor_ticks()
    begun = time.perf_counter()
    for prompt in engine.prompts(2_048, 24, 2_048):
        cold.append(engine.ask([prompt])["s"])
        hit.append(engine.ask([prompt])["s"])
    seconds = time.perf_counter() - begun
    return {
        "cold": cold, "cold_median_s": statistics.median(cold), "cold_worst_s": max(cold[1:]), "hit": hit,
        "hit_median_s": statistics.median(hit), "hit_worst_s": max(hit[1:]),
        "processors": round((processor_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds, 2),
    }  # fmt: skip


def processor_ticks() -> int:
    """Return the ticks in which any processor of the machine has worked since it was started."""
    user, nice, system, _idle, _wait, *more = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return user + nice + system + sum(more[:2])


def burst(engine: Engine) -> dict[str, Any]:
    """Ask 24 prompts of 8k tokens at once: cold, from the GPU's own cache, three times from the primary.

    With no connector they are computed once more: whether tokens are the same in steps of other sizes.
    """
    prompts = engine.prompts(24, 24, 8_192)
    cold = engine.ask(prompts)
    time.sleep(float(os.environ.get("SETTLE", "12")))
    gpu_hit = engine.ask(prompts)["s"]
    again = []
    for _ in range(1 if engine.mode == "none" else 3):
        engine.forget()
        again.append(engine.ask(prompts))
    return {"cold": cold, "gpu_hit_s": gpu_hit, "primary_s": [one["s"] for one in again],
            "cached": [one["cached"] for one in again],
            "same": all(one["tokens"] == cold["tokens"] for one in again)}  # fmt: skip


def fill(engine: Engine) -> dict[str, Any]:
    """Compute what `restart` and `store` ask for in another process, and wait until it has been written."""
    asked = [engine.ask([prompt]) for prompt in engine.prompts(77, 6, 16_384)] + [
        engine.ask(engine.prompts(24, 24, 8_192))
    ]
    time.sleep(float(os.environ.get("FILL", "12")))
    return {"s": [one["s"] for one in asked], "tokens": [one["tokens"] for one in asked]}


def fill_pool(engine: Engine) -> dict[str, Any]:
    """Compute the burst that `restart` asks for in another process, and wait until the pool has all of it."""
    from kvtiers.pool.loan import pool_figures

    asked = engine.ask(engine.prompts(24, 24, 8_192))
    engine.ask(engine.prompts(998, 1, 32))  # the last stores begin in the next step
    chunks, before, begun = -1, -2, time.perf_counter()
    while chunks != before and time.perf_counter() < begun + 60:
        time.sleep(1)
        before, chunks = chunks, pool_figures(os.environ["POOL"])["chunks"]
    return {"s": asked["s"], "tokens": asked["tokens"], "published_s": round(time.perf_counter() - begun, 1),
            "chunks": chunks, "figures": engine.figures()}  # fmt: skip


def restart(engine: Engine) -> dict[str, Any]:
    """Ask the burst that another process has stored, as the first thing of this one; then again from the primary."""
    prompts = engine.prompts(24, 24, 8_192)
    first = engine.ask(prompts)
    engine.forget()
    figures = engine.figures()
    return {"burst": first, "again": engine.ask(prompts), "figures": figures}


def store(engine: Engine) -> dict[str, Any]:
    """Ask what another process has stored, one prompt of 16k tokens after the other, from the first request on."""
    found = one_by_one(engine, engine.prompts(77, 6, 16_384))
    return {**found, "figures": engine.figures()}


def fill_store(engine: Engine) -> dict[str, Any]:
    """Compute what `store` asks for in another process, wait until it has been written, and drop its cached pages."""
    asked = [engine.ask([prompt]) for prompt in engine.prompts(77, 6, 16_384)]
    written, before, until = folder_bytes(engine.store), -1, time.monotonic() + 60
    while written != before and time.monotonic() < until:
        time.sleep(3)
        written, before = folder_bytes(engine.store), written
    drop_pages(engine.store)
    return {"s": [one["s"] for one in asked], "tokens": [one["tokens"] for one in asked], "bytes": written}


def folder_bytes(folder: str) -> int:
    """Return what the files under this folder hold."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def drop_pages(folder: str) -> None:
    """Write these files to their disk and drop them from the page cache, so that reading is reading the disk."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def throughput(engine: Engine) -> dict[str, Any]:
    """Compute what is not known anywhere, with answers of 64 tokens, while it is stored.

    ``prefill_s``: until the last prompt's first token; what comes after it are steps that only decode.
    """
    engine.ask(engine.prompts(1, 8, 2_048), 64)
    before, begun = processor_ticks(), time.perf_counter()
    asked = [engine.ask(engine.prompts(seed, 48, 2_048), 64) for seed in (2, 3, 4)]
    ticks, seconds = processor_ticks() - before, time.perf_counter() - begun
    return {
        "s": [one["s"] for one in asked], "prefill_s": [max(one["first_s"]) for one in asked],
        "processors": round(ticks / os.sysconf("SC_CLK_TCK") / seconds, 2), "figures": engine.figures(),
    }  # fmt: skip


def mixed(engine: Engine) -> dict[str, Any]:
    """Poisson arrivals, half of them repeats, with decodes running: TTFT, inter-token latency and tokens a second."""
    sampling = engine._sampling(temperature=0, max_tokens=96, ignore_eos=True, detokenize=False)  # noqa: SLF001 -- a rig
    core = engine.llm.llm_engine
    chance, seconds = random.Random(5), float(os.environ.get("MIXED", "20"))
    known = engine.prompts(55, 8, 8_192)
    for prompt in known:
        engine.ask([prompt])
    time.sleep(float(os.environ.get("SETTLE", "5")))
    engine.forget()
    arrivals: list[tuple[float, list[int]]] = []
    at, number = 0.0, 0
    while at < seconds:
        at += chance.expovariate(float(os.environ.get("RATE", "2.5")))
        number += 1
        arrivals.append((at, known[number % 8] if number % 2 else engine.prompts(9_000 + number, 1, 8_192)[0]))
    begun, sent, came, last = time.perf_counter(), {}, {}, {}
    gaps: list[float] = []
    tokens = 0
    while arrivals or core.has_unfinished_requests():
        now = time.perf_counter() - begun
        while arrivals and arrivals[0][0] <= now:
            due, prompt = arrivals.pop(0)
            name = f"r{len(sent)}"
            sent[name] = due
            core.add_request(name, engine._prompt(prompt_token_ids=prompt), sampling)  # noqa: SLF001 -- a rig
        for output in core.step() if core.has_unfinished_requests() else ():
            now, count = time.perf_counter() - begun, len(output.outputs[0].token_ids)
            if not count:
                continue
            name = output.request_id
            if name not in came:
                came[name] = now
            elif count > last[name][1]:
                gaps.append((now - last[name][0]) / (count - last[name][1]))
            last[name] = (now, count)
            tokens += output.finished * count
    ttft = sorted(came[name] - sent[name] for name in came)
    gaps.sort()
    share = lambda found, p: round(found[min(len(found) - 1, int(p * len(found)))], 4) if found else None  # noqa: E731 -- short
    return {
        "requests": len(sent), "ttft_p50": share(ttft, 0.5), "ttft_p99": share(ttft, 0.99), "itl_p50": share(gaps, 0.5),
        "itl_p99": share(gaps, 0.99), "tokens_s": round(tokens / (time.perf_counter() - begun), 1),
    }  # fmt: skip


SESSIONS, USERS, TURNS = 48, 12, 6
"""In the end 53 GiB of KV of Llama's shape, twice what a GPU cache of 26 GiB (`GPU_GIB`) holds."""


class Session:
    """One conversation: what was said so far; the next turn adds a user's tokens and the model's answer."""

    def __init__(self, engine: Engine, number: int) -> None:
        chance = random.Random(31_000 + number)
        self._new = [engine.prompts(32_000 + 10 * number + turn, 1, 250)[0] for turn in range(TURNS + 1)]
        self.tokens = engine.prompts(30_000 + number, 1, chance.randrange(6_500, 8_000))[0]

    def turn(self, turn: int) -> list[int]:
        """Return the prompt of this turn."""
        self.tokens += self._new[turn]
        return self.tokens


def converse(engine: Engine, sessions: dict[int, Session], turns: list[tuple[int, int]], answer: int) -> dict[str, Any]:
    """Play (session, turn) in this order, closed loop: each user waits for an answer before the next request."""
    sampling = engine._sampling(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)  # noqa: SLF001 -- a rig
    core = engine.llm.llm_engine
    waiting, sent, last = list(turns), {}, {}
    ttft: list[float] = []
    gaps: list[float] = []
    cached = asked = 0
    said: dict[str, list[int]] = {}
    begun = time.perf_counter()
    while waiting or sent:
        while waiting and len(sent) < USERS:
            number, turn = waiting.pop(0)
            name, prompt = f"s{number}-{turn}", sessions[number].turn(turn)
            core.add_request(name, engine._prompt(prompt_token_ids=list(prompt)), sampling)  # noqa: SLF001 -- a rig
            sent[name], asked = (time.perf_counter(), number), asked + len(prompt)
        for output in core.step():
            now, name = time.perf_counter(), output.request_id
            count = len(output.outputs[0].token_ids)
            if name in last and count > last[name][1]:
                gaps.append((now - last[name][0]) / (count - last[name][1]))
            elif count and name not in last:
                ttft.append(now - sent[name][0])
                cached += output.num_cached_tokens or 0
            if count:
                last[name] = (now, count)
            if output.finished:
                said[name] = list(output.outputs[0].token_ids)
                sessions[sent.pop(name)[1]].tokens += said[name]
    seconds = time.perf_counter() - begun
    ttft.sort()
    gaps.sort()
    return {
        "s": round(seconds, 3), "requests_s": round(len(turns) / seconds, 3), "cached": cached, "of": asked,
        **{f"ttft_p{share}": round(ttft[min(len(ttft) - 1, share * len(ttft) // 100)], 4) for share in (50, 90, 99)},
        "itl_p99": round(gaps[99 * len(gaps) // 100], 4) if gaps else None,
        "said": zlib.crc32(repr(sorted(said.items())).encode()),
    }  # fmt: skip


def chat(engine: Engine) -> dict[str, Any]:
    """Play all turns of all sessions, turn by turn: a session comes back when 47 others were there.

    What was said is kept beside the store for `resume`.
    """
    sessions = {number: Session(engine, number) for number in range(SESSIONS)}
    found = converse(engine, sessions, [(number, turn) for turn in range(TURNS) for number in sessions], 64)
    Path(engine.store).with_suffix(".said").write_text(json.dumps([session.tokens for session in sessions.values()]))
    time.sleep(float(os.environ.get("FILL", "12")))
    return {**found, "figures": engine.figures()}


def resume(engine: Engine) -> dict[str, Any]:
    """Play one more turn of all the sessions that another process has stored, as the first thing of this one."""
    sessions = {number: Session(engine, number) for number in range(SESSIONS)}
    for session, tokens in zip(
        sessions.values(), json.loads(Path(engine.store).with_suffix(".said").read_text()), strict=True
    ):
        session.tokens = tokens
    found = converse(engine, sessions, [(number, TURNS) for number in sessions], 1)
    return {**found, "figures": engine.figures()}


def orders(engine: Engine) -> dict[str, Any]:
    """Do what the lines on standard input say until it ends, one RESULT each: ``forget``, or what to ask, as JSON.

    ``{"seed": 77, "count": 6, "tokens": 16384, "at_once": true, "only": [0, 3], "answer": 16}``; without the last two
    all of them are asked, for one token each.
    """
    made = functools.cache(engine.prompts)
    for line in sys.stdin:
        order, found = json.loads(line), {}
        if order == "forget":
            engine.forget()
        else:
            prompts = made(order["seed"], order["count"], order["tokens"])
            asked = [prompts[number] for number in order.get("only", range(len(prompts)))]
            found = engine.ask(asked, order.get("answer", 1)) if order["at_once"] else one_by_one(engine, asked)
        print("RESULT " + json.dumps({"mode": engine.mode, "scene": "order", **found}), flush=True)
    return {"figures": engine.figures()}


SCENES = {
    scene.__name__: scene
    for scene in (
        *(check, tokens, warm_up, startup, beside_stores, primary, long, burst),
        *(fill, fill_pool, fill_store, restart, store, throughput, mixed, chat, resume, orders),
    )
}


def main() -> None:
    """Play the scenes."""
    model, mode, folder, scenes = sys.argv[1:5]
    engine = Engine(model, mode, folder, most_tokens=65_536 if "long" in scenes.split(",") else 16_384)
    print("RESULT " + json.dumps({"mode": mode, "scene": "start", "s": round(engine.start_seconds, 2)}), flush=True)
    for name in scenes.split(","):
        found = SCENES[name](engine)
        print("RESULT " + json.dumps({"mode": mode, "scene": name, **found}), flush=True)
    if os.environ.get("KILLED"):
        os.killpg(0, signal.SIGKILL)  # its engine core is in the same group


if __name__ == "__main__":
    main()
