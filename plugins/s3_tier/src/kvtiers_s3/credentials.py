"""Credentials: botocore's session with those that the options name.

Keys from a file are read again whenever they are asked for, roles renew themselves, and everything else is botocore's
usual chain: environment, config files, web identity, container, instance.
"""

from typing import Any

import botocore.session
from botocore.config import Config
from botocore.credentials import (
    CredentialProvider,
    CredentialResolver,
    Credentials,
    DeferredRefreshableCredentials,
    ReadOnlyCredentials,
    create_assume_role_refresher,
)
from botocore.exceptions import BotoCoreError, ClientError

from kvtiers.api import ConfigError, Secret
from kvtiers_objectstore.route import find_route
from kvtiers_s3.config import S3Config

__all__ = ["open_session"]

_SESSION_NAME = "kvtiers"


class _GivenKeys(Credentials):  # type: ignore[misc]  # botocore has no types
    """Keys from the options."""

    def __init__(self, access_key: Secret, secret_key: Secret, token: Secret | None) -> None:
        self._secrets = access_key, secret_key, token
        keys = self.get_frozen_credentials()
        super().__init__(keys.access_key, keys.secret_key, keys.token, method="kvtiers")

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        access_key, secret_key, token = self._secrets
        return ReadOnlyCredentials(access_key.reveal(), secret_key.reveal(), token.reveal() if token else None)


class _Only(CredentialProvider):  # type: ignore[misc]  # botocore has no types
    """The only provider of a session, in place of botocore's chain of places where it looks for credentials."""

    METHOD = CANONICAL_NAME = "kvtiers"

    def __init__(self, credentials: Any) -> None:
        super().__init__()
        self._credentials = credentials

    def load(self) -> Any:
        return self._credentials


def open_session(config: S3Config) -> Any:
    """Return a botocore session with credentials, or ConfigError that says why there are none."""
    try:
        session = botocore.session.Session(profile=config.profile or None)
        if config.access_key is not None and config.secret_key is not None:
            _use(session, _GivenKeys(config.access_key, config.secret_key, config.session_token))
        if config.role:
            session = _with_role(session, config)
        credentials = session.get_credentials()
        if credentials is not None:
            credentials.get_frozen_credentials()  # a role is assumed now, so that what is wrong is said now
    except (BotoCoreError, ClientError, OSError) as error:
        raise ConfigError(f"credentials cannot be obtained: {error}") from None
    if credentials is None:
        raise ConfigError(
            "no credentials were found; give access_key and secret_key, a profile, or set up what AWS's usual chain "
            "finds (environment, ~/.aws, web identity, container, instance)"
        )
    return session


def _use(session: Any, credentials: Any) -> None:
    session.register_component("credential_provider", CredentialResolver([_Only(credentials)]))


def _with_role(base: Any, config: S3Config) -> Any:
    """Return a session that has the role's credentials, requested with the base session's."""
    region = config.region or base.get_config_variable("region") or "us-east-1"
    sts = base.create_client(
        "sts",
        region_name=region,
        endpoint_url=config.sts_endpoint or None,
        verify=str(config.ca_file) if config.ca_file and config.sts_endpoint else None,
        config=Config(proxies=find_route(config.sts_endpoint).proxies) if config.sts_endpoint else None,
    )
    wanted = {"RoleArn": config.role, "RoleSessionName": _SESSION_NAME}
    if config.role_external_id:
        wanted["ExternalId"] = config.role_external_id
    session = botocore.session.Session(profile=config.profile or None)
    _use(session, DeferredRefreshableCredentials(create_assume_role_refresher(sts, wanted), "assume-role"))
    return session
