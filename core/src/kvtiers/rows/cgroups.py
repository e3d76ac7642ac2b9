"""This process's control groups, version 1 or 2: the folders in which the kernel keeps its limits."""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_groups", "read_text"]


def read_text(path: Path) -> str:
    """Return what a file of the system says; "" if there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield this process's groups of a controller and all groups above them, as folders, with their version.

    Reads below ``root``, so that a test can bring a tree of its own. A group limits those below it, too.
    """
    groups = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            groups[2] = path
        elif controller in controllers.split(","):
            groups[1] = path
    for version, mount_root, mount_point in _mounts(controller, root):
        if version not in groups:
            continue
        top = root / mount_point.lstrip("/")
        inner = groups[version]
        if mount_root != "/":  # a container sees its own group as the top, but may be told the host's path of it
            inner = inner[len(mount_root) :] if inner.startswith(mount_root) else "/"
        folder = top / inner.strip("/")
        yield from ((above, version) for above in (folder, *folder.parents) if above.is_relative_to(top))


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, str, str]]:
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, types = mount.split(), kind.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        if types[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif types[0] == "cgroup" and controller in types[2].split(","):
            yield 1, fields[3], fields[4]
