"""The estimate of what computing a prompt's token takes, before the engine has computed any.

::

    seconds a token = operations a token of one rank / (0.4 x the peak of its GPU or of its processor cores)

Operations are vLLM's own count (``vllm.v1.metrics.perf``), of a prompt of 8,192 tokens. The peak is that of dense
matrix products in bfloat16: CUDA cores x highest clock, which NVML reports without a CUDA context, x operations a core
and clock (NVIDIA's white paper of each architecture). Engines reach 0.5 to 0.6 of it with a large model: the estimate
is high on purpose, so that a first load is not given up because a tier looks slow in its first moment. Weights in 8
bits are computed up to twice as fast.

A processor's peak is that of its vector units' multiply-adds in float32, or of its matrix units where the model is in
bfloat16, at 2 GHz. Without it an engine on a CPU would be taken for a small GPU, 100 times as fast as it is, and give
its first loads up after ``lookup_wait``.
"""

import logging
import math
import os
from pathlib import Path
from typing import Any

__all__ = ["estimated_prefill_seconds", "operations_per_token", "peak_of_cores", "peak_operations"]

_log = logging.getLogger("kvtiers.vllm")
_TOKENS = 8192
_REACHED = 0.4
_OPERATIONS = {
    (7, 0): 16,
    (7, 5): 16,
    (8, 0): 32,
    (8, 6): 8,
    (8, 9): 8,
    (9, 0): 32,
    (10, 0): 64,
    (10, 3): 64,
    (12, 0): 8,
}
"""Operations of one CUDA core in one clock, by compute capability; a multiply and an add are two."""

_CORE_CLOCK = 2e9
_CORE_OPERATIONS = {"amx_bf16": 1024, "avx512f": 64, "avx2": 32, "asimd": 16}
"""Operations of one processor core in one clock, by the flag in /proc/cpuinfo: the first that it has counts."""


def estimated_prefill_seconds(vllm_config: Any) -> float | None:
    """Return the estimated seconds to compute a token of a prompt; None where model or device is not known."""
    try:
        operations = operations_per_token(vllm_config)
        peak = _peak_of_cores(vllm_config) if _is_cpu() else _peak_of_first_gpu()
    except Exception as error:  # noqa: BLE001 -- vLLM's and NVML's own code, of any release; core has a prior of its own
        _log.debug("what computing a prompt takes is not estimated: %s", error)
        return None
    seconds = operations / (_REACHED * peak) if peak else 0.0
    return seconds if 0 < seconds < math.inf else None


def peak_operations(name: str, capability: tuple[int, int], cores: int, clock_mhz: int) -> float:
    """Return the peak of dense bfloat16 products, in operations a second; 0 for an architecture not known here."""
    share = 0.5 if "GeForce" in name else 1.0  # they add in 32 bits at half of the rate
    return share * _OPERATIONS.get(capability, 0) * cores * clock_mhz * 1e6


def operations_per_token(vllm_config: Any) -> float:
    """Return the operations that one rank makes for a token of a long prompt, by vLLM's count."""
    from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics

    prompt = ExecutionContext.from_single_request(_TOKENS, _TOKENS, is_prefill=True)
    return float(ModelMetrics(vllm_config).get_num_flops(prompt)) / _TOKENS


def peak_of_cores(cpuinfo: str, cores: float, *, is_bfloat16: bool) -> float:
    """Return the peak of so many cores, in operations a second; 0 for a processor not known here.

    ``cpuinfo``: the text of /proc/cpuinfo. ``is_bfloat16``: the model computes in it, as matrix units do.
    """
    line = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    flags = set(line.split()) - (set() if is_bfloat16 else {"amx_bf16"})
    return cores * _CORE_CLOCK * next((count for flag, count in _CORE_OPERATIONS.items() if flag in flags), 0)


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _peak_of_cores(vllm_config: Any) -> float:
    cores = len(os.sched_getaffinity(0)) / max(1, int(vllm_config.parallel_config.tensor_parallel_size or 1))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = min(cores, int(threads)) if threads.isdecimal() and int(threads) else cores
    is_bfloat16 = str(vllm_config.model_config.dtype) == "torch.bfloat16"
    return peak_of_cores(Path("/proc/cpuinfo").read_text(errors="replace"), cores, is_bfloat16=is_bfloat16)


def _peak_of_first_gpu() -> float:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return 0.0
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    nvml.nvmlInit()
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(current_platform.device_id_to_physical_device_id(0))
        if _is_divided(nvml, gpu):
            return 0.0
        return peak_operations(
            str(nvml.nvmlDeviceGetName(gpu)),
            tuple(nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
            nvml.nvmlDeviceGetNumGpuCores(gpu),
            nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        )
    finally:
        nvml.nvmlShutdown()


def _is_divided(nvml: Any, gpu: Any) -> bool:
    """Return whether the GPU is divided by MIG: NVML's figures are those of all its parts then."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except nvml.NVMLError_NotSupported:
        return False
