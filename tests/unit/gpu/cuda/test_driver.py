"""Calls of the CUDA driver, on a played one that says yes to all."""

import ctypes

import numpy as np
import pytest

from kvtiers.gpu.cuda import driver as cuda_driver
from kvtiers.gpu.cuda.driver import CudaDriver


class Yes:
    """Every function there is, each with a success; what the batched copies were given."""

    def __init__(self):
        self.batches, self.orders = [], []

    def __getattr__(self, name):
        return lambda *_: 0

    def cuMemcpyBatchAsync(self, to, source, nbytes, count, *rest):  # noqa: N802 -- the driver's name
        self.orders.append(rest[0]._obj.order)
        arrays = ((ctypes.c_int64 * count).from_address(address) for address in (to, source, nbytes))
        self.batches.append([list(array) for array in arrays])
        return 0


@pytest.mark.parametrize("count", [0, 1, 256, 257, 1000])
def test_a_batch_of_copies_is_given_to_the_driver_256_at_a_time(monkeypatch, count) -> None:
    """Over a call of 1,020 tiny copies driver 580 loses the context of an H100."""
    played = Yes()
    monkeypatch.setattr(cuda_driver, "_load", lambda kind: played)
    to, source, nbytes = np.arange(3 * count, dtype=np.int64).reshape(3, count)
    CudaDriver(0).copy_batch(to, source, nbytes, 7, source_is_settled=True)
    assert [len(batch[0]) for batch in played.batches] == [256] * (count // 256) + [count % 256] * (count % 256 > 0)
    for index, array in enumerate((to, source, nbytes)):
        assert [value for batch in played.batches for value in batch[index]] == array.tolist()


@pytest.mark.parametrize(("source_is_settled", "order"), [(True, 3), (False, 1)])
def test_a_source_that_is_being_written_is_read_in_the_order_of_the_stream(
    monkeypatch, source_is_settled, order
) -> None:
    """CU_MEMCPY_SRC_ACCESS_ORDER_STREAM is 1, ANY is 3: with it the driver may read before the stream's turn."""
    played = Yes()
    monkeypatch.setattr(cuda_driver, "_load", lambda kind: played)
    arrays = np.arange(6, dtype=np.int64).reshape(3, 2)
    CudaDriver(0).copy_batch(*arrays, 7, source_is_settled=source_is_settled)
    assert played.orders == [order]
