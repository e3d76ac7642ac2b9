"""The baselines of copies to and from a GPU: the link's own rate, and a model's work beside them."""

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["BATCH", "IN_FLIGHT", "MATRIX", "Products", "link_beside", "peaks", "timed", "while_for"]

BATCH = 1 << 30
IN_FLIGHT = 4
MATRIX = 8192


def timed(call: Callable[[], None], repeats: int) -> float:
    """Return the median seconds of a call, after one that warms up."""
    call()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def while_for(seconds: float) -> Callable[[], bool]:
    """Return a question that is answered by True for so long."""
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until


def peaks(repeats: int) -> dict[str, float]:
    """Return GB/s of contiguous pinned copies: store (to the host), load, both in sum."""
    host = [torch.empty(BATCH, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(BATCH, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def move(ways: list[int]) -> None:
        for _ in range(IN_FLIGHT):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    (device if way else host)[way].copy_((host if way else device)[way], non_blocking=True)
        torch.cuda.synchronize()

    ways = {"store": [0], "load": [1], "both": [0, 1]}
    return {
        name: IN_FLIGHT * BATCH * len(some) / 1e9 / timed(lambda some=some: move(some), repeats)
        for name, some in ways.items()
    }


class Products:
    """A model's stand-in: matrix products that fill the GPU, at most three of them queued."""

    def __init__(self) -> None:
        self.a, self.b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.out = torch.empty_like(self.a)
        self.events = [torch.cuda.Event(blocking=True) for _ in range(3)]
        self.count = 0

    def step(self) -> None:
        """Launch one, once no more than two are in flight."""
        event = self.events[self.count % 3]
        event.synchronize()
        torch.matmul(self.a, self.b, out=self.out)
        event.record()
        self.count += 1

    def rate(self, goes_on: Callable[[], bool]) -> float:
        """Return products a second for as long as it goes on."""
        for _ in range(5):
            self.step()
        torch.cuda.synchronize()
        begin, first = time.perf_counter(), self.count
        while goes_on():
            self.step()
        torch.cuda.synchronize()
        return (self.count - first) / (time.perf_counter() - begin)


def link_beside(products: Products, copies: int) -> dict[str, float]:
    """Return GB/s of contiguous pinned copies beside the products: what the link gives then, to any copy."""
    host = torch.empty(BATCH, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(BATCH, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    found = {}
    for way, to, source in (("store", host, device), ("load", device, host)):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(copies)]
        with torch.cuda.stream(stream):
            for event in events:
                to.copy_(source, non_blocking=True)
                event.record()
        products.rate(lambda last=events[-1]: not last.query())
        found[way] = (copies - 1) * BATCH / 1e6 / events[0].elapsed_time(events[-1])
    return found
