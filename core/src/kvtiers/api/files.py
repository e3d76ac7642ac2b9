"""The reading of a small file that a user names: regular, with an end, and never waited for.

A pipe or a device opens like a file, but may never answer and never end, and the thread that reads it may be one that
an engine's operator waits for.
"""

import errno
import os
import stat

__all__ = ["read_file"]


def read_file(path: str | os.PathLike[str], most_bytes: int = 1 << 20) -> bytes:
    """Return what a regular file has.

    OSError, with a reason for people as its ``strerror``, if it cannot be read, is no regular file or is larger than
    ``most_bytes``; ValueError if there can be no such path.
    """
    name = os.fspath(path)
    # Non-blocking: opening a FIFO waits for its writer otherwise. Regular files are read as ever.
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0, opener=None) as file:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe, a socket or a device; expected a regular file", name)
        content = b""
        while len(content) <= most_bytes and (data := file.read(most_bytes + 1 - len(content))):
            content += data
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", name)
    return content
