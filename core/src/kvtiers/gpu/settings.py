"""Settings of copies between a CUDA device and rows."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvtiers.api import ConfigError

__all__ = ["CopyMethod", "CopySettings"]

CopyMethod: TypeAlias = Literal["staged", "direct", "pages"]


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Settings by which a CUDA worker trades GPU memory and multiprocessors for speed; unused for host memory.

    ``store``, ``load``: the method of each direction; "auto" measures which is fastest. ``ring_bytes``: GPU memory of
    all staging slots; less is slower beside kernels that fill the GPU, whose end a gather has to wait for. ``slots``:
    of each of the two big lanes. ``staging_programs``: programs of the kernel between tensors and slots (0: one for
    each multiprocessor); ``direct_programs``: of the kernel that reaches into rows, which holds that many
    multiprocessors for as long as the link takes. ``pin``: whether rows are pinned, ``pin_piece_bytes`` at most at a
    time, and as few as it takes to hold the driver for no longer than ``pin_seconds``. ``pin_share``: of the driver's
    time that pinning takes while the engine works; 1.0: it never rests.
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
