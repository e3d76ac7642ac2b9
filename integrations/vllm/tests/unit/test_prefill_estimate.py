"""The estimate of a prompt's cost: the peak of known GPUs as their makers state it, and none where anything fails."""

from types import SimpleNamespace

import pytest

from kvtiers_vllm.prefill_estimate import estimated_prefill_seconds, peak_operations


@pytest.mark.parametrize(
    ("capability", "cores", "mhz", "stated"),
    [
        pytest.param((7, 5), 2560, 1590, 65e12, id="T4"),
        pytest.param((8, 0), 6912, 1410, 312e12, id="A100"),
        pytest.param((8, 6), 9216, 1695, 125e12, id="A10"),
        pytest.param((8, 9), 7424, 2040, 121e12, id="L4"),
        pytest.param((8, 9), 18176, 2520, 362e12, id="L40S"),
        pytest.param((9, 0), 16896, 1830, 989e12, id="H100 SXM"),
        pytest.param((10, 0), 18944, 1965, 2250e12, id="B200"),
    ],
)
def test_the_peak_is_near_the_one_in_the_data_sheet(capability, cores, mhz, stated):
    assert peak_operations(capability, cores, mhz) == pytest.approx(stated, rel=0.07)


def test_of_an_architecture_that_is_not_known_there_is_none():
    assert peak_operations((6, 1), 3840, 1531) == 0


def test_without_vllms_count_or_a_gpu_there_is_no_estimate():
    assert estimated_prefill_seconds(SimpleNamespace()) is None
    assert estimated_prefill_seconds(None) is None
