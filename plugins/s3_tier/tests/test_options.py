"""Options: what is refused before anything is opened, with what was expected."""

import pytest
from pydantic import ValidationError

from kvtiers_s3.plugin import S3Config


def config(**options):
    return S3Config.model_validate({"type": "s3", "bucket": "some-bucket", **options})


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
