"""Options: what is refused before anything is opened, with what was expected."""

from pathlib import Path

import pytest
from objectstore_checks import documented, own_options
from pydantic import ValidationError

from kvtiers_azure.access import account_of
from kvtiers_azure.config import AzureConfig

README = Path(__file__).parents[1] / "README.md"


def config(**options):
    return AzureConfig.model_validate({"type": "azure", "account": "acc", "container": "kv-cache", **options})


def refusal(**options) -> str:
    with pytest.raises(ValidationError) as refused:
        config(**options)
    [error] = refused.value.errors()
    return error["msg"]


@pytest.mark.parametrize("container", ["ab", "Upper", "a--b", "-ab", "ab-", "a" * 64, "a_b", "a.b"])
def test_a_container_that_azure_would_refuse_is_refused(container):
    assert "expected 3 to 63 of a-z, 0-9" in refusal(container=container)


@pytest.mark.parametrize("container", ["abc", "kv-cache-1", "a" * 63, "$root"])
def test_a_container_is_taken_as_it_is(container):
    assert config(container=container).container == container


@pytest.mark.parametrize("prefix", ["/a", "a/", "a//b", "a/../b", ".", "a b", "ä", "a?b", "a%20b"])
def test_a_prefix_that_is_none_is_refused(prefix):
    assert "expected parts of letters, digits" in refusal(prefix=prefix)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"account": ""}, "account is missing"),
        ({"account_key": "a2V5", "sas": "sig=x"}, "account_key and sas are several sources of credentials"),
        ({"account_key": "a2V5", "identity": "managed"}, "account_key and identity are several"),
        ({"emulator": True, "sas": "sig=x"}, "an emulator has its well-known key"),
        ({"identity": "service-principal"}, "client_secret and 'identity: service-principal' go together"),
        ({"client_secret": "x"}, "client_secret and 'identity: service-principal' go together"),
        ({"identity": "service-principal", "client_secret": "x"}, "needs tenant, client_id and client_secret"),
        ({"token_file": "/x"}, "token_file needs 'identity: workload'"),
        ({"timeout": "31s"}, "longer than the tier's deadline (30 s)"),
        ({"access_tier": "Archive"}, "'Hot', 'Cool' or 'Cold'"),
        ({"endpoint": "ftp://x"}, "expected 'https://HOST'"),
        ({"part_size": "1KiB"}, "greater than or equal to 1048576"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, said):
    assert said in refusal(**options)


@pytest.mark.parametrize(
    ("options", "endpoint"),
    [
        ({}, "https://acc.blob.core.windows.net"),
        ({"endpoint": "https://acc.blob.core.chinacloudapi.cn/"}, "https://acc.blob.core.chinacloudapi.cn"),
        ({"account": "", "emulator": True}, "http://127.0.0.1:10000/devstoreaccount1"),
        ({"account": "", "connection_string": "UseDevelopmentStorage=true"}, "http://127.0.0.1:10000/devstoreaccount1"),
        (
            {"account": "", "connection_string": "AccountName=b;AccountKey=a2V5;EndpointSuffix=core.usgovcloudapi.net"},
            "https://b.blob.core.usgovcloudapi.net",
        ),
        (
            {"account": "", "connection_string": "BlobEndpoint=https://c.example/;SharedAccessSignature=?sig=x"},
            "https://c.example",
        ),
    ],
)
def test_the_endpoint_is_found_by_the_account(options, endpoint):
    assert account_of(config(**options)).endpoint == endpoint


def test_secrets_come_from_the_environment_or_a_file_and_never_print(monkeypatch, tmp_path):
    monkeypatch.setenv("THE_KEY", "Y2FuYXJ5LTE=")
    (tmp_path / "secret").write_text("sig=canary-2\n")
    options = config(account_key="${THE_KEY}")
    assert account_of(options).key == "Y2FuYXJ5LTE="
    assert "Y2FuYXJ5" not in repr(options)
    assert account_of(config(sas={"file": str(tmp_path / "secret")})).sas == "sig=canary-2"


def test_the_readme_has_every_option_with_its_type_and_its_default():
    assert set(documented(README)) == own_options(AzureConfig)


def test_the_place_is_the_account_the_container_and_the_prefix_and_no_secret(tmp_path):
    assert config().place == config(name="two", threads=3).place == "acc kv-cache/"
    text = "DefaultEndpointsProtocol=https;AccountName=acc;AccountKey=aHVudGVyMg==;EndpointSuffix=core.windows.net"
    assert config(account="", connection_string=text, prefix="a").place == "acc kv-cache/a"
    assert config(account="", emulator=True).place == "emulator kv-cache/"
    key = tmp_path / "key"
    key.write_text("BlobEndpoint=https://example.org")
    tier = config(account="", connection_string={"file": str(key)})
    assert tier.place == "", "it is not known"
    key.unlink()
    assert tier.place == ""
