"""The connection to a bucket: its address, and its clients: obstore's for values, boto3's for the rest."""

import threading
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider

from kvtiers_objectstore.connecting import NO_RETRIES, client_options, read_certificates
from kvtiers_objectstore.requests import Requests
from kvtiers_s3.config import S3Config
from kvtiers_s3.credentials import open_session

if TYPE_CHECKING:
    from obstore.store import S3Config as ObstoreConfig
    from obstore.store import S3Credential, S3Store

__all__ = ["Connection"]

_CONTROL = ("list-type=", "uploads", "lifecycle", "versioning")  # a GET with one of these is paid for as a LIST
_ENCRYPTION = {"sse-s3": "AES256", "sse-kms": "aws:kms"}
# obstore asks again when five minutes or less are left, so that what it holds is never older than one.
_ACCEPTED_FOR = timedelta(minutes=6)


class Connection:
    """One bucket as one user. Makes clients; connects when one is used."""

    def __init__(self, config: S3Config, requests: Requests) -> None:
        self.config = config
        self.requests = requests
        self._session = open_session(config)
        self.endpoint = config.endpoint or _configured_endpoint(self._session)
        self.region: str = config.region or self._session.get_config_variable("region") or "us-east-1"
        self._certificates = read_certificates(config.ca_file)
        self._lock = threading.RLock()
        self._clients: dict[int, Any] = {}

    @property
    def is_virtual(self) -> bool:
        """Return whether the bucket is a part of the host's name."""
        if self.config.addressing == "auto":
            # A dot in the bucket's name would be one too many for the certificate.
            return not self.endpoint and "." not in self.config.bucket
        return self.config.addressing == "virtual"

    @property
    def put_options(self) -> dict[str, str]:
        """The attributes of each new object, as arguments of boto3's put_object and create_multipart_upload."""
        config, options = self.config, {}
        if config.storage_class:
            options["StorageClass"] = config.storage_class
        if config.encryption in _ENCRYPTION:
            options["ServerSideEncryption"] = _ENCRYPTION[config.encryption]
        if config.kms_key:
            options["SSEKMSKeyId"] = config.kms_key
        return options

    def boto3_client(self, *, attempts: int) -> Any:
        """Return boto3's client that tries a request this many times at most; there is one for each number."""
        with self._lock:  # a session makes one client at a time
            if attempts not in self._clients:
                self._clients[attempts] = self._new_boto3_client(attempts)
            return self._clients[attempts]

    def close(self) -> None:
        """Close boto3's connections."""
        with self._lock:
            while self._clients:
                self._clients.popitem()[1].close()

    @cached_property
    def _boto3_session(self) -> Any:
        # Imported here: it adds some MB to botocore's, and a host that moves values by obstore may never need it.
        import boto3

        return boto3.Session(botocore_session=self._session)  # two of one session are refused

    def _new_boto3_client(self, attempts: int) -> Any:
        config = self.config
        checksums = "when_supported" if config.checksums == "always" else "when_required"
        options = Config(
            connect_timeout=config.connect_timeout,
            read_timeout=config.timeout,
            max_pool_connections=config.connections,
            retries={"mode": "standard", "total_max_attempts": attempts},
            s3={
                "addressing_style": "virtual" if self.is_virtual else "path",
                "payload_signing_enabled": not config.unsigned_payload,
            },
            request_checksum_calculation=checksums,
            response_checksum_validation="when_required",  # a value's seal says more, and the same of both clients
            user_agent_extra="kvtiers-s3",
        )
        client = self._boto3_session.client(
            "s3",
            region_name=self.region,
            endpoint_url=self.endpoint or None,
            verify=str(config.ca_file) if config.ca_file else None,
            config=options,
        )
        client.meta.events.register("before-call.s3", _follow_no_redirect)
        client.meta.events.register("before-send.s3", self._count_sent)
        return client

    def _count_sent(self, request: Any, **_: Any) -> None:
        """Count what boto3 sends, retries included."""
        kind, query = request.method.lower(), str(request.url).partition("?")[2]
        self.requests.count("list" if kind == "get" and any(word in query for word in _CONTROL) else kind)

    def obstore(self) -> "S3Store":
        """Return obstore's store for the bucket; it never retries by itself."""
        from obstore.store import S3Store

        config = self.config
        # Without these obstore would take its own from the environment, and boto3 would not.
        options: ObstoreConfig = {
            "aws_endpoint_url_s3": self._endpoint_of_the_bucket(),
            "conditional_put": "etag",
            "request_payer": False,
            "s3_express": False,
            "region": self.region,
            "virtual_hosted_style_request": self.is_virtual,
            "unsigned_payload": config.unsigned_payload,
            "skip_signature": False,
        }
        if config.checksums == "always":
            options["checksum_algorithm"] = "CRC64NVME"
        if config.encryption in _ENCRYPTION:
            options["server_side_encryption"] = _ENCRYPTION[config.encryption]
        if config.kms_key:
            options["sse_kms_key_id"] = config.kms_key
        return S3Store(
            config.bucket,
            config=options,
            client_options=client_options(config, self.endpoint, "kvtiers-s3", self._certificates),
            retry_config=NO_RETRIES,
            credential_provider=self._issue_credentials,
        )

    def _endpoint_of_the_bucket(self) -> str:
        endpoint = self.endpoint or f"https://s3.{self.region}.{_aws_domain(self.region)}"
        if not self.is_virtual:
            return endpoint
        url = urlsplit(endpoint)
        return f"{url.scheme}://{self.config.bucket}.{url.netloc}"

    def _issue_credentials(self) -> "S3Credential":
        keys = self._session.get_credentials().get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + _ACCEPTED_FOR,
        }


def _configured_endpoint(session: Any) -> str:
    """Return the endpoint that the environment or the profile names, as boto3 finds it; empty: AWS's own."""
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return ""
    found = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3").provide()
    return str(found or "").rstrip("/")


def _aws_domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


def _follow_no_redirect(params: Any, **_: Any) -> None:
    """Make boto3 report a redirect, as obstore does; it would ask for the bucket's region and be redirected again."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
