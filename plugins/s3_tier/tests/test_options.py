"""Options: what is refused before anything is opened, with what was expected."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvtiers.api import TierConfig
from kvtiers.config.options import options_of
from kvtiers_s3.plugin import S3Config

README = Path(__file__).parents[1] / "README.md"


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
