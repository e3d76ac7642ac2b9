"""``kvtiers`` and ``kvtiers-s3``, on Ceph's gateway."""

import json

import pytest
from libraries.objectstore.tests.commands import BucketTenantTests, CommandTests, run
from plugins.s3_tier.tests.differences import S3


class TestS3Commands(CommandTests):
    differences = S3


class TestS3Tenants(BucketTenantTests):
    differences = S3


def test_the_rule_is_printed_and_what_to_do_with_it_is_said_beside_it():
    done = run("kvtiers-s3", "lifecycle", "--days", "14", "--prefix", "/llama/")
    [rule] = json.loads(done.stdout)["Rules"]
    assert rule["Filter"] == {"Prefix": "llama/"}
    assert rule["Expiration"] == {"Days": 14}
    assert "nothing was set. S3 replaces all rules of a bucket at once" in done.stderr


@pytest.mark.parametrize("days", ["0", "-1", "x", "1.5", ""])
def test_days_that_are_none_are_one_clear_line(days):
    said = run("kvtiers-s3", "lifecycle", f"--days={days}", status=2).stderr
    assert f"expected a whole number of days from 1 on, got {days!r}" in said
