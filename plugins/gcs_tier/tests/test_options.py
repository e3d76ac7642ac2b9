"""Options: what is refused before anything is opened, with what was expected; and what a bucket's rules do."""

import pytest
from libraries.objectstore.tests.options import OptionsTests
from plugins.gcs_tier.tests.differences import GCS

from kvtiers_gcs.bucket_settings import Effect, effect_of, rules_for

DELETE, ABORT = {"type": "Delete"}, {"type": "AbortIncompleteMultipartUpload"}
NEVER = Effect(None, None)


class TestGcsOptions(OptionsTests):
    differences = GCS

    @pytest.mark.parametrize("bucket", ["ab", "Upper", "-ab", "ab-", "a b", "gs://kv-cache", "a/b"])
    def test_a_bucket_that_is_none_is_refused(self, bucket):
        assert "expected 3 to 222 of a-z, 0-9" in self.refusal(bucket=bucket)

    def test_the_place_is_the_endpoint_the_bucket_and_the_prefix(self):
        assert self.config().place == self.config(name="two", threads=3).place == "gs://kv-cache/"
        assert self.config(prefix="a").place == "gs://kv-cache/a"
        assert self.config(endpoint="http://fake:4443").place == "http://fake:4443//kv-cache/"


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
