"""The diagnosis of a slab and its file system, for ``kvtiers check``, and what is refused at once.

Two machines do not see each other's changes to a file within microseconds, as the index needs it: on a network file
system each would overwrite what the other one has stored. The seals would find that, value by value; it is refused.
"""

from collections.abc import Iterator, Sequence

from kvtiers.api import ConfigError, Finding
from kvtiers.api.units import format_size
from kvtiers_fs.config import FsConfig
from kvtiers_fs.diagnosis import (
    examine_access,
    examine_direct,
    examine_file_system,
    examine_limits,
    examine_skipped,
    mount_of,
)
from kvtiers_fs.evictor import free_bytes
from kvtiers_fs.limits import Limits
from kvtiers_fs.slab.segments import Slab

__all__ = ["diagnose_slab", "expect_local"]

_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "ocfs2", "gfs2"})
_NETWORK_FUSE = frozenset({"fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs"})


def expect_local(config: FsConfig) -> None:
    """Raise ConfigError if the directory is on a file system that several machines may share."""
    mount = mount_of(config.path.parent.resolve() / config.path.name)
    if mount is not None and mount.kind in _NETWORK | _NETWORK_FUSE:
        raise ConfigError(
            f"path {str(config.path)!r} is on {mount.kind}, mounted at {mount.point}: the layout 'slab' is for a disk "
            "of this machine; set 'layout: files' there"
        )


def diagnose_slab(config: FsConfig, slab: Slab, value_bytes: int, limits: Limits | None) -> Sequence[Finding]:
    """Return the findings. ``limits``: None of a store that is read-only, which keeps none."""
    findings = [*examine_file_system(config.path), *examine_access(config, slab.directory)]
    findings += examine_skipped(slab.directory)
    if slab.index is not None:
        findings += [*_room(config, slab), *_fit(config, slab, value_bytes)]
    if limits is not None:
        findings += [*examine_limits(limits), *examine_direct(config, slab.directory)]
    return findings


def _room(config: FsConfig, slab: Slab) -> Iterator[Finding]:
    totals, segment_bytes = slab.segments.totals(), slab.opened_index.header.segment_bytes
    free, taken = free_bytes(slab.directory.fd), totals.segments * segment_bytes
    held = (
        f"{totals.values} value{'' if totals.values == 1 else 's'} of {format_size(totals.nbytes)} held, in "
        f"{totals.segments} segment{'' if totals.segments == 1 else 's'} of {format_size(segment_bytes)}; "
        f"{format_size(free)} free"
    )
    limits = f"capacity {format_size(config.capacity)}, min_free {format_size(config.min_free)}"
    possible = max(0, taken + free - config.min_free)
    if config.capacity > possible:
        fix = f"lower capacity to {format_size(possible)}; until then min_free is the limit"
        if not possible:
            fix = "make room on the disk, or lower min_free: no more than that is free and the slab's"
        yield Finding("warning", f"the disk has no room for the capacity: {limits}; {held}", fix)
    else:
        yield Finding("ok", f"{limits}; {held}")


def _fit(config: FsConfig, slab: Slab, value_bytes: int) -> Iterator[Finding]:
    header = slab.opened_index.header
    if value_bytes > header.segment_bytes:
        yield Finding(
            "error",
            f"values of {format_size(value_bytes)} are larger than a segment of this slab, "
            f"{format_size(header.segment_bytes)}, so none is stored",
            "use another directory, with a larger capacity; its segments are made for such values",
        )
    elif config.capacity // header.segment_bytes > header.rows:
        yield Finding(
            "warning",
            f"this slab was made for a smaller capacity: it has no more than {header.rows} segments of "
            f"{format_size(header.segment_bytes)}",
            "use another directory, whose slab is made for this capacity",
        )
    else:
        yield Finding(
            "ok", f"values of {format_size(value_bytes)} fit into segments of {format_size(header.segment_bytes)}"
        )
