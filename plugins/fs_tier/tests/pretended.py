"""File systems of a size, or with limits, of the test's own, for those who may not mount one.

The operating system's answers are changed, below one folder, to what such a file system would say. Nothing of the tier
is replaced.
"""

import errno
import os
import threading
from pathlib import Path

PAGE = 4096
_UNITS = {"k": 1 << 10, "m": 1 << 20}


def pretend_mounts(monkeypatch, file: Path, *mounts: tuple[str, str]) -> None:
    """Let the machine's mounts be these: (point, kind)."""
    lines = [f"{number} 1 8:1 / {point} rw - {kind} none rw\n" for number, (point, kind) in enumerate(mounts)]
    file.write_text("".join(lines))
    monkeypatch.setattr("kvtiers_fs.diagnosis._MOUNTS", file)


class PretendedMount:
    """One folder that behaves as a ``tmpfs`` or ``ramfs`` with these mount options."""

    def __init__(self, monkeypatch, point: Path, kind: str, options: dict[str, str]) -> None:
        self._point = point
        self._used = 0
        self._lock = threading.Lock()
        self._os = {name: getattr(os, name) for name in ("open", "write", "writev", "unlink", "rename", "fstatvfs")}
        size = options.get("size")
        self._size = int(size[:-1]) * _UNITS[size[-1]] if size else 0
        self._inodes = int(options.get("nr_inodes", 0))
        pretend_mounts(monkeypatch, point.with_suffix(".mounts"), ("/", "ext4"), (str(point), kind))
        for name in self._os if size else ("open",):
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))
        self._is_direct = bool(size)

    def _is_below(self, path) -> bool:
        return str(path).startswith(f"{self._point}/") or path == self._point

    def _path(self, name, dir_fd) -> Path:
        return Path(name) if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink() / name

    def _bytes_of(self, path: Path) -> int:
        try:
            return path.lstat().st_size if self._is_below(path) else 0
        except OSError:
            return 0

    def _open(self, path, flags, *args, dir_fd=None, **options):
        if flags & os.O_DIRECT and not self._is_direct and self._is_below(self._path(path, dir_fd)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._os["open"](path, flags, *args, dir_fd=dir_fd, **options)

    def _write(self, fd, data):
        if not self._is_below(Path(f"/proc/self/fd/{fd}").readlink()):
            return self._os["write"](fd, data)
        with self._lock:
            room = self._size - self._taken()
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with memoryview(data)[:room] as fits:
                written = self._os["write"](fd, fits)
            self._used += written
            return written

    def _writev(self, fd, parts):
        return self._write(fd, parts[0] if len(parts) == 1 else b"".join(parts))

    def _unlink(self, path, *, dir_fd=None):
        with self._lock:
            nbytes = self._bytes_of(self._path(path, dir_fd))
            self._os["unlink"](path, dir_fd=dir_fd)
            self._used -= nbytes

    def _rename(self, source, target, *, src_dir_fd=None, dst_dir_fd=None):
        with self._lock:
            nbytes = self._bytes_of(self._path(target, dst_dir_fd))
            self._os["rename"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            self._used -= nbytes

    def _taken(self) -> int:
        """Return the bytes in use: what the tier wrote, and what others put beside it."""
        return self._used + self._bytes_of(self._point / "others")

    def _fstatvfs(self, fd):
        real = self._os["fstatvfs"](fd)
        if not self._is_below(Path(f"/proc/self/fd/{fd}").readlink()):
            return real
        free = max(0, self._size - self._taken()) // PAGE
        files = self._inodes and self._inodes - sum(len(names) for *_, names in os.walk(self._point))
        return os.statvfs_result(
            (PAGE, PAGE, self._size // PAGE, free, free, self._inodes, files, files, real.f_flag, real.f_namemax)
        )
