"""Options: what is refused before anything is opened, with what was expected."""

import contextlib
import re
import socket
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvtiers.api import ConfigError, TierConfig, TierUnavailable
from kvtiers.config.options import options_of
from kvtiers_objectstore.requests import Requests
from kvtiers_s3.config import S3Config
from kvtiers_s3.connection import Connection
from kvtiers_s3.store import S3Store, open_client

README = Path(__file__).parents[1] / "README.md"


def config(**options):
    return S3Config.model_validate({"type": "s3", "bucket": "some-bucket", **options})


def connection(**options):
    keys = {"access_key": "A", "secret_key": "S"}
    return Connection(config(**keys, **options), Requests(0, 0))


def refusal(**options) -> str:
    with pytest.raises(ValidationError) as refused:
        config(**options)
    [error] = refused.value.errors()
    return error["msg"]


@pytest.mark.parametrize("prefix", ["/a", "a/", "a//b", "a/../b", ".", "a b", "ä", "a\nb", "a?b", "a%20b", "a+b"])
def test_a_prefix_that_servers_would_not_all_take_alike_is_refused(prefix):
    assert "expected parts of letters, digits" in refusal(prefix=prefix)


@pytest.mark.parametrize("prefix", ["", "a", "team/kv-cache_1", "a.b/(c)"])
def test_a_prefix_is_taken_as_it_is(prefix):
    assert config(prefix=prefix).prefix == prefix


@pytest.mark.parametrize("url", ["s3.local", "ftp://s3.local", "https://s3.local/bucket", "https://", "http://a b"])
def test_an_endpoint_is_a_url_without_a_path(url):
    assert "expected 'https://HOST'" in refusal(endpoint=url)
    assert "expected 'https://HOST'" in refusal(sts_endpoint=url)


def test_an_endpoint_loses_its_last_slash():
    assert config(endpoint="http://s3.local:9000/").endpoint == "http://s3.local:9000"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"access_key": "a"}, "go together"),
        ({"secret_key": "a"}, "go together"),
        ({"session_token": "a"}, "belongs to an access_key"),
        ({"profile": "p", "access_key": "a", "secret_key": "b"}, "two sources of credentials"),
        ({"kms_key": "k"}, "needs 'encryption: sse-kms'"),
        ({"encryption": "sse-s3", "kms_key": "k"}, "needs 'encryption: sse-kms'"),
        ({"role_external_id": "x"}, "belongs to a role"),
        ({"timeout": "31s"}, "longer than the tier's deadline (30 s)"),
        ({"storage_class": "DEEP_ARCHIVE"}, "cannot be read before they are restored"),
        ({"part_size": "1MiB"}, "greater than or equal to 5242880"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, said):
    assert said in refusal(**options)


def test_secrets_come_from_the_environment_or_a_file_and_never_print(monkeypatch, tmp_path):
    monkeypatch.setenv("THE_KEY", "canary-1")
    (tmp_path / "secret").write_text("canary-2\n")
    options = config(access_key="${THE_KEY}", secret_key={"file": str(tmp_path / "secret")})
    assert (options.access_key.reveal(), options.secret_key.reveal()) == ("canary-1", "canary-2")
    assert "canary" not in repr(options)


def test_what_moves_values_is_obstore_unless_boto3_is_wanted():
    assert [open_client(connection(client=client)).name for client in ("auto", "obstore", "boto3")] == [
        "obstore",
        "obstore",
        "boto3",
    ]


def test_where_obstore_is_not_installed_boto3_moves_values_unless_obstore_is_wanted(monkeypatch):
    monkeypatch.setattr("kvtiers_s3.store.find_spec", lambda _name: None)
    assert [open_client(connection(client=client)).name for client in ("auto", "boto3")] == ["boto3", "boto3"]
    with pytest.raises(ConfigError, match="client 'obstore' is not installed; pip install obstore, or set"):
        open_client(connection(client="obstore"))


def test_both_clients_keep_as_many_connections_as_are_wanted():
    few = connection(connections=7, endpoint="http://127.0.0.1:1")
    assert few.boto3_client(attempts=1).meta.config.max_pool_connections == 7
    assert few.obstore().client_options["pool_max_idle_per_host"] == "7"


@pytest.fixture
def full_listener():
    """The URL of a port where connections are never made: none is accepted, and there is no room to wait."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("client", ["obstore", "boto3"])
def test_a_connection_that_is_not_made_is_given_up_before_a_request_would_be(full_listener, client):
    times = {"connect_timeout": "300ms", "timeout": "25s"}
    begin = time.monotonic()
    with pytest.raises(TierUnavailable, match="Timeout: no answer in time"):
        S3Store(config(access_key="A", secret_key="S", endpoint=full_listener, client=client, **times))
    assert time.monotonic() - begin < 20


def documented():
    """Yield name, type and default of each option in the README's table."""
    table = README.read_text(encoding="utf-8").partition("## Options")[2].partition("\n\n|")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        names, kind, default, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert meaning
        names, defaults = re.findall(r"`(.+?)`", names), re.findall(r"`(.+?)`", default) or [default]
        for name, text in zip(names, defaults * (len(names) // len(defaults)), strict=True):
            yield name, "boolean" if kind == "true or false" else kind.replace("`", "").replace(", ", " | "), text


def test_the_readme_has_every_option_with_its_type_and_its_default():
    common = options_of(TierConfig)
    own = [option for option in options_of(S3Config) if option not in common]
    written = {(o.name, o.type, "required" if o.required else "" if o.default == "none" else o.default) for o in own}
    assert set(documented()) == written
    assert all(option.description for option in own)


def test_the_place_is_the_endpoint_the_bucket_and_the_prefix():
    assert config().place == config(name="two", threads=3).place == "s3://some-bucket/"
    places = {config(prefix="a").place, config(endpoint="https://minio:9000/").place, config(bucket="other").place}
    assert places == {"s3://some-bucket/a", "https://minio:9000//some-bucket/", "s3://other/"}
