"""The opening of the root: created if it is missing, refused if others own it or could write to it."""

import errno
import grp
import os
import stat
from pathlib import Path

from kvtiers.api import ConfigError, TierUnavailable
from kvtiers_fs.config import FORMAT_FILE, FsConfig
from kvtiers_fs.directory import TEMP_PREFIX, Directory, Permissions

__all__ = ["FORMAT", "SLAB_DIRECTORY", "open_root"]

FORMAT = b"kvtiers-fs 1\n"
SLAB_DIRECTORY = b"kvtiers-fs-slab 1\n"
_LAYOUTS = {"files": FORMAT, "slab": SLAB_DIRECTORY}
_INNOCENT = {"lost+found", ".snapshot", ".snapshots"}  # what file systems put into a new top directory


def open_root(config: FsConfig, *, read_only: bool) -> Directory:
    """Return the directory at the config's path. ConfigError: a setting is wrong; TierUnavailable: it is not there."""
    permissions = Permissions(int(config.mode, 8), _gid(config))
    if permissions.gid >= 0 and os.geteuid() and permissions.gid not in {os.getegid(), *os.getgroups()}:
        raise ConfigError(
            f"group: this process (uid {os.geteuid()}) is not in the group with id {permissions.gid}, so it cannot "
            "give files to it; add it to the group"
        )
    made = not read_only and _make(config.path, permissions)
    try:
        fd = os.open(config.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_open(config.path, error) from None
    directory = Directory(fd, permissions, read_only=read_only)
    try:
        if made:
            permissions.apply(fd, permissions.folder)
        _check_owner(config, os.fstat(fd), permissions.gid)
        _check_format(config, directory, read_only=read_only)
    except BaseException:
        directory.close()
        raise
    return directory


def _gid(config: FsConfig) -> int:
    if not config.group:
        return os.getegid() if int(config.mode, 8) & 0o070 else -1
    if config.group.isdecimal():
        return int(config.group)
    try:
        return grp.getgrnam(config.group).gr_gid
    except KeyError:
        raise ConfigError(f"group: there is no group {config.group!r} on this machine") from None


def _make(path: Path, permissions: Permissions) -> bool:
    try:
        path.mkdir(mode=permissions.folder)
    except FileExistsError:
        return False
    except FileNotFoundError as error:
        if path.parent.exists():  # as in /proc
            raise _cannot_open(path, error) from None
        raise ConfigError(
            f"path {str(path)!r}: {str(path.parent)!r} does not exist; make it, or mount the file system that has it"
        ) from None
    except OSError as error:
        raise _cannot_open(path, error) from None
    return True


def _cannot_open(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
        return ConfigError(
            f"path {str(path)!r} is a symbolic link, which is not followed; write {str(path.resolve())!r} instead"
        )
    if error.errno == errno.ENOTDIR:
        return ConfigError(f"path {str(path)!r} is not a directory")
    if isinstance(error, PermissionError):
        return ConfigError(f"path {str(path)!r} cannot be used by uid {os.geteuid()}: {error.strerror}")
    return TierUnavailable(f"path {str(path)!r}: {error.strerror}")


def _check_owner(config: FsConfig, about: os.stat_result, gid: int) -> None:
    path, uid, mode = str(config.path), os.geteuid(), stat.S_IMODE(about.st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(f"path {path!r}: all users may write to it (mode {mode:04o}); chmod o-w it, or use another")
    if about.st_uid != uid and (gid < 0 or about.st_gid != gid):
        raise ConfigError(
            f"path {path!r} is owned by uid {about.st_uid}, this process is uid {uid}; chown it, use another "
            "directory, or share it with 'group' and a mode such as '0660'"
        )
    if mode & stat.S_IWGRP and about.st_gid != gid:
        raise ConfigError(
            f"path {path!r}: the group with id {about.st_gid} may write to it (mode {mode:04o}); chmod g-w it, or "
            f"trust that group with 'group: \"{about.st_gid}\"'"
        )


def _check_format(config: FsConfig, directory: Directory, *, read_only: bool) -> None:
    path, expected = config.path, _LAYOUTS[config.layout]
    found = _format(directory)
    if found is None and _is_empty(directory):
        if read_only:
            return
        if directory.permissions.are_missing(os.fstat(directory.fd), directory.permissions.folder):
            # Of a process that was killed when it had made it; and else nobody could share it.
            directory.permissions.apply(directory.fd, directory.permissions.folder)
        directory.put(FORMAT_FILE, expected)
    # Asked again: another process may have been making the directory just now.
    found = found or _format(directory)
    if found is None:
        raise ConfigError(
            f"path {str(path)!r} is neither empty nor a directory of this tier (there is no {FORMAT_FILE}); "
            "use an empty or a new one"
        )
    for layout, content in _LAYOUTS.items():
        if found == content != expected:
            raise ConfigError(
                f"path {str(path)!r} has the layout {layout!r}, the config has {config.layout!r}: set "
                f"'layout: {layout}' to go on with what is there, or use another directory: its cache is cold at first"
            )
    if found != expected:
        raise ConfigError(
            f"path {str(path)!r} was made by another version of this tier ({found[:40]!r}, expected {expected!r}); "
            "use another directory"
        )


def _is_empty(directory: Directory) -> bool:
    inside = os.listdir(directory.fd)  # noqa: PTH208 -- a descriptor has no path
    return all(name in _INNOCENT or name.startswith(TEMP_PREFIX) for name in inside)


def _format(directory: Directory) -> bytes | None:
    try:
        fd = directory.open(FORMAT_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{FORMAT_FILE} cannot be read: {error.strerror}") from None
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
