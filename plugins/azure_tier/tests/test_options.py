"""Options: what is refused before anything is opened, with what was expected."""

import pytest
from libraries.objectstore.tests.options import OptionsTests
from plugins.azure_tier.tests.differences import AZURE

from kvtiers_azure.access import account_of


class TestAzureOptions(OptionsTests):
    differences = AZURE

    @pytest.mark.parametrize("container", ["ab", "Upper", "a--b", "-ab", "ab-", "a" * 64, "a_b", "a.b"])
    def test_a_container_that_azure_would_refuse_is_refused(self, container):
        assert "expected 3 to 63 of a-z, 0-9" in self.refusal(container=container)

    @pytest.mark.parametrize("container", ["abc", "kv-cache-1", "a" * 63, "$root"])
    def test_a_container_is_taken_as_it_is(self, container):
        assert self.config(container=container).container == container

    @pytest.mark.parametrize(
        ("options", "endpoint"),
        [
            ({}, "https://acc.blob.core.windows.net"),
            ({"endpoint": "https://acc.blob.core.chinacloudapi.cn/"}, "https://acc.blob.core.chinacloudapi.cn"),
            ({"account": "", "emulator": True}, "http://127.0.0.1:10000/devstoreaccount1"),
            (
                {"account": "", "connection_string": "UseDevelopmentStorage=true"},
                "http://127.0.0.1:10000/devstoreaccount1",
            ),
            (
                {
                    "account": "",
                    "connection_string": "AccountName=b;AccountKey=a2V5;EndpointSuffix=core.usgovcloudapi.net",
                },
                "https://b.blob.core.usgovcloudapi.net",
            ),
            (
                {"account": "", "connection_string": "BlobEndpoint=https://c.example/;SharedAccessSignature=?sig=x"},
                "https://c.example",
            ),
        ],
    )
    def test_the_endpoint_is_found_by_the_account(self, options, endpoint):
        assert account_of(self.config(**options)).endpoint == endpoint

    def test_secrets_come_from_the_environment_or_a_file_and_never_print(self, monkeypatch, tmp_path):
        monkeypatch.setenv("THE_KEY", "Y2FuYXJ5LTE=")
        (tmp_path / "secret").write_text("sig=canary-2\n")
        options = self.config(account_key="${THE_KEY}")
        assert account_of(options).key == "Y2FuYXJ5LTE="
        assert "Y2FuYXJ5" not in repr(options)
        assert account_of(self.config(sas={"file": str(tmp_path / "secret")})).sas == "sig=canary-2"

    def test_the_place_is_the_account_the_container_and_the_prefix_and_no_secret(self, tmp_path):
        assert self.config().place == self.config(name="two", threads=3).place == "acc kv-cache/"
        text = "DefaultEndpointsProtocol=https;AccountName=acc;AccountKey=aHVudGVyMg==;EndpointSuffix=core.windows.net"
        assert self.config(account="", connection_string=text, prefix="a").place == "acc kv-cache/a"
        assert self.config(account="", emulator=True).place == "emulator kv-cache/"
        key = tmp_path / "key"
        key.write_text("BlobEndpoint=https://example.org")
        tier = self.config(account="", connection_string={"file": str(key)})
        assert tier.place == "", "it is not known"
        key.unlink()
        assert tier.place == ""
