"""The diagnosis of the pool, the transport and this process's limits, for ``kvtiers check``."""

import ipaddress
import resource
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from kvtiers.api import Finding, KvtiersError, NotKept
from kvtiers.api.units import format_size
from kvtiers_mooncake.config import MooncakeConfig

__all__ = ["diagnose"]

_PAGE = 4096
_ROUND_TRIPS = 20
_SLOW_SECONDS = 2e-3
_FEW_VALUES = 16
_DEVICES = Path("/sys/class/infiniband")


class _Store(Protocol):
    hostname: str

    def write(self, name: str, src: memoryview) -> None: ...
    def read_into(self, name: str, dst: memoryview) -> int: ...
    def exists(self, names: list[str]) -> object: ...
    def delete(self, names: list[str]) -> None: ...


def diagnose(
    store: _Store, config: MooncakeConfig, value_bytes: int, region_bytes: int, *, read_only: bool
) -> list[Finding]:
    """Return the findings about the master, then the pool, the transport and this process."""
    try:
        findings = [*_master(store, config)]
    except (KvtiersError, OSError) as error:
        return [Finding("error", str(error), "see that mooncake_master runs and can be reached")]
    if not read_only:
        findings += _pool(store, config)
    findings += _segment(config, value_bytes)
    findings += _transport(store.hostname, config)
    findings += _rdma(config, region_bytes)
    return findings


def _master(store: _Store, config: MooncakeConfig) -> Iterator[Finding]:
    seconds = []
    for _ in range(_ROUND_TRIPS):
        begin = time.perf_counter()
        store.exists(["kvtiers-check/absent"])
        seconds.append(time.perf_counter() - begin)
    median = sorted(seconds)[len(seconds) // 2]
    text = f"the master {config.master_address} answers in {median * 1e6:.0f} us"
    if median > _SLOW_SECONDS:
        yield Finding("warning", f"{text}: each lookup and each call waits for that", "run it nearer to the engines")
    else:
        yield Finding("ok", text)


def _pool(store: _Store, config: MooncakeConfig) -> Iterator[Finding]:
    """Write a small value and read it back: the library's own health check says nothing."""
    name, value = f"kvtiers-check/{uuid.uuid4().hex}", memoryview(bytes([7]) * _PAGE)
    read = bytearray(_PAGE)
    try:
        store.write(name, value)
        found = store.read_into(name, memoryview(read)) == len(read) and bytes(read) == bytes(value)
        store.delete([name])
    except NotKept as error:
        fix = "set 'segment' on some machines, or larger ones"
        yield Finding("error" if not config.segment else "warning", str(error), fix)
    except (KvtiersError, OSError) as error:
        yield Finding("error", f"a value cannot be written: {error}", "see that the machines of the pool are reachable")
    else:
        if found:
            yield Finding("ok", f"a value was written and read back; {config.replicas} copies of each")
        else:
            yield Finding(
                "error",
                "a value that was written cannot be read back",
                "see that the machines of the pool reach each other under their 'hostname', on all ports",
            )


def _segment(config: MooncakeConfig, value_bytes: int) -> Iterator[Finding]:
    if not config.segment:
        yield Finding("ok", "this process contributes no memory: a pure client")
    elif config.segment < _FEW_VALUES * value_bytes:
        yield Finding(
            "warning",
            f"'segment: {format_size(config.segment)}' has room for {config.segment // value_bytes} values of "
            f"{format_size(value_bytes)}",
            f"raise it to many times {format_size(value_bytes)}",
        )
    else:
        yield Finding("ok", f"each process contributes {format_size(config.segment)}")


def _transport(hostname: str, config: MooncakeConfig) -> Iterator[Finding]:
    if _is_loopback(hostname):
        yield Finding("ok", f"{config.protocol}, by {hostname}: this machine alone")
        if config.segment:
            yield Finding(
                "ok", "other machines cannot read what lies in its segment: set 'hostname' to an address they reach"
            )
    else:
        yield Finding(
            "warning",
            f"{config.protocol}, by {hostname}: without encryption or a log-in; any machine that reaches the ports of "
            "a client can read and write the memory of its process",
            "keep the pool in a network of its own, or behind a firewall",
        )
    if config.protocol == "tcp" and not config.connection_pool:
        yield Finding(
            "warning",
            "'connection_pool: false' opens a connection for each value, whose port stays taken for 60 s",
            "leave it on, or widen net.ipv4.ip_local_port_range",
        )


def _is_loopback(hostname: str) -> bool:
    try:
        return ipaddress.ip_address(hostname.strip("[]")).is_loopback
    except ValueError:
        return hostname == "localhost"


def _rdma(config: MooncakeConfig, region_bytes: int) -> Iterator[Finding]:
    if config.protocol != "rdma":
        return
    there = sorted(path.name for path in _DEVICES.glob("*"))
    missing = [device for device in config.devices if device not in there]
    if missing or not there:
        yield Finding(
            "error",
            f"no RDMA device {', '.join(missing) or 'at all'}; there are: {', '.join(there) or 'none'}",
            "mend 'devices', pass /dev/infiniband into the container, or set 'protocol: tcp'",
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    need = region_bytes + config.segment + config.local_buffer
    if 0 <= limit < need:
        yield Finding(
            "error",
            f"at most {format_size(limit)} of memory may be locked; rows, segment and buffer are {format_size(need)}",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service's unit",
        )
