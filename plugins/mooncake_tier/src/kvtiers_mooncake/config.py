"""Options of the tier type ``mooncake``."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvtiers.api import Duration, Size, TierConfig
from kvtiers.api.units import format_size

__all__ = ["FIGURES", "MooncakeConfig"]

_DEFAULT_PORT, _DEFAULT_HTTP_PORT = 50051, 9003
_ELECTED = ("etcd://", "redis://", "k8s://")  # where several masters elect one, and clients ask for its address
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?")
_COMMON = TierConfig.model_fields
_SMALLEST_SEGMENT = 16 << 20  # of which Mooncake makes a slab each


FIGURES = {
    "segment_bytes": "Memory that this tier's processes contribute to the pool.",
    "copied_values": "Values that were not in the registered rows and had to be copied.",
    "dropped_values": "Values for which the pool had no room.",
    "unreachable_values": "Values whose segment did not answer.",
    "removed_in_use": "Values removed while a reader may have had them: the master frees them minutes later.",
    "expired_reads": "Reads that took longer than the master's lease, and were not used.",
    "wrong_lengths": "Values that were longer than the one that was asked for.",
}
"""The store's own figures, and their help texts."""


class MooncakeConfig(TierConfig):
    """The options of a ``mooncake`` tier."""

    # Each process is a client, with a segment of its own.
    processes: int | Literal["auto"] = Field(default=1, description=_COMMON["processes"].description)
    # The library has threads of its own. On two cores four of ours move half of what one moves.
    threads: int = Field(default=2, ge=1, le=256, description=_COMMON["threads"].description)
    master: str = Field(
        description="HOST:PORT of mooncake_master (port 50051 by default), or etcd://..., redis://... where several "
        "masters elect one"
    )
    master_http: str = Field(
        default="",
        description="HOST:PORT of the master's HTTP server (its --metrics_port), which lists values; default: the "
        "master's host, port 9003",
    )
    metadata: str = Field(
        default="P2PHANDSHAKE",
        min_length=1,
        description="metadata server of the transfer engine: P2PHANDSHAKE (none), http://..., etcd://..., redis://...",
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="transport of the values")
    devices: tuple[str, ...] = Field(
        default=(), description="RDMA devices, such as mlx5_0; default: those that the client finds"
    )
    hostname: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9._:\[\]-]*$",
        description="name or address by which other machines reach this one; default: the address on the way to the "
        "master",
    )
    segment: Size = Field(
        default=0, description="memory that each of this tier's processes contributes to the pool; 0: none"
    )
    local_buffer: Size = Field(default=16 << 20, gt=0, description="memory of the client library itself")
    replicas: int = Field(default=1, ge=1, le=16, description="copies of each value, on different segments")
    soft_pin: Duration | None = Field(
        default=None, gt=0, description="a written value is evicted last for this long; default: not pinned"
    )
    prefer_local: bool = Field(
        default=False, description="put the first copy into this machine's own segment if that has room"
    )
    tenant: str = Field(
        default="default", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="name space and quota in the master"
    )
    offload: Path | None = Field(
        default=None,
        description="directory of one process for values evicted to its SSD; the master needs --enable_offload",
    )
    connection_pool: bool = Field(
        default=True, description="keep TCP connections; false: one for each transfer, whose ports stay taken for 60 s"
    )
    connect_timeout: Duration = Field(default=2.0, ge=0.1, description="longest time to reach the master")
    timeout: Duration = Field(
        default=3.0,
        ge=1,
        description="longest silence of the master or of a segment; a third of the master's lease or less",
    )

    @field_validator("master")
    @classmethod
    def _is_address(cls, master: str) -> str:
        if not master.startswith(_ELECTED) and _parse_address(master, _DEFAULT_PORT) is None:
            raise ValueError(f"expected HOST:PORT or one of {', '.join(_ELECTED)}..., got {master!r}")
        return master

    @field_validator("master_http")
    @classmethod
    def _is_http_address(cls, address: str) -> str:
        if address and _parse_address(address, _DEFAULT_HTTP_PORT) is None:
            raise ValueError(f"expected HOST:PORT, got {address!r}")
        return address

    @field_validator("offload")
    @classmethod
    def _is_directory(cls, offload: Path | None) -> Path | None:
        if offload is not None and not offload.is_absolute():
            raise ValueError(f"expected an absolute path, got {str(offload)!r}")
        return offload

    @model_validator(mode="after")
    def _fits_together(self) -> "MooncakeConfig":
        if self.io == "thread":
            raise ValueError("'io: thread': Mooncake's client may end its process; give it a tier host: 'io: process'")
        if self.devices and self.protocol != "rdma":
            raise ValueError("'devices' needs 'protocol: rdma'")
        if 0 < self.segment < _SMALLEST_SEGMENT:
            raise ValueError(f"'segment' is 0 or at least {format_size(_SMALLEST_SEGMENT)}")
        if self.offload is not None and not self.segment:
            raise ValueError("'offload' needs 'segment': only what lies in a process's own segment goes to its SSD")
        if self.offload is not None and self.processes != 1:
            raise ValueError("'offload' needs 'processes: 1': two processes in one directory damage each other's files")
        if self.prefer_local and not self.segment:
            raise ValueError("'prefer_local' needs 'segment'")
        if self.quotas and self.tenant != "default":
            raise ValueError("'quotas' and 'tenant' exclude each other: a master lists its tenant 'default' alone")
        if self.quotas and self.http_address is None:
            raise ValueError(f"'quotas' need 'master_http' with 'master: {self.master}': HOST:PORT of its HTTP server")
        return self

    @property
    def address(self) -> tuple[str, int] | None:
        """The master's host and port; None where masters elect one of them."""
        return None if self.master.startswith(_ELECTED) else _parse_address(self.master, _DEFAULT_PORT)

    @property
    def place(self) -> str:
        """The master and the tenant."""
        return f"{self.master_address} tenant {self.tenant}"

    @property
    def http_address(self) -> tuple[str, int] | None:
        """The host and port of the master's HTTP server; None where it was not given, and masters elect one of them."""
        if self.master_http:
            return _parse_address(self.master_http, _DEFAULT_HTTP_PORT)
        return (self.address[0], _DEFAULT_HTTP_PORT) if self.address else None

    @property
    def master_address(self) -> str:
        """The master as the client library wants it."""
        if self.address is None:
            return self.master
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def patience(self) -> float:
        """The longest silence, in seconds, of a master or of a segment."""
        return min(self.timeout, self.deadline)


def _parse_address(text: str, default_port: int) -> tuple[str, int] | None:
    """Return the host and the port of ``HOST:PORT`` or ``HOST``; None if the text is neither."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"] or default_port) < 1 << 16:
        return None
    return match["host"].strip("[]"), int(match["port"] or default_port)
