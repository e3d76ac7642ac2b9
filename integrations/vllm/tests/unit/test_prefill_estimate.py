"""The estimate of a prompt's cost: the peak of known GPUs as their makers state it, and none where anything fails."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvtiers_vllm.prefill_estimate import estimated_prefill_seconds, peak_of_cores, peak_operations


@pytest.mark.parametrize(
    ("name", "capability", "cores", "mhz", "stated"),
    [
        ("NVIDIA T4", (7, 5), 2560, 1590, 65e12),
        ("NVIDIA A100", (8, 0), 6912, 1410, 312e12),
        ("NVIDIA A10", (8, 6), 9216, 1695, 125e12),
        ("NVIDIA L4", (8, 9), 7424, 2040, 121e12),
        ("NVIDIA L40S", (8, 9), 18176, 2520, 362e12),
        ("NVIDIA H100 SXM", (9, 0), 16896, 1830, 989e12),
        ("NVIDIA B200", (10, 0), 18944, 1965, 2250e12),
        ("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 24064, 2617, 504e12),
        ("NVIDIA GeForce RTX 4090", (8, 9), 16384, 2520, 165e12),
    ],
)
def test_the_peak_is_near_the_one_in_the_data_sheet(name, capability, cores, mhz, stated):
    assert peak_operations(name, capability, cores, mhz) == pytest.approx(stated, rel=0.07)


def test_of_an_architecture_that_is_not_known_there_is_none():
    assert peak_operations("NVIDIA Tesla P40", (6, 1), 3840, 1531) == 0


@pytest.fixture
def gpu(monkeypatch):
    """Play a GPU to vLLM and NVML; its facts may be changed."""
    facts = SimpleNamespace(is_divided=False, is_cpu=False, operations=16e9 * 8192)

    class NotSupportedError(Exception):
        pass

    def mig_mode(_gpu):
        if facts.is_divided is None:
            raise NotSupportedError
        return [int(facts.is_divided), 0]

    nvml = SimpleNamespace(
        NVMLError_NotSupported=NotSupportedError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda _index: "gpu",
        nvmlDeviceGetName=lambda _gpu: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetMigMode=mig_mode,
        nvmlDeviceGetCudaComputeCapability=lambda _gpu: [9, 0],
        nvmlDeviceGetNumGpuCores=lambda _gpu: 16896,
        nvmlDeviceGetMaxClockInfo=lambda _gpu, _clock: 1980,
    )
    count = SimpleNamespace(get_num_flops=lambda _prompt: facts.operations)
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_cpu=lambda: facts.is_cpu, device_id_to_physical_device_id=lambda index: index
    )
    perf = {
        "ExecutionContext": SimpleNamespace(from_single_request=lambda *_a, **_b: None),
        "ModelMetrics": lambda _c: count,
    }
    for name, content in {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.perf": perf,
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils": {},
        "vllm.utils.import_utils": {"import_pynvml": lambda: nvml},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return facts


@pytest.mark.parametrize("divided", [False, None], ids=["not divided", "cannot be divided"])
def test_a_token_costs_its_operations_at_two_fifths_of_the_peak(gpu, divided):
    gpu.is_divided = divided
    assert estimated_prefill_seconds(SimpleNamespace()) == pytest.approx(16e9 / (0.4 * 1070.5e12), rel=0.001)


def test_of_a_part_of_a_gpu_or_a_model_that_vllm_cannot_count_there_is_no_estimate(gpu):
    gpu.operations = 0
    assert estimated_prefill_seconds(SimpleNamespace()) is None
    gpu.operations, gpu.is_divided = 1e13, True
    assert estimated_prefill_seconds(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("flags", "is_bfloat16", "operations"),
    [
        ("flags\t\t: fpu avx avx2 sse2", True, 32),
        ("flags\t\t: fpu avx2 avx512f", True, 64),
        ("flags\t\t: fpu avx2 avx512f amx_bf16", True, 1024),
        ("flags\t\t: fpu avx2 avx512f amx_bf16", False, 64),
        ("Features\t: fp asimd", True, 16),
        ("", True, 0),
    ],
)
def test_the_peak_of_cores_is_that_of_their_widest_units_at_a_low_clock(flags, is_bfloat16, operations):
    text = f"processor\t: 0\n{flags}\nbugs\t: avx512f\n"
    assert peak_of_cores(text, 3, is_bfloat16=is_bfloat16) == 3 * operations * 2e9


def test_an_engine_on_a_cpu_is_not_taken_for_a_gpu(gpu, monkeypatch):
    """Else its first load would be given up after ``lookup_wait``, where computing takes seconds."""
    gpu.is_cpu, gpu.operations = True, 1e9 * 8192
    parallel, model = SimpleNamespace(tensor_parallel_size=1), SimpleNamespace(dtype="torch.float32")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = estimated_prefill_seconds(SimpleNamespace(parallel_config=parallel, model_config=model))
    assert found is None or 1e9 / (0.4 * 128e9) <= found <= 1e9 / (0.4 * 32e9)


def test_without_vllms_count_or_a_gpu_there_is_no_estimate():
    assert estimated_prefill_seconds(SimpleNamespace()) is None
    assert estimated_prefill_seconds(None) is None
