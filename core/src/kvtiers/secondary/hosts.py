"""Which host a tier lives in, and what each host is told at its start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import TierConfig
from kvtiers.api.config import dump_resolved
from kvtiers.rows.names import StorageNames
from kvtiers.secondary.host_backend import HostBackend, HostLink
from kvtiers.secondary.launcher import HostLauncher, HostProcess
from kvtiers.secondary.wire import PROTOCOL_FORMAT, encode_hello

__all__ = ["HostedRegion", "TierHosts"]


@dataclass(frozen=True, slots=True)
class HostedRegion:
    """What a host needs to map the region and find values in it; ``sizes[g]``: payload and value bytes of group g."""

    fd: int
    map_bytes: int
    nbytes: int
    row_stride: int
    sizes: Sequence[tuple[int, int]]


@dataclass(slots=True)
class _Host:
    link: HostLink
    members: list[TierConfig] = field(default_factory=list)


class TierHosts:
    """All hosts of one manager: one for each tier, or for all tiers whose ``host`` is the same name.

    Give all tiers a backend first, then ``start``: a host opens all its tiers at once. ``names``: those current now.
    """

    def __init__(self, region: HostedRegion, namespace: str, names: Callable[[], StorageNames]) -> None:
        self._region = region
        self._namespace = namespace
        self._names = names
        self._launcher = HostLauncher(region.fd)
        self._hosts: dict[str, _Host] = {}

    def backend(self, config: TierConfig) -> HostBackend:
        """Return the backend of one tier, in the host that it shares or has for itself."""
        name = config.host or config.tier_name
        host = self._hosts.get(name)
        if host is None:
            process = HostProcess(name, lambda: self._hello(name))
            host = self._hosts[name] = _Host(HostLink(self._launcher, process))
        host.members.append(config)
        return HostBackend(host.link, self._names(), config.grace)

    def start(self) -> None:
        """Start all hosts, in parallel."""
        for host in self._hosts.values():
            self._launcher.start(host.link.host)

    def close(self, timeout: float) -> None:
        """End all hosts; those that do not within ``timeout`` seconds are killed."""
        self._launcher.close(timeout)
        for host in self._hosts.values():
            host.link.close()

    def _hello(self, name: str) -> bytes:
        region, names, members = self._region, self._names(), self._hosts[name].members
        mapped = {"map_bytes": region.map_bytes, "nbytes": region.nbytes, "row_stride": region.row_stride}
        tiers = [
            {
                "name": config.tier_name,
                "options": dump_resolved(config),
                "namespace": self._namespace,
                "prefix": names.prefix,
                "layout_id": names.layout_id.hex(),
                "sizes": region.sizes,
            }
            for config in members
        ]
        cpus = sorted({cpu for config in members for cpu in config.cpus})
        return encode_hello({"protocol": PROTOCOL_FORMAT, "cpus": cpus, "region": mapped, "tiers": tiers})
