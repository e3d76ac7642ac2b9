"""Options of the tier type ``gcs``."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvtiers.api import Duration, Secret, Size, TierConfig

__all__ = ["GcsConfig"]

_PART = re.compile(r"[A-Za-z0-9!_.*'()-]+")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_LEAST_PART = 5 << 20  # the service's own bound on all parts of an upload but the last


class GcsConfig(TierConfig):
    """The options of a ``gcs`` tier."""

    threads: int = Field(default=32, ge=1, le=256, description="transfers at the same time, in each tier host")

    bucket: str = Field(description="the bucket; it must exist")
    prefix: str = Field(default="", description="what all names start with, without the '/' at its end")
    endpoint: str = Field(default="", description="URL of the service; default: https://storage.googleapis.com")

    credentials_file: Path | None = Field(
        default=None, description="service account key, or workload identity configuration; default: Google's own chain"
    )
    credentials: Secret | None = Field(default=None, description="the JSON text of such a file")
    anonymous: bool = Field(default=False, description="no credentials, as emulators want it; needs an endpoint")
    ca_file: Path | None = Field(default=None, description="certificates (PEM) of a private authority")

    storage_class: Literal["bucket", "STANDARD", "NEARLINE", "COLDLINE"] = Field(
        default="bucket", description="storage class of the objects; bucket: the bucket's own setting"
    )
    conditional_put: bool = Field(default=False, description="never write over an object of the same length")

    connections: int = Field(
        default=32, ge=1, le=1024, description="connections kept, and parts moved at a time, in each tier host"
    )
    timeout: Duration = Field(default=10.0, gt=0, description="longest time of one request, body included")
    connect_timeout: Duration = Field(default=3.0, gt=0, description="longest time to establish a connection")
    part_size: Size = Field(
        default=16 << 20, ge=_LEAST_PART, description="larger values are written and read in parts of this size"
    )
    put_price: float = Field(default=0.005, ge=0, description="US dollars for 1,000 class A operations: writes, lists")
    get_price: float = Field(default=0.0004, ge=0, description="US dollars for 1,000 class B operations: reads")

    @field_validator("bucket")
    @classmethod
    def _is_a_bucket(cls, bucket: str) -> str:
        if not _BUCKET.fullmatch(bucket):
            raise ValueError("expected 3 to 222 of a-z, 0-9, '-', '_' and '.', with a letter or digit at both ends")
        return bucket

    @property
    def place(self) -> str:
        """The endpoint, the bucket and the prefix."""
        return f"{self.endpoint or 'gs:'}//{self.bucket}/{self.prefix}"

    @field_validator("prefix")
    @classmethod
    def _is_a_prefix(cls, prefix: str) -> str:
        parts = prefix.split("/") if prefix else []
        if not all(_PART.fullmatch(part) and set(part) != {"."} for part in parts):
            raise ValueError("expected parts of letters, digits and !_.*'()- with '/' between them, none at the ends")
        return prefix

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://[^/?#\s]+/?", url):
            raise ValueError("expected 'https://HOST' or 'http://HOST', with ':PORT' where it has one, and no path")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _fits_together(self) -> "GcsConfig":
        given = [name for name in ("credentials_file", "credentials") if getattr(self, name) is not None]
        given += ["anonymous"] if self.anonymous else []
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are several sources of credentials: give one")
        if self.anonymous and not self.endpoint:
            raise ValueError(
                "anonymous needs the endpoint of an emulator: Google's own service takes no writes without credentials"
            )
        if self.timeout > self.deadline:
            raise ValueError(f"timeout ({self.timeout:g} s) is longer than the tier's deadline ({self.deadline:g} s)")
        return self
