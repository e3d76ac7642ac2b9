"""Where the KV tensors of a test lie, and how they are copied: host memory everywhere, CUDA where there is a device."""

import contextlib
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvtiers.gpu.settings import CopySettings
from kvtiers.gpu.worker import GpuWorker
from kvtiers.region.client import RegionJoin
from kvtiers.region.region import AnonymousRegion

SMALL_RING = {"ring_bytes": 1 << 16, "pin_piece_bytes": 1 << 14}


def pytest_collection_modifyitems(config, items):
    del config
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(
                    pytest.mark.skip(reason="no CUDA device; run `make test-gpu` on a machine that has one")
                )


@dataclass
class Place:
    """Where tensors lie, and the settings of the workers that copy them."""

    kind: str
    settings: CopySettings

    def put(self, array):
        """Return a tensor there with the bytes of this numpy array, and its shape."""
        if array is None or self.kind == "numpy":
            return None if array is None else array.copy()
        return torch.from_numpy(array.copy()).to(self.kind)

    def get(self, tensor):
        """Return its bytes as a numpy array."""
        return tensor if tensor is None or self.kind == "numpy" else tensor.cpu().numpy()

    @property
    def is_cuda(self):
        return self.kind == "cuda"


def cuda(name, **settings):
    return pytest.param(Place("cuda", CopySettings(**SMALL_RING, **settings)), id=f"cuda-{name}", marks=pytest.mark.gpu)


HOST_PLACES = [
    pytest.param(Place("numpy", CopySettings()), id="numpy"),
    pytest.param(Place("cpu", CopySettings()), id="cpu"),
]
FIXED_CUDA_PLACES = [
    cuda("staged", store="staged", load="staged"),
    cuda("direct", store="direct", load="direct"),
    cuda("pages", store="pages", load="pages"),
    cuda("unpinned", pin=False),
]
CUDA_PLACES = [*FIXED_CUDA_PLACES, cuda("auto")]


@pytest.fixture(params=[*HOST_PLACES, *CUDA_PLACES])
def place(request):
    return request.param


@pytest.fixture
def open_worker():
    """Open workers on anonymous regions of this process; all are shut down in the end."""
    with contextlib.ExitStack() as closing:

        def begin(layout, tensors, place, *, num_rows=8, region=None, rank=0, rank_map=None, wait=True):
            region = region or AnonymousRegion.create(layout, num_rows=num_rows)
            join = RegionJoin.in_process(region, layout, rank)
            worker = GpuWorker(layout, tensors, join, rank=rank, rank_map=rank_map, copying=place.settings)
            closing.callback(worker.shutdown)
            if place.is_cuda and place.settings.pin and wait:
                wait_until_pinned(worker)
            return worker, region

        yield begin


def wait_until_pinned(worker):
    end = time.monotonic() + 60
    while not worker._attached:  # the copy thread does that by itself as soon as the rank has joined
        assert time.monotonic() < end, "the worker has not taken the region's memory"
        time.sleep(0.001)
    pinned = getattr(worker._copier, "pinned", None)  # a rank that holds no tensor has nothing to pin for
    assert pinned is None or pinned.wait(60), pinned.given_up


@pytest.fixture
def rows_of():
    """A region's memory as an array, a row a line."""
    return lambda region: np.frombuffer(region.view, np.uint8).reshape(region.num_rows, -1)
