"""The connection to a bucket: its address, and its clients: obstore's for values, boto3's for the rest.

Credentials, region, endpoint, proxy and trusted certificates are resolved here once, and given to both clients: by
itself each would take its own from the environment.
"""

import os
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.regions import EndpointResolver

from kvtiers.api import ConfigError
from kvtiers_objectstore.connecting import NO_RETRIES, client_options, making_a_client
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.route import Route, find_route
from kvtiers_s3.config import S3Config
from kvtiers_s3.credentials import open_session
from kvtiers_s3.failures import FAILURES

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
        self.region: str = config.region or self._session.get_config_variable("region") or "us-east-1"
        given = config.endpoint or _configured_endpoint(self._session)
        self.is_aws = not given
        self.endpoint = _expect_fips(self._session, given) if given else _aws_endpoint(self._session, self.region)
        self.route = self._find_route()
        self.failures = replace(FAILURES, proxy=self.route.shown_proxy)
        self._lock = threading.RLock()
        self._clients: dict[int, Any] = {}

    @property
    def is_virtual(self) -> bool:
        """Return whether the bucket is a part of the host's name."""
        if self.config.addressing == "auto":
            # A dot in the bucket's name would be one too many for the certificate.
            return self.is_aws and "." not in self.config.bucket
        return self.config.addressing == "virtual"

    def _find_route(self) -> Route:
        """Return the way to the bucket. ConfigError: one of the clients could not go it."""
        bundle = "AWS_CA_BUNDLE" if os.environ.get("AWS_CA_BUNDLE") else "ca_bundle of the profile"
        route = find_route(
            self._endpoint_of_the_bucket(),
            ("ca_file", self.config.ca_file),
            (bundle, self._session.get_config_variable("ca_bundle")),
            ("REQUESTS_CA_BUNDLE", os.environ.get("REQUESTS_CA_BUNDLE")),
        )
        if route.authorities and Path(route.authorities).is_dir():
            raise ConfigError(
                f"{route.named_by} names the folder {route.authorities!r}, and boto3 reads certificates from one file; "
                "name a file by ca_file, AWS_CA_BUNDLE or SSL_CERT_FILE"
            )
        if route.shown_proxy.startswith("https://") and not route.endpoint.startswith("https://"):
            raise ConfigError(
                f"the environment names the proxy {route.shown_proxy} for {route.endpoint}, and boto3 does not check "
                "the certificate of a proxy to an http:// endpoint; use TLS for both, or name "
                f"{route.host} in NO_PROXY"
            )
        return route

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
        config, route = self.config, self.route
        checksums = "when_supported" if config.checksums == "always" else "when_required"
        options = Config(
            connect_timeout=config.connect_timeout,
            read_timeout=config.timeout,
            max_pool_connections=config.connections,
            retries={"mode": "standard", "total_max_attempts": attempts},
            s3={
                "addressing_style": "virtual" if self.is_virtual else "path",
                "payload_signing_enabled": not config.unsigned_payload,
                "use_accelerate_endpoint": False,
                "use_dualstack_endpoint": False,
            },
            # The endpoint that is given is the one of these settings already.
            use_fips_endpoint=False,
            use_dualstack_endpoint=False,
            proxies=route.proxies,
            proxies_config={"proxy_ca_bundle": route.authorities} if route.proxy and route.authorities else None,
            request_checksum_calculation=checksums,
            response_checksum_validation="when_required",  # a value's seal says more, and the same of both clients
            user_agent_extra="kvtiers-s3",
        )
        client = self._boto3_session.client(
            "s3",
            region_name=self.region,
            endpoint_url=self.endpoint,
            verify=route.authorities or True,
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
        with making_a_client():
            return S3Store(
                config.bucket,
                config=options,
                client_options=client_options(config, self.route, "kvtiers-s3"),
                retry_config=NO_RETRIES,
                credential_provider=self._issue_credentials,
            )

    def _endpoint_of_the_bucket(self) -> str:
        if not self.is_virtual:
            return self.endpoint
        url = urlsplit(self.endpoint)
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


def _aws_endpoint(session: Any, region: str) -> str:
    """Return AWS's own endpoint of a region, with FIPS and dual stack if environment or profile ask for them."""
    of_s3 = session.get_config_variable("s3") or {}
    options = {
        "use_fips_endpoint": session.get_config_variable("use_fips_endpoint"),
        "use_dualstack_endpoint": session.get_config_variable("use_dualstack_endpoint")
        or of_s3.get("use_dualstack_endpoint"),
    }
    resolver = EndpointResolver(session.get_component("data_loader").load_data("endpoints"))
    found = resolver.construct_endpoint("s3", region, **options)
    if not found:
        asked = "".join(f" with {name}" for name, is_asked in options.items() if is_asked)
        raise ConfigError(
            f"AWS has no endpoint of region {region!r}{asked}; set 'region', or 'endpoint' for a server that is not AWS"
        )
    return f"https://{found['hostname']}"


def _expect_fips(session: Any, endpoint: str) -> str:
    """Return this endpoint; ConfigError if FIPS is asked for, and it does not say that it has it."""
    if session.get_config_variable("use_fips_endpoint") and "fips" not in endpoint:
        raise ConfigError(
            f"AWS_USE_FIPS_ENDPOINT or the profile asks for FIPS, and the endpoint {endpoint!r} is named beside it; "
            "name the FIPS endpoint itself, or unset one of the two"
        )
    return endpoint


def _follow_no_redirect(params: Any, **_: Any) -> None:
    """Make boto3 report a redirect, as obstore does; it would ask for the bucket's region and be redirected again."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
