"""One vLLM engine in a process of its own: commands come as lines of JSON, answers go as lines of JSON."""

import json
import os
import sys
import time
from typing import Any

_FIGURES_SECONDS = 0.2  # steps bring figures, and the whole stack reports them ten times a second


def main() -> None:
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    options = json.loads(sys.argv[2])
    try:
        engine = Engine(options)
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)
        raise
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            answer = getattr(engine, name)(**command)
        except Exception as error:  # noqa: BLE001 -- the test's own process raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out)
        if name == "shutdown":
            return


def _change_weights(worker: Any) -> None:
    for name, weight in worker.model_runner.model.named_parameters():
        if "input_layernorm" in name:
            weight.data.neg_()


class Engine:
    """The commands."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None = None,
        adapter: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        inputs = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        lora = None
        if adapter is not None:
            anew = adapter.get("anew", False)
            lora = LoRARequest(adapter["name"], adapter["number"], adapter["path"], load_inplace=anew)
        results = self._llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        return {
            "tokens": [list(result.outputs[0].token_ids) for result in results],
            "cached": [result.num_cached_tokens or 0 for result in results],
        }

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

    def trust_every_value(self) -> dict[str, Any]:
        from kvtiers.secondary import mover

        mover.check_value = lambda *_: mover.SealVerdict.OK
        return {"ok": True}

    def change_weights(self, version: str | None = None) -> dict[str, Any]:
        """Change the weights in place, or, with a version, say by vLLM's own call which they are."""
        if version is not None:
            self._llm.llm_engine.set_weight_version(version)
        else:
            self._llm.collective_rpc(_change_weights)
        return {"ok": self._llm.reset_prefix_cache()}

    def ignore_adapters(self) -> dict[str, Any]:
        """Have adapters and salts decide nothing but what vLLM's own hashes say of them."""
        from kvtiers.integrations.vllm.stack import keys

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

    def shutdown(self) -> dict[str, Any]:
        self._llm.llm_engine.engine_core.shutdown()
        return {"ok": True}


if __name__ == "__main__":
    main()
