"""The service manager's descriptor store, which has the pool's memory while its service is restarted.

systemd takes descriptors over ``$NOTIFY_SOCKET``, by name, and passes them to the service's next process: sd_notify(3),
sd_listen_fds(3). It keeps them over a restart, however the process has ended, and lets them go when the service is
stopped. Under anything else, and before systemd 236, which drops nothing, nothing that is kept is of use.
"""

import contextlib
import logging
import os
import select
import socket
from collections.abc import Iterable, MutableMapping, Sequence

__all__ = ["DescriptorStore", "descriptor_store"]

_log = logging.getLogger("kvtiers.pool")
_FIRST = 3  # SD_LISTEN_FDS_START
_SECONDS = 5.0  # what a service manager is waited for


class DescriptorStore:
    """Descriptors that outlive this process, by name. ``address``: of the manager's socket; "": nothing is kept.

    ``found``: what was kept by the process before this one. They are the taker's. ``seconds``: what the manager is
    waited for.
    """

    def __init__(self, address: str = "", found: Iterable[tuple[str, int]] = (), *, seconds: float = _SECONDS) -> None:
        self._address = address
        self._seconds = seconds
        self.found: list[tuple[str, int]] = list(found)

    def is_ready(self) -> None:
        """Tell the manager that the service is up."""
        self._send("READY=1")

    def keep(self, name: str, fd: int) -> None:
        """Have this descriptor kept, in the place of the one of this name."""
        self.drop(name)
        self._send(f"FDSTORE=1\nFDNAME={name}", [fd])

    def drop(self, name: str) -> None:
        """Have the descriptor of this name kept no longer, if there is one."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def settle(self) -> None:
        """Wait until the manager has done what it was told."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._send("BARRIER=1", [writer])
        finally:
            os.close(writer)
        waiting = select.poll()
        waiting.register(reader, 0)  # its last writer closes it
        waiting.poll(1000 * self._seconds)
        os.close(reader)

    def _send(self, message: str, fds: Sequence[int] = ()) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(self._seconds)
                sock.connect(self._address)
                socket.send_fds(sock, [message.encode()], fds)
        except TimeoutError:  # it is not to be waited for again, by engines neither
            self._address = ""
            _log.warning("pool: the service manager takes nothing, and is told no more: what it has is not used")
        except OSError as error:
            _log.warning("pool: the service manager cannot be told %r: %s", message, error)


def descriptor_store(environment: MutableMapping[str, str]) -> DescriptorStore:
    """Return the store of the service that this process is, and take it out of the environment of its children."""
    address = environment.pop("NOTIFY_SOCKET", "")
    pid, count, names = (environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    found: list[tuple[str, int]] = []
    if pid == str(os.getpid()) and count.isdecimal():
        fds = range(_FIRST, _FIRST + int(count))
        for fd in fds:
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)
        found = list(zip(names.split(":"), fds, strict=False))
    if not address.startswith(("/", "@")):
        return DescriptorStore("", found)
    return DescriptorStore("\0" + address[1:] if address.startswith("@") else address, found)
