"""Options: what is refused before anything is opened, with what was expected; and what a bucket's rules do."""

from pathlib import Path

import pytest
from objectstore_checks import documented, own_options
from pydantic import ValidationError

from kvtiers_gcs.bucket_settings import Effect, effect_of, rules_for
from kvtiers_gcs.config import GcsConfig

README = Path(__file__).parents[1] / "README.md"
DELETE, ABORT = {"type": "Delete"}, {"type": "AbortIncompleteMultipartUpload"}
NEVER = Effect(None, None)


def config(**options):
    return GcsConfig.model_validate({"type": "gcs", "bucket": "kv-cache", **options})


def refusal(**options) -> str:
    with pytest.raises(ValidationError) as refused:
        config(**options)
    [error] = refused.value.errors()
    return error["msg"]


@pytest.mark.parametrize("bucket", ["ab", "Upper", "-ab", "ab-", "a b", "gs://kv-cache", "a/b"])
def test_a_bucket_that_is_none_is_refused(bucket):
    assert "expected 3 to 222 of a-z, 0-9" in refusal(bucket=bucket)


@pytest.mark.parametrize("prefix", ["/a", "a/", "a//b", "a/../b", ".", "a b", "ä", "a?b", "a%20b"])
def test_a_prefix_that_is_none_is_refused(prefix):
    assert "expected parts of letters, digits" in refusal(prefix=prefix)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"credentials": "{}", "credentials_file": "/x"}, "are several sources of credentials"),
        ({"credentials": "{}", "anonymous": True, "endpoint": "http://x"}, "are several sources of credentials"),
        ({"anonymous": True}, "anonymous needs the endpoint of an emulator"),
        ({"timeout": "31s"}, "longer than the tier's deadline (30 s)"),
        ({"storage_class": "ARCHIVE"}, "'bucket', 'STANDARD', 'NEARLINE' or 'COLDLINE'"),
        ({"endpoint": "https://x/storage"}, "expected 'https://HOST'"),
        ({"part_size": "1MiB"}, "greater than or equal to 5242880"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, said):
    assert said in refusal(**options)


def test_the_readme_has_every_option_with_its_type_and_its_default():
    assert set(documented(README)) == own_options(GcsConfig)


@pytest.mark.parametrize("prefix", ["", "llama/", "team/llama/"])
def test_the_rules_for_a_prefix_do_what_is_wanted(prefix):
    assert effect_of(rules_for(prefix, 14)["rule"], prefix) == Effect(14, 1)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"action": DELETE, "condition": {"age": 3}}, Effect(3, None)),
        ({"action": DELETE, "condition": {"age": 3, "matchesPrefix": ["x/", "te"]}}, Effect(3, None)),
        ({"action": DELETE, "condition": {"age": 3, "matchesPrefix": ["team/kv/ns/"]}}, NEVER),
        ({"action": DELETE, "condition": {"age": 3, "matchesStorageClass": ["NEARLINE"]}}, NEVER),
        ({"action": DELETE, "condition": {"numNewerVersions": 3}}, NEVER),
        ({"action": {"type": "SetStorageClass"}, "condition": {"age": 3}}, NEVER),
        ({"action": ABORT, "condition": {"age": 7}}, Effect(None, 7)),
    ],
)
def test_a_rule_counts_if_it_is_for_all_of_the_prefix(rule, expected):
    assert effect_of([rule], "team/kv/") == expected


def test_the_place_is_the_endpoint_the_bucket_and_the_prefix():
    assert config().place == config(name="two", threads=3).place == "gs://kv-cache/"
    assert config(prefix="a").place == "gs://kv-cache/a"
    assert config(endpoint="http://fake:4443").place == "http://fake:4443//kv-cache/"
