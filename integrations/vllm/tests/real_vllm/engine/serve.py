"""vLLM engines in processes of their own, each forked from this one, which has imported vLLM and has no threads.

Usage: serve.py FD. Pairs come through the connection FD: ("start", (OPTIONS, VARIABLES)), followed by the descriptors
of the engine's connection and log, is answered by the new process's id; ("reap", PID), which kills all of that engine's
process group, by its exit status. An engine gets pairs of a command and its arguments, and answers each.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import draft_states

_FIGURES_SECONDS = 0.2  # steps bring figures, and the whole stack reports them ten times a second
_PR_SET_PDEATHSIG = 1
_OF_A_GPU = {  # which several engines share; FlashInfer's kernels for states are compiled for minutes
    "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 512 << 20,
    "additional_config": {"gdn_prefill_backend": "triton"},
}  # fmt: skip
# What an engine imports at its start; a release that lacks some of it imports that later.
_IMPORTS = [
    "vllm.entrypoints.llm",
    "vllm.lora.request",
    "vllm.v1.engine.core",
    "vllm.v1.worker.{device}_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.kv_offload.tiering.manager",
]


def main() -> None:
    control = Connection(int(sys.argv[1]))
    # One of them alone: that of the CPU puts its own buffers in the place of the GPU's.
    device = "gpu" if _is_cuda() else "cpu"
    for module in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(module.format(device=device))
    assert "kvtiers" not in sys.modules, "it is imported by an engine, which has its own variables"
    gc.freeze()  # an engine collects garbage often at its start, and none of it is from before
    while True:
        try:
            request, argument = control.recv()
        except EOFError:
            return
        if request == "reap":
            control.send(_reap(argument))
            continue
        commands, log = recv_handle(control), recv_handle(control)
        if not (pid := os.fork()):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.setsid()  # its tier hosts have process groups of their own, and are of its session
            control.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            options, variables = argument
            os.environ.update(variables)
            _serve(Connection(commands), options)
            return
        while os.getsid(pid) != pid:  # the engine is known by its session from now on
            time.sleep(0.001)
        os.close(commands)
        os.close(log)
        control.send(pid)


def _is_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def _reap(pid: int) -> int:
    # As long as its leader has not been waited for, the group's number is not used again.
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _serve(commands: Connection, options: dict[str, Any]) -> None:
    try:
        engine = Engine(options)
    except BaseException as error:
        commands.send({"error": f"{type(error).__name__}: {error}"})
        raise
    commands.send({"ready": True})
    while True:
        try:
            name, arguments = commands.recv()
        except EOFError:
            return
        try:
            answer = getattr(engine, name)(**arguments)
        except Exception as error:  # noqa: BLE001 -- the test's own process raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        commands.send(answer)
        if name == "shutdown":
            if not arguments["finalize"]:
                os._exit(0)
            return


def _change_weights(worker: Any) -> None:
    for name, weight in worker.model_runner.model.named_parameters():
        if "input_layernorm" in name:
            weight.data.neg_()


def _reload_weights(worker: Any) -> None:
    worker.reload_weights()


def _time_model(worker: Any, seconds: list[float]) -> None:
    model = worker.model_runner.model
    model.register_forward_pre_hook(lambda *_: seconds.append(-time.perf_counter()))
    model.register_forward_hook(lambda *_: seconds.append(time.perf_counter()))


def _find_kv(worker: Any, found: dict[str, Any]) -> None:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    layers = [layer for layer in layers if hasattr(layer, "get_attn_backend")]
    (found["backend"],) = {layer.get_attn_backend().get_name() for layer in layers}
    (found["memory"],) = {layer.kv_cache.device.type for layer in layers}
    found["layout"] = worker.vllm_config.cache_config.kv_cache_layout


class Engine:
    """The commands."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM, ModelRegistry

        from kvtiers_vllm import identity

        ModelRegistry.register_model("DenseQwen3Next", "dense_model:DenseQwen3Next")
        if "speculative_config" in options and not _is_cuda():
            draft_states.move_in_python()

        digest = identity.digest
        self._digested: dict[str, Any] = {}

        def remember(document: dict[str, Any]) -> str:
            self._digested |= document
            return digest(document)

        identity.digest = remember
        self._llm = LLM(**((_OF_A_GPU if _is_cuda() else {}) | options))
        self._model_seconds: list[float] = []

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None = None,
        adapter: dict[str, Any] | None = None,
        params: list[dict[str, Any] | None] | None = None,
    ) -> dict[str, Any]:
        """Answer prompts. ``params``: the kv_transfer_params of each."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        inputs = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        samplings = [
            SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": given} if given else None,
            )
            for given in params or [None] * len(prompts)
        ]
        lora = None
        if adapter is not None:
            reload = adapter.get("reload", False)
            lora = LoRARequest(adapter["name"], adapter["number"], adapter["path"], load_inplace=reload)
        results = self._llm.generate(inputs, samplings, use_tqdm=False, lora_request=lora)
        return {
            "tokens": [list(result.outputs[0].token_ids) for result in results],
            "cached": [result.num_cached_tokens or 0 for result in results],
        }

    def session(self, inputs: list[list[int]], tokens: int) -> dict[str, Any]:
        """Give a streaming-input session its inputs, each after so many tokens of an answer; return all the tokens."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        found: list[int] = []

        def add(prompt: list[int], *, resumable: bool) -> None:
            engine.engine_core.add_request(
                engine.input_processor.process_inputs(
                    "session", {"prompt_token_ids": prompt}, params, engine.get_supported_tasks(), resumable=resumable
                )
            )

        for number, prompt in enumerate(inputs, 1):
            add(prompt, resumable=True)
            while len(found) < number * tokens:
                for output in engine.engine_core.get_output().outputs:
                    found += output.new_token_ids
        add([0], resumable=False)  # so vLLM says that no further input comes
        return {"tokens": found}

    def generate_while_stopped(self, host: int, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Answer prompts with a tier's host that has stopped, until a request is preempted that the tier alone has."""

        def preempted(core: Any) -> bool:
            if not any(request.num_preemptions for request in core.scheduler.requests.values()):
                return False
            os.kill(host, signal.SIGCONT)
            core.scheduler.reset_connector_cache()
            return True

        return self._generate_until(preempted, prompts, max_tokens)

    def generate_with_reset(self, prompt: list[int], other: list[int], max_tokens: int, after: int) -> dict[str, Any]:
        """Answer a prompt. After so many tokens, answer another one beside it, and have the connector forget it all."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        found: dict[str, list[int]] = {}

        def add(name: str, prompt: list[int], tokens: int) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": prompt}, params)

        def step_until(name: str, tokens: int) -> None:
            while len(found.get(name, ())) < tokens:
                found.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})

        add("first", prompt, max_tokens)
        step_until("first", after)
        add("other", other, 1)
        step_until("other", 1)
        engine.engine_core.engine_core.scheduler.reset_connector_cache()
        step_until("first", max_tokens)
        return {"tokens": found["first"]}

    def generate_with_preemption(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Answer prompts, and have a reset preempt all requests that run once they have half of their tokens."""

        def halfway(core: Any) -> bool:
            running = core.scheduler.running
            if len(running) < len(prompts) or any(r.num_output_tokens < max_tokens // 2 for r in running):
                return False
            core.reset_prefix_cache(True)
            return True

        return self._generate_until(halfway, prompts, max_tokens)

    def _generate_until(self, act: Callable[[Any], bool], prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Answer prompts; call ``act`` with vLLM's engine core after each step until it returns True."""
        client, has_acted = self._llm.llm_engine.engine_core, False

        def get_output() -> Any:
            nonlocal has_acted
            outputs = type(client).get_output(client)
            has_acted = has_acted or act(client.engine_core)
            return outputs

        client.get_output = get_output
        try:
            answer = self.generate(prompts, max_tokens)
        finally:
            del client.get_output
        assert has_acted, "what the test is about never came"
        return answer

    def reset_prefix_cache(self, connector: bool = False) -> dict[str, Any]:
        if connector:
            return {"ok": self._llm.reset_prefix_cache(reset_connector=True)}
        return {"ok": self._llm.reset_prefix_cache()}

    def metrics(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        until = time.monotonic() + _FIGURES_SECONDS
        while time.monotonic() < until:
            self.generate([[1, 2, 3]], 2)
        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                tier = sample.labels.get("tier", "")
                found[f"{name}{{{tier}}}" if tier else name] = float(sample.value)
        return found

    def kv(self) -> dict[str, Any]:
        """Return where the KV lies, who copies it, what the fingerprint was made of for that, what prefill may cost."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.platforms import current_platform

        from kvtiers_vllm.prefill_estimate import estimated_prefill_seconds, operations_per_token

        config = self._llm.llm_engine.vllm_config
        found: dict[str, Any] = {"device": current_platform.get_device_name()}
        self._llm.collective_rpc(_find_kv, args=(found,))
        found["copies"] = type(get_kv_transfer_group().connector_worker.worker._worker._copier).__name__
        found["digested"] = {name: self._digested[name] for name in ("backend", "layout")}
        found["operations_per_token"] = operations_per_token(config)
        found["prefill_seconds"] = estimated_prefill_seconds(config)
        return found

    def time_model(self) -> dict[str, Any]:
        """Have the time that the model takes counted from now on."""
        self._llm.collective_rpc(_time_model, args=(self._model_seconds,))
        return {"ok": True}

    def take_model_seconds(self) -> dict[str, Any]:
        """Return for how many seconds the model has run since the last call."""
        seconds = sum(self._model_seconds)
        self._model_seconds.clear()
        return {"seconds": seconds}

    def trust_every_value(self) -> dict[str, Any]:
        from kvtiers.layout.seal import PlainSeal, SealVerdict

        PlainSeal.check = lambda *_: SealVerdict.OK
        return {"ok": True}

    def change_weights(self, version: str | None = None, reset: bool = True) -> dict[str, Any]:
        """Change the weights in place, or, with a version, say by vLLM's own call which they are; reset its cache."""
        if version is not None:
            self._llm.update_weight_version(version)
        else:
            self._llm.collective_rpc(_change_weights)
        return {"ok": not reset or self._llm.reset_prefix_cache()}

    def reload_weights(self, seen: bool) -> dict[str, Any]:
        """Have the workers reload the weights, by the call that vLLM has for that, or by one of the caller's own."""
        self._llm.collective_rpc("reload_weights" if seen else _reload_weights)
        return {"ok": self._llm.reset_prefix_cache()}

    def sleep(self, level: int) -> dict[str, Any]:
        """Have the engine sleep and wake up again."""
        self._llm.sleep(level)
        self._llm.wake_up()
        return {"ok": True}

    def lose_core(self) -> dict[str, Any]:
        """Have the calls of the engine's core reach nothing of kvtiers'."""
        from kvtiers_vllm import compat

        compat._by_config.clear()
        compat._by_core.clear()
        return {"ok": True}

    def note_prices(self) -> dict[str, Any]:
        """Have the positions noted at which tokens are priced from now on, and return those since the last call."""
        from kvtiers.tiering.estimates import PrefillCost

        noted, self._prices = getattr(self, "_prices", []), []
        seconds = self._seconds = getattr(self, "_seconds", PrefillCost.seconds)

        def note(price: Any, tokens: int, position: float) -> Any:
            self._prices.append((tokens, position))
            return seconds(price, tokens, position)

        PrefillCost.seconds = note
        return {"priced": noted}

    def ignore_adapters(self) -> dict[str, Any]:
        """Have adapters and salts decide nothing but what vLLM's own hashes say of them."""
        from kvtiers_vllm.stack import keys

        keys.derive_hash = lambda block_hash, *_: block_hash
        return {"ok": True}

    def fail_copies(self, lane: str) -> dict[str, Any]:
        """Have every copy in this direction ("store", "load") fail from now on; "" ends that."""
        from kvtiers.gpu.worker import GpuWorker

        advance = self._advance = getattr(self, "_advance", GpuWorker._advance)

        def fail(worker: Any, job: Any) -> bool:
            if job.lane != lane:
                return advance(worker, job)
            job.error = "it was to fail"
            return False

        GpuWorker._advance = fail
        return {"ok": True}

    def cut_jobs(self, chunks: int) -> dict[str, Any]:
        """Have a tier asked for this many chunks a job from now on."""
        self._stack_manager()._manager._jobs._job_rows = chunks
        return {"ok": True}

    def hurry_parts(self, seconds: float) -> dict[str, Any]:
        """Have every pipelined load wait this long in the step in which it begins, and look for further rows then."""
        loads = type(self._stack_manager().pipelined)
        begin = loads.begin

        def begin_late(self: Any, *arguments: Any) -> Any:
            rows = begin(self, *arguments)
            time.sleep(seconds)
            self._manager.look_again()
            return rows

        loads.begin = begin_late
        return {"ok": True}

    def hide_missing_blocks(self) -> dict[str, Any]:
        """Have vLLM take all blocks of pipelined loads as loaded from now on."""
        from kvtiers_vllm.stack.worker import KvtiersWorker

        KvtiersWorker.take_missing_blocks = lambda _: set()
        KvtiersWorker.take_failed_loads = lambda _: set()
        return {"ok": True}

    def pipelined_loads(self) -> dict[str, Any]:
        """Return how many loads have been pipelined so far, and whether some are now."""
        loads = self._stack_manager().pipelined
        return {"begun": loads.begun, "open": loads.are_open()}

    def call(self, path: str, name: str, **arguments: Any) -> dict[str, Any]:
        """Return what a function of this file returns in this process; it takes and returns plain data."""
        return {"result": runpy.run_path(path)[name](**arguments)}

    def _stack_manager(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager

    def shutdown(self, finalize: bool) -> dict[str, Any]:
        self._llm.llm_engine.engine_core.shutdown()
        return {"ok": True}


if __name__ == "__main__":
    main()
