"""Which copier a rank's KV tensors need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvtiers.api import ConfigError
from kvtiers.gpu.copier import Copier, HostCopies
from kvtiers.gpu.host_copy import HostCopier
from kvtiers.gpu.tensors import kv_pages
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.rank_map import RankMap

__all__ = ["CopyMethod", "CopySettings", "open_copier"]

CopyMethod: TypeAlias = Literal["staged", "direct", "pages"]


@dataclass(frozen=True, slots=True)
class CopySettings:
    """How a CUDA worker trades GPU memory and multiprocessors for speed. Host memory needs none of it.

    ``store``, ``load``: the method of each direction; "auto" measures which is best. ``ring_bytes``: GPU memory of all
    staging slots; less is slower beside kernels that fill the GPU, whose end a gather has to wait for. ``slots``: of
    each of the two big lanes.
    ``staging_programs``: programs of the kernel between tensors and slots (0: one for each multiprocessor);
    ``direct_programs``: of the kernel that reaches into rows, which holds that many multiprocessors for as long as the
    link takes. ``pin``: whether rows are pinned, ``pin_piece_bytes`` at most at a time, and as few as it takes to hold
    the driver for no longer than ``pin_seconds``. ``pin_share``: of the driver's time that pinning takes while the
    engine works; 1.0: it never rests.
    """

    store: CopyMethod | Literal["auto"] = "auto"
    load: CopyMethod | Literal["auto"] = "auto"
    ring_bytes: int = 256 << 20
    slots: int = 4
    staging_programs: int = 0
    direct_programs: int = 16
    pin: bool = True
    pin_piece_bytes: int = 64 << 20
    pin_seconds: float = 0.002
    pin_share: float = 0.1

    def __post_init__(self) -> None:
        small = [
            f"{name} is {getattr(self, name)}, expected {least} or more"
            for name, least in (("ring_bytes", 1 << 16), ("slots", 2), ("staging_programs", 0),
                                ("direct_programs", 1), ("pin_piece_bytes", 1))
            if getattr(self, name) < least
        ]  # fmt: skip
        if not 0 < self.pin_share <= 1:
            small.append(f"pin_share is {self.pin_share}, expected more than 0, at most 1")
        if small:
            raise ConfigError([f"copy settings: {problem}" for problem in small])


def open_copier(
    layout: CacheLayout, rank: int, kv_tensors: Sequence[Any], rank_map: RankMap | None, settings: CopySettings
) -> Copier:
    """Return the copier for these tensors: CUDA's, or the host's. ConfigError if they do not fit the layout."""
    pages = kv_pages(layout, rank, kv_tensors)
    device = next((page.device for page in pages if page is not None), None)
    if device is None:
        return HostCopies(HostCopier(layout, rank, kv_tensors, rank_map))
    from kvtiers.gpu.cuda_copy import CudaCopies  # torch is loaded already: these are its tensors

    return CudaCopies(layout, rank, pages, rank_map, settings, device)
