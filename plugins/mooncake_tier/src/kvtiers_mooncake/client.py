"""The opening of Mooncake's client in this process: its environment, its start, and a probe of the master of our own.

The library's own ``health_check`` says that all is well after the master is gone; its start then takes 90 s and each
call 4 s. So the master's port is tried first: at the start, and after a failed call before each next one. What the
library reads from the environment (timeouts, its log) is set before it is loaded, where the user has not.
"""

import contextlib
import ctypes
import ctypes.util
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtiers.api import ConfigError, TierUnavailable
from kvtiers_mooncake.codes import Code
from kvtiers_mooncake.config import MooncakeConfig

__all__ = ["DirectoryLock", "MasterWatch", "load_library", "own_address", "start_client"]

_PACKAGES = "mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine where its CUDA is installed)"
# To one machine. A machine that hangs holds up a call for a timeout for each value that has to wait for a connection.
_CONNECTIONS = 16
_LOCK_FILE = "kvtiers.lock"
_ERRORS = "ERROR"
_MUTE = 3  # the log level above that, which the environment cannot set
_START_ATTEMPTS = 3  # each on another port of the client's own


def _environment(config: MooncakeConfig) -> Mapping[str, str]:
    patience = max(1, round(config.patience))
    settings = {
        "MC_RPC_TIMEOUT_MS": f"{patience * 1000}",
        "MC_RPC_CONNECT_TIMEOUT_MS": f"{round(config.connect_timeout * 1000)}",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": f"{patience}",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{patience}",
        "MC_TCP_STATUS_TIMEOUT_SEC": f"{patience}",
        "MC_STORE_CLIENT_SETUP_RETRIES": f"{_START_ATTEMPTS}",
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_LOG_LEVEL": _ERRORS,
        "MC_YLT_LOG_LEVEL": _ERRORS,
    }
    if config.connection_pool:
        settings["MC_TCP_ENABLE_CONNECTION_POOL"] = "1"
        settings["MC_TCP_LANES_PER_PEER"] = f"{_CONNECTIONS}"
    return settings


def load_library(config: MooncakeConfig) -> Any:
    """Import the client library, with its settings in the environment. ConfigError says what to install."""
    for name, value in _environment(config).items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store  # it starts no thread before a client does
    except ImportError as error:
        missing = str(error)
        if "ibverbs" in missing or (not ctypes.util.find_library("ibverbs") and "No module" not in missing):
            raise ConfigError("Mooncake's client needs libibverbs, also for TCP; apt-get install libibverbs1") from None
        raise ConfigError(f"Mooncake's client cannot be loaded ({missing}); pip install {_PACKAGES}") from None
    return store


def own_address(config: MooncakeConfig) -> str:
    """Return the address by which others reach this machine: as configured, or the one on the way to the master."""
    if config.hostname:
        return config.hostname
    if config.address is None:
        raise ConfigError(f"'hostname' is needed with 'master: {config.master}': the address that other machines reach")
    try:
        [(family, kind, protocol, _, target), *_] = socket.getaddrinfo(*config.address, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind, protocol) as way:
            way.connect(target)  # sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise TierUnavailable(
            f"no way to the master {config.master}: {error}; mend 'master', or set 'hostname'"
        ) from None


def start_client(config: MooncakeConfig, library: Any, hostname: str) -> Any:
    """Start a client in this process, which joins the pool. TierUnavailable if it cannot."""
    client = library.MooncakeDistributedStore()
    code = client.setup(
        f"[{hostname}]" if ":" in hostname else hostname,
        config.metadata,
        config.segment,
        config.local_buffer,
        config.protocol,
        ",".join(config.devices),
        config.master_address,
        enable_ssd_offload=config.offload is not None,
        ssd_offload_path=str(config.offload or ""),
        tenant_id=config.tenant,
    )
    if code:
        client.close()
        if code == Code.NO_OFFLOAD:
            raise ConfigError(f"'offload': the master {config.master} runs without --enable_offload=true; start it so")
        raise TierUnavailable(
            f"Mooncake's client does not start with protocol {config.protocol!r}, hostname {hostname!r}, segment "
            f"{config.segment}: {code}; its own reason is on stderr with MC_LOG_LEVEL=INFO in the environment"
        )
    _mute()
    return client


def _mute() -> None:
    """Have the library write no more lines, unless the user has asked for some (``GLOG_minloglevel=2``: errors).

    Core counts each value that cannot be moved, and says once why. The library writes three lines for each, to stderr.
    """
    if os.environ["MC_LOG_LEVEL"] != _ERRORS or "GLOG_minloglevel" in os.environ:
        return
    with contextlib.suppress(OSError, ValueError):  # another build of it, without this logger
        mapped = Path("/proc/self/maps").read_text("utf-8").split()
        [path] = {word for word in mapped if word.startswith("/") and "/libglog" in word}
        ctypes.c_int.in_dll(ctypes.CDLL(path), "_ZN3fLI17FLAGS_minloglevelE").value = _MUTE


class DirectoryLock:
    """One process's right to a directory for values on its SSD, until ``release`` or its end, a kill included.

    The library takes any directory. Two clients in one truncate each other's files, and values come back as bytes of
    other values, without an error.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ConfigError(f"'offload': no directory {str(directory)!r}; make it, on a disk of this machine")
        path = directory / _LOCK_FILE
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"'offload': {error}; expected a directory that this process may write to") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise ConfigError(
                f"'offload': {str(directory)!r} is used by process {owner or '?'}; each process needs a directory of "
                "its own, or values would be damaged"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the directory back."""
        os.close(self._fd)


class MasterWatch:
    """What was last seen of the master: after a failed call its port is tried before the next one.

    ``probe`` tries it, and raises OSError.
    """

    def __init__(self, config: MooncakeConfig, probe: Callable[[tuple[str, int], float], None] | None = None) -> None:
        self._config = config
        self._probe = probe or _connect
        self._failed = False

    def before_call(self) -> None:
        """Raise TierUnavailable, at once, if the master was lost and is still away."""
        if self._failed:
            self.reach()

    def reach(self) -> None:
        """Try the master's port. TierUnavailable if nothing listens there."""
        address = self._config.address
        if address is None:
            return  # the library finds out who it is
        try:
            self._probe(address, self._config.connect_timeout)
        except OSError as error:
            why = "refused" if error.errno == errno.ECONNREFUSED else str(error)
            raise TierUnavailable(
                f"no mooncake_master at {self._config.master_address}: {why}; start it, or mend 'master'"
            ) from None

    def succeeded(self) -> None:
        """Record an answer of the master's."""
        self._failed = False

    def failed(self) -> None:
        """Record that a call did not reach the master."""
        self._failed = True


def _connect(address: tuple[str, int], timeout: float) -> None:
    socket.create_connection(address, timeout=timeout).close()
