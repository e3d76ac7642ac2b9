"""The store itself, on Azurite: what all tiers by obstore promise, and what is Azure's own."""

import contextlib
import signal
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
import trustme
from azure_servers import ACCOUNT, ACCOUNT_KEY, Azurite, account_sas, new_container
from libraries.objectstore.tests.stores import BucketTests, RestartTests, StoreTests, read, value
from plugins.azure_tier.tests.differences import AZURE

from kvtiers.api import ConfigError
from kvtiers_azure.config import AzureConfig
from kvtiers_azure.store import AzureStore
from kvtiers_objectstore.failures import ObjectStoreBusyError, ObjectStoreError
from kvtiers_objectstore.testing.proxy import Fault, Proxy


class TestAzureStore(StoreTests):
    differences = AZURE

    def test_blobs_get_the_access_tier_that_is_wanted(self, opened, config, between, through):
        store = opened(config(**through(between), access_tier="Cool", part_size=self.part))
        store.write("a", value(1))
        store.write("large", value(1, self.part + 4096))
        tiers = [request.headers.get("x-ms-access-tier") for request in between.log if request.method == "PUT"]
        assert tiers == ["Cool", None, None, "Cool"]  # of parts, the list that ends them has it

    def test_a_connection_that_the_server_is_about_to_close_is_not_used(self, opened):
        # Azurite closes a connection that was idle for 6 s. Stopped meanwhile, it does so when it goes on, before it
        # looks at what has come in: a request on that connection is cut off, as the control shows.
        with Azurite() as server, contextlib.closing(HTTPConnection("127.0.0.1", server.port)) as control:
            where = {"account": ACCOUNT, "endpoint": server.endpoint, "account_key": ACCOUNT_KEY}
            store = opened(AzureConfig(type="azure", container=new_container(server.endpoint), **where))
            store.write("a", value(1))
            control.request("GET", "/")
            control.getresponse().read()
            new_container(server.endpoint)  # answered by the same loop, which has set both clocks before
            stopped = time.monotonic()
            server.send(signal.SIGSTOP)
            time.sleep(max(0.0, stopped + 6.5 - time.monotonic()))
            control.request("GET", "/")
            with ThreadPoolExecutor(1) as pool:
                writing = pool.submit(store.write, "a", value(2))
                until = time.monotonic() + 60
                while len(unread(server.port)) < 2 and time.monotonic() < until:
                    time.sleep(0.01)
                requests = len(unread(server.port))
                server.send(signal.SIGCONT)
                writing.result()
            assert requests == 2, "both were sent while the server was stopped"
            with pytest.raises(ConnectionError):  # else the server has not closed what was idle
                control.getresponse()
            assert read(store, "a") == bytes([2]) * 4096


class TestAzureBucket(BucketTests):
    differences = AZURE


class TestAzureRestart(RestartTests):
    differences = AZURE

    @pytest.fixture
    def keeping(self):
        with Azurite(keeps=True) as server:
            where = {"account": ACCOUNT, "endpoint": server.endpoint, "account_key": ACCOUNT_KEY}
            yield server, AzureConfig(type="azure", container=new_container(server.endpoint), **where)


def unread(port: int) -> list[str]:
    """Return the sockets at this port that have bytes which the server has not read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"]
    return [row[2] for row in ours if not row[4].endswith(":00000000")]


# -- who asks


def works(config) -> bool:
    store = AzureStore(config)
    try:
        store.write("credentials", value(9))
        return read(store, "credentials") == bytes([9]) * 4096
    finally:
        store.close()


def test_a_shared_access_signature_is_enough(config):
    assert works(config(sas="?" + account_sas()))
    assert works(config(sas=account_sas()))


def test_values_are_deleted_one_by_one_by_a_shared_access_signature(config):
    store = AzureStore(config(sas=account_sas()))
    for name in ("a", "b", "c"):
        store.write(name, value(1))
    store.delete(["a", "c", "absent"])
    assert store.exists(["a", "b", "c"]) == [False, True, False]
    assert store.stats()["delete_requests"] == 3
    store.close()
    store = AzureStore(config(sas=account_sas("rwlac")))
    with pytest.raises(ObjectStoreError, match=r"DELETE .*/b: 403 Authorization.*: not allowed; grant the role"):
        store.delete(["b"])
    assert store.stats()["failed_requests"] == 1
    store.close()


def test_a_delete_by_a_signature_uses_the_same_authority_and_time_out(config, azurite, tmp_path):
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with Proxy(azurite.port, tls=tls) as proxy:
        where = {"endpoint": f"{proxy.endpoint}/devstoreaccount1", "ca_file": tmp_path / "ca.pem"}
        store = AzureStore(config(sas=account_sas(), timeout="3s", **where))
        store.write("a", value(1))
        store.delete(["a"])
        assert store.exists(["a"]) == [False]
        proxy.script = lambda _request: Fault(first_byte=9.0)
        with pytest.raises(ObjectStoreBusyError, match="Timeout: no answer in time"):
            store.delete(["a"])
        store.close()


def test_a_connection_string_says_account_key_and_endpoint(azurite, container):
    text = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={ACCOUNT_KEY};"
    text += f"BlobEndpoint={azurite.endpoint};"
    assert works(AzureConfig(type="azure", container=container, connection_string=text))
    text = f"BlobEndpoint={azurite.endpoint}/;SharedAccessSignature={account_sas()}"
    assert works(AzureConfig(type="azure", container=container, account=ACCOUNT, connection_string=text))


def test_the_emulator_needs_no_credentials(azurite, container):
    assert works(AzureConfig(type="azure", container=container, emulator=True, endpoint=azurite.endpoint))


def test_what_the_environment_says_of_another_account_does_not_count(config, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "another")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "YW5vdGhlcg==")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=another")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    assert works(config())


def test_a_key_in_a_file_is_read_again(config, tmp_path):
    file = tmp_path / "key"
    file.write_text("bm90IHRoZSBrZXk=")
    with pytest.raises(ConfigError, match="403"):
        AzureStore(config(account_key={"file": str(file)}))
    file.write_text(ACCOUNT_KEY)
    assert works(config(account_key={"file": str(file)}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("AccountKey=a2V5", "neither AccountName nor BlobEndpoint"),
        ("AccountName=a;AccountKey=not base64!", "not base64; copy it as the portal shows it"),
    ],
)
def test_a_connection_string_that_cannot_be_used_is_one_clear_line(container, text, said):
    with pytest.raises(ConfigError, match=said):
        AzureStore(AzureConfig(type="azure", container=container, connection_string=text))
