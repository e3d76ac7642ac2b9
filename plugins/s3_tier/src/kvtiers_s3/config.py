"""Options of the tier type ``s3``."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvtiers.api import Duration, Secret, Size, TierConfig

__all__ = ["S3Config"]

_PART = re.compile(r"[A-Za-z0-9!_.*'()-]+")
_LEAST_PART = 5 << 20  # S3's own bound on all parts of an upload but the last
_ARCHIVES = {"GLACIER", "DEEP_ARCHIVE"}


class S3Config(TierConfig):
    """The options of an ``s3`` tier."""

    threads: int = Field(default=32, ge=1, le=256, description="transfers at the same time, in each tier host")

    bucket: str = Field(min_length=3, description="the bucket; it must exist")
    prefix: str = Field(default="", description="what all keys start with, without the '/' at its end")
    region: str = Field(default="", description="the bucket's region; default: what AWS's own settings say, us-east-1")
    endpoint: str = Field(default="", description="URL of a server that is not AWS, without the bucket")
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto", description="the bucket's place in the URL; auto: virtual on AWS, path at an endpoint"
    )

    profile: str = Field(default="", description="profile in AWS's config files; default: AWS's usual chain")
    access_key: Secret | None = Field(default=None, description="access key id; asks no profile and no chain")
    secret_key: Secret | None = Field(default=None, description="the secret access key that belongs to it")
    session_token: Secret | None = Field(default=None, description="the session token of temporary keys")
    role: str = Field(default="", description="ARN of a role to assume with these credentials")
    role_external_id: str = Field(default="", description="external id that the role asks for")
    sts_endpoint: str = Field(default="", description="URL of the service that gives out roles; default: AWS's")
    ca_file: Path | None = Field(default=None, description="certificates (PEM) of a private authority")

    client: Literal["auto", "obstore", "boto3"] = Field(
        default="auto", description="what moves values; auto: obstore, or boto3 where that is not installed"
    )
    checksums: Literal["when_required", "always"] = Field(
        default="when_required", description="whether requests carry a checksum for the server to check"
    )
    unsigned_payload: bool = Field(default=True, description="sign requests without a hash of the value")
    encryption: Literal["bucket", "sse-s3", "sse-kms"] = Field(
        default="bucket", description="who encrypts; bucket: the bucket's own setting"
    )
    kms_key: str = Field(default="", description="key id for sse-kms; default: the account's own key")
    storage_class: str = Field(default="", description="storage class of the objects; default: the bucket's")
    conditional_put: bool = Field(default=False, description="never write over an object of the same length")

    connections: int = Field(
        default=32, ge=1, le=1024, description="connections kept, and parts moved at a time, in each tier host"
    )
    timeout: Duration = Field(default=10.0, gt=0, description="longest time of one request, body included")
    connect_timeout: Duration = Field(default=3.0, gt=0, description="longest time to establish a connection")
    part_size: Size = Field(
        default=16 << 20, ge=_LEAST_PART, description="larger values are written and read in parts of this size"
    )
    put_price: float = Field(default=0.005, ge=0, description="US dollars for 1,000 PUT, POST and LIST requests")
    get_price: float = Field(default=0.0004, ge=0, description="US dollars for 1,000 GET and HEAD requests")

    @property
    def place(self) -> str:
        """The endpoint, the bucket and the prefix."""
        return f"{self.endpoint or 's3:'}//{self.bucket}/{self.prefix}"

    @field_validator("prefix")
    @classmethod
    def _is_a_prefix(cls, prefix: str) -> str:
        parts = prefix.split("/") if prefix else []
        if not all(_PART.fullmatch(part) and set(part) != {"."} for part in parts):
            raise ValueError("expected parts of letters, digits and !_.*'()- with '/' between them, none at the ends")
        return prefix

    @field_validator("endpoint", "sts_endpoint")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://[^/?#\s]+/?", url):
            raise ValueError("expected 'https://HOST' or 'http://HOST', with ':PORT' where it has one, and no path")
        return url.rstrip("/")

    @field_validator("storage_class")
    @classmethod
    def _can_be_read(cls, storage_class: str) -> str:
        if storage_class in _ARCHIVES:
            raise ValueError("objects of an archive cannot be read before they are restored, which takes hours")
        return storage_class

    @model_validator(mode="after")
    def _fits_together(self) -> "S3Config":
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("access_key and secret_key go together: give both, or neither")
        if self.session_token is not None and self.access_key is None:
            raise ValueError("session_token belongs to an access_key and a secret_key")
        if self.profile and self.access_key is not None:
            raise ValueError("profile and access_key are two sources of credentials: give one")
        if self.role_external_id and not self.role:
            raise ValueError("role_external_id belongs to a role")
        if self.kms_key and self.encryption != "sse-kms":
            raise ValueError("kms_key needs 'encryption: sse-kms'")
        if self.timeout > self.deadline:
            raise ValueError(f"timeout ({self.timeout:g} s) is longer than the tier's deadline ({self.deadline:g} s)")
        return self
