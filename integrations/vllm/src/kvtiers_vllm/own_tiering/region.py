"""The file behind vLLM's mapped region, so that a tier host can map it too.

The region and its name are vLLM's: it is opened here, never unlinked, resized, pinned or sealed.
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["MappedFile", "address_of", "open_mapped_file"]

_MAPS = Path("/proc/self/maps")


class MappedFile(NamedTuple):
    """An open file whose first ``nbytes`` are the memory in question."""

    fd: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    flags: str
    offset: int
    device: tuple[int, int]
    inode: int
    path: str

    @classmethod
    def parse(cls, line: str) -> "_Mapping":
        """Parse a line of /proc/self/maps."""
        fields = line.rstrip("\n").split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        major, _, minor = fields[3].partition(":")
        return cls(
            int(start, 16),
            int(end, 16),
            fields[1],
            int(fields[2], 16),
            (int(major, 16), int(minor, 16)),
            int(fields[4]),
            fields[5] if len(fields) > 5 else "",
        )


def address_of(view: memoryview) -> int:
    """Return where a flat, writable view's memory begins in this process."""
    return ctypes.addressof((ctypes.c_ubyte * 0).from_buffer(view))


def open_mapped_file(address: int, nbytes: int) -> MappedFile:
    """Open the file that is mapped at ``address``, from its start; OSError, with the reason, if that cannot be done.

    The file that is opened is the one that is mapped: its device, inode and length are compared.
    """
    mapping = _mapping_at(address, _MAPS.read_text(encoding="utf-8", errors="surrogateescape"))
    if not mapping.path.startswith("/") or not mapping.inode:
        raise OSError("there is no file behind it")
    if "s" not in mapping.flags:
        raise OSError(f"{mapping.path} is mapped privately")
    if address != mapping.start or mapping.offset != 0:
        raise OSError(f"it does not begin where {mapping.path} begins")
    if mapping.end - mapping.start < nbytes:
        raise OSError(f"{mapping.end - mapping.start} bytes of {mapping.path} are mapped, expected {nbytes}")
    fd = os.open(mapping.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    found = os.fstat(fd)
    same = (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino) == (*mapping.device, mapping.inode)
    if not same or found.st_size < nbytes:
        os.close(fd)
        raise OSError(f"{mapping.path} is another file by now")
    return MappedFile(fd, nbytes)


def _mapping_at(address: int, maps: str) -> _Mapping:
    for line in maps.splitlines():
        mapping = _Mapping.parse(line)
        if mapping.start <= address < mapping.end:
            return mapping
    raise OSError("it is not mapped")
