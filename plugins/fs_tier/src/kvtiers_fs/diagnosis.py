"""The diagnosis of the directory and its file system, for ``kvtiers check``."""

import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtiers.api import Finding
from kvtiers.api.units import format_duration, format_size
from kvtiers_fs.config import FsConfig
from kvtiers_fs.directory import Directory
from kvtiers_fs.limits import ADVICE, Limits
from kvtiers_fs.quota import UsageFile
from kvtiers_fs.values import try_direct

__all__ = [
    "Mount",
    "diagnose",
    "examine_access",
    "examine_direct",
    "examine_file_system",
    "examine_skipped",
    "mount_of",
]

_MOUNTS = Path("/proc/self/mountinfo")
_VOLATILE = {"tmpfs", "ramfs"}
_LAYERED = {"overlay", "aufs", "fuse.fuse-overlayfs"}
_CLOCK_SECONDS = 60.0
_DIRECT = {True: "on", False: "off", "cold": "for reads of what the page cache does not have"}


class Mount(NamedTuple):
    """A mounted file system: where, and its type."""

    point: str
    kind: str


def diagnose(
    config: FsConfig, directory: Directory, usage: UsageFile, value_bytes: int, limits: Limits | None
) -> Sequence[Finding]:
    """Return the findings. ``limits``: None of a store that is read-only, which keeps none."""
    findings = [
        *examine_file_system(config.path),
        *examine_access(config, directory),
        *_room(config, directory, usage),
        *examine_skipped(directory),
        *_inodes(config, directory, value_bytes),
    ]
    if limits is not None:
        findings += [*examine_limits(limits), *examine_direct(config, directory), *_locks(usage), *_clock(usage)]
    return findings


def mount_of(path: Path) -> Mount | None:
    """Return the mounted file system that a path is on; None if the machine does not say."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = None
    for line in lines:
        mount, _, kind = line.partition(" - ")
        point = mount.split()[4].replace("\\040", " ")
        # The last of those that are as near as possible: a later mount covers an earlier one.
        if path.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point, kind.split()[0])
    return found


def examine_file_system(path: Path) -> Iterator[Finding]:
    """Yield what there is to say about the file system."""
    mount = mount_of(path.resolve())
    if mount is None:
        return
    what = f"{mount.kind}, mounted at {mount.point}"
    if mount.kind in _VOLATILE:
        yield Finding("warning", f"{what}: values take memory and end with the machine", "use a directory on a disk")
    elif mount.kind in _LAYERED:
        yield Finding(
            "warning",
            f"{what}, a container's own layer: values end with the container, and writing is slow",
            "mount a volume, and use a directory on it",
        )
    else:
        yield Finding("ok", f"file system: {what}")


def examine_access(config: FsConfig, directory: Directory) -> Iterator[Finding]:
    """Yield what there is to say about who may look into the directory."""
    about = os.fstat(directory.fd)
    mode = stat.S_IMODE(about.st_mode)
    who = f"owner uid {about.st_uid}, group {about.st_gid}, mode {mode:04o}"
    if mode & 0o007:
        yield Finding(
            "warning", f"others may look into the directory ({who}): they see names", f"chmod o-rwx {config.path}"
        )
    else:
        yield Finding("ok", f"{who}; files {config.mode}")


def _room(config: FsConfig, directory: Directory, usage: UsageFile) -> Iterator[Finding]:
    about = os.fstatvfs(directory.fd)
    free, disk = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    used, values = usage.load().total()
    limits = f"capacity {format_size(config.capacity)}, min_free {format_size(config.min_free)}"
    count = f"{values} value{'' if values == 1 else 's'} of {format_size(used)}"
    held = f"{count} held, {format_size(free)} of {format_size(disk)} free"
    if free < config.min_free:
        fix = "make room on the disk"
        if disk <= config.min_free:  # as of a small tmpfs
            fix = f"lower min_free: the whole file system has {format_size(disk)}"
        yield Finding("warning", f"less than min_free is free, so nothing is written ({limits}; {held})", fix)
    elif config.capacity > used + free - config.min_free:
        yield Finding(
            "warning",
            f"the disk has no room for the capacity: {limits}; {held}",
            f"lower capacity to {format_size(max(0, used + free - config.min_free))}; until then min_free is the limit",
        )
    else:
        yield Finding("ok", f"{limits}; {held}")


def examine_limits(limits: Limits) -> Iterator[Finding]:
    """Yield in what the limits of the process that wrote last differ, if they do."""
    if difference := limits.difference():
        yield Finding("warning", difference, ADVICE)


def examine_skipped(directory: Directory) -> Iterator[Finding]:
    """Yield which files and folders could not be listed or removed, if there are such."""
    skipped = directory.skipped
    for path, reason in skipped.items():
        others = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        yield Finding(
            "warning",
            f"{path[:200]!r}{others} cannot be listed or removed ({reason}): not counted in the capacity, not evicted",
            "give it the directory's owner, group and mode, or move it elsewhere",
        )
        return


def _inodes(config: FsConfig, directory: Directory, value_bytes: int) -> Iterator[Finding]:
    about = os.fstatvfs(directory.fd)
    need = config.capacity // value_bytes
    if not about.f_files:  # the file system makes them as it goes
        return
    if need > about.f_favail:
        yield Finding(
            "warning",
            f"{about.f_favail} more files can be made, {need} values of {format_size(value_bytes)} make the capacity",
            "use a file system with more inodes, or larger values (blocks_per_chunk)",
        )
    else:
        yield Finding("ok", f"{about.f_favail} more files can be made, {need} are needed")


def examine_direct(config: FsConfig, directory: Directory) -> Iterator[Finding]:
    """Yield whether O_DIRECT works there."""
    problem = try_direct(directory)
    if not problem:
        yield Finding("ok", f"O_DIRECT works; direct is {_DIRECT[config.direct]}")
    elif config.direct is True:
        yield Finding(
            "warning",
            f"O_DIRECT does not work here: {problem}",
            "values go through the page cache; set 'direct: false'",
        )
    else:
        yield Finding("ok", f"O_DIRECT does not work here ({problem}), and is not wanted")


def _locks(usage: UsageFile) -> Iterator[Finding]:
    with usage.locked():
        pass
    if usage.locks:
        yield Finding("ok", "locks work: one process at a time evicts")
    else:
        yield Finding(
            "warning",
            "this file system has no locks: several processes may evict at once, and too much",
            "mount it with locks (flock), if it has them",
        )


def _clock(usage: UsageFile) -> Iterator[Finding]:
    ahead = usage.now() - time.time()
    if abs(ahead) > _CLOCK_SECONDS:
        yield Finding(
            "warning",
            f"the file system's clock differs from this machine's by {format_duration(round(abs(ahead)))}: values "
            "count as older or newer than they are",
            "run an NTP service on both",
        )
