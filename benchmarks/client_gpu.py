"""Throughput of a client whose values lie in GPU memory, beside a copy by hand, values in host memory, and the link.

Lanes take turns, a round after the other, each on new keys: `gpu` gives the client CUDA tensors; `by hand` copies them
to pinned memory, gives the client that, and copies back what it has read; `host` has the values in host memory and
moves them with no GPU at all: the ceiling; `link` copies between pinned memory and the GPU alone. `control` is `gpu`
once more: what its share of `gpu` differs from 1 is noise. Over the `fs` tier, in a folder that lies in memory.
Medians of GB/s; shares are turn by turn. Every byte that `gpu` and `by hand` have read is compared.
"""

import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lib.results import WAYS, at_least, middle_share, options_of, say

from kvtiers import Client, ModelIdentity, open_client

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = [128 << 10, 2 << 20, 8 << 20]
TOTAL = 512 << 20
GOAL_BY_HAND, GOAL_HOST = 1.0, 0.8
PATIENCE = 120.0


class Lanes:
    """The lanes for values of one size. ``there``, ``back``: what is put, and read into, [values, bytes] on the GPU."""

    def __init__(self, client: Client, nbytes: int, count: int) -> None:
        self._client = client
        self._keys: list[bytes] = []
        self._turn = 0
        self.there = torch.randint(256, (count, nbytes), dtype=torch.uint8, device="cuda")
        self.back = torch.zeros_like(self.there)
        self._staged = torch.empty((count, nbytes), dtype=torch.uint8, pin_memory=True)
        self._staged.copy_(self.there)

    def new_keys(self) -> None:
        """Take keys that no lane has used."""
        self._turn += 1
        self._keys = [self._turn.to_bytes(8, "big") + number.to_bytes(8, "big") for number in range(len(self.there))]

    def forget(self) -> None:
        """Remove what this turn has stored."""
        self._client.delete(self._keys)
        self.back.zero_()
        torch.cuda.synchronize()

    def gpu_write(self) -> None:
        """Put tensors of the GPU."""
        assert all(self._client.put(self._keys, list(self.there)).stored)

    def gpu_read(self) -> None:
        """Get into tensors of the GPU."""
        assert all(self._client.get_into(self._keys, list(self.back)))

    def hand_write(self) -> None:
        """Copy to pinned memory, and put that."""
        self._staged.copy_(self.there)
        self.host_write()

    def hand_read(self) -> None:
        """Get into pinned memory, and copy to the GPU."""
        self.host_read()
        self.back.copy_(self._staged)
        torch.cuda.synchronize()

    def host_write(self) -> None:
        """Put pinned memory."""
        assert all(self._client.put(self._keys, list(self._staged.numpy())).stored)

    def host_read(self) -> None:
        """Get into pinned memory."""
        assert all(self._client.get_into(self._keys, list(self._staged.numpy())))

    def link_write(self) -> None:
        """Copy to pinned memory alone."""
        self._staged.copy_(self.there)

    def link_read(self) -> None:
        """Copy from pinned memory alone."""
        self.back.copy_(self._staged)
        torch.cuda.synchronize()


def measure(nbytes: int, rounds: int, folder: str) -> dict[str, Any]:
    """Return GB/s of each lane and way, and their shares."""
    config = {
        "version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "60s",
        "secondary": [{"type": "fs", "path": folder, "capacity": "8GiB", "min_free": 0}],
    }  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {}
    with open_client(config, ModelIdentity("bench", weights="w"), nbytes, deadline=PATIENCE) as client:
        lanes = Lanes(client, nbytes, TOTAL // nbytes)
        calls: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "gpu": (lanes.gpu_write, lanes.gpu_read),
            "by hand": (lanes.hand_write, lanes.hand_read),
            "host": (lanes.host_write, lanes.host_read),
            "link": (lanes.link_write, lanes.link_read),
            "control": (lanes.gpu_write, lanes.gpu_read),
        }
        for turn in range(rounds + 1):
            for name, ways in calls.items():
                lanes.new_keys()
                for way, call in zip(WAYS, ways, strict=True):
                    begun = time.perf_counter()
                    call()
                    if turn:  # the first round pins, and maps what the hosts write to
                        found.setdefault(name, {}).setdefault(way, []).append(TOTAL / (time.perf_counter() - begun))
                if name in ("gpu", "by hand", "control"):
                    assert torch.equal(lanes.there, lanes.back)
                lanes.forget()
    rates = {name: {way: statistics.median(all_) / 1e9 for way, all_ in ways.items()} for name, ways in found.items()}
    shares = {
        name: {way: middle_share(found["gpu"][way], found[name][way]) for way in WAYS}
        for name in found
        if name != "gpu"
    }
    return {"nbytes": nbytes, "rates": rates, "shares": shares}


def report(found: dict[str, Any]) -> None:
    """Print a table."""
    print(f"{found['device']}, {found['processors']} processors; GB/s write / read")
    names = list(found["sizes"][0]["rates"])
    print("      KiB" + "".join(f"{name:>16}" for name in names))
    for one in found["sizes"]:
        cells = (f"{one['rates'][name]['write']:.2f} / {one['rates'][name]['read']:.2f}" for name in names)
        print(f"{one['nbytes'] >> 10:9}" + "".join(f"{cell:>16}" for cell in cells))


def results(rounds: int, path: Path) -> dict[str, Any]:
    """Return what was measured, and the goals."""
    logging.getLogger("kvtiers").setLevel(logging.ERROR)
    sizes = []
    for nbytes in SIZES:
        with tempfile.TemporaryDirectory(dir=path, prefix="kvtiers-bench-") as folder:
            sizes.append(measure(nbytes, rounds, folder))
    goals = []
    for name, goal in (("by hand", GOAL_BY_HAND), ("host", GOAL_HOST)):
        for way in WAYS:
            by_size = {f"{one['nbytes'] >> 10} KiB": one["shares"][name][way] for one in sizes}
            goals.append(at_least(f"{way}: GPU memory of {name}", min(by_size.values()), goal) | {"by_size": by_size})
    return {"device": torch.cuda.get_device_name(), "processors": os.cpu_count(), "sizes": sizes, "goals": goals}


def main() -> None:
    """Measure, and print."""
    parser = options_of(__doc__, "few rounds")
    parser.add_argument("--path", type=Path, default=Path("/dev/shm"), help="for the tier's folder (/dev/shm)")
    options = parser.parse_args()
    if torch.cuda.is_available():
        say(results(3 if options.quick else 7, options.path), report, as_json=options.json)
    else:
        nothing = {"skipped": "no CUDA device", "goals": []}
        say(nothing, lambda _: print("no CUDA device: nothing to measure here"), as_json=options.json)


if __name__ == "__main__":
    main()
