"""What ``kvtiers check`` and the commands say of Cloud Storage: one line, with what to do about it."""

import json

from libraries.objectstore.tests.checks import CheckTests, EnvironmentTests, check_here
from libraries.objectstore.tests.commands import BucketTenantTests, CommandTests, run
from plugins.gcs_tier.tests.differences import GCS

from kvtiers_objectstore.testing.proxy import Fault, refusal


def of_settings(request):
    return request.path.startswith("/storage/v1/b/")


def with_settings(settings):
    body = json.dumps(settings).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    return lambda request: Fault(answer) if of_settings(request) else None


class TestGcsCheck(CheckTests, EnvironmentTests):
    differences = GCS

    def test_a_bucket_without_rules_gets_warnings_with_the_command(self, config, between, through):
        between.script = with_settings(
            {"versioning": {"enabled": True}, "softDeletePolicy": {"retentionDurationSeconds": "604800"}}
        )
        found = check_here(config(prefix="team/llama", **through(between)))
        said = [f"{finding.text}. Fix: {finding.fix}" for finding in found if finding.level == "warning"]
        for expected in (
            "so the bucket grows for ever. Fix: 'kvtiers-gcs lifecycle --days N --prefix team/llama' prints one",
            "no lifecycle rule aborts uploads that a killed process left",
            "the bucket keeps versions",
            "soft delete keeps values for 7 days after they were deleted",
        ):
            assert any(expected in text for text in said), said
        assert any("--clear-soft-delete" in text for text in said)

    def test_the_rules_that_the_command_prints_are_the_ones_that_are_wanted(self, config, between, through):
        printed = json.loads(run("kvtiers-gcs", "lifecycle", "--days", "9", "--prefix", "team/llama").stdout)
        between.script = with_settings({"lifecycle": printed})
        texts = [finding.text for finding in check_here(config(prefix="team/llama", **through(between)))]
        assert "values are removed 9 days after they were written" in texts
        assert "uploads that never ended are aborted after 1 days" in texts
        assert any(
            "grows for ever" in finding.text for finding in check_here(config(prefix="other", **through(between)))
        )

    def test_settings_that_may_not_be_read_are_a_warning(self, config, between, through):
        between.script = lambda request: Fault(refusal(403, "")) if of_settings(request) else None
        found = check_here(config(**through(between)))
        assert any("the bucket's settings cannot be read: GET of the bucket's settings: 403" in f.text for f in found)
        assert not [finding for finding in found if finding.level == "error"]


class TestGcsCommands(CommandTests):
    differences = GCS


class TestGcsTenants(BucketTenantTests):
    differences = GCS


def test_the_rules_are_printed_and_what_to_do_with_them_is_said_beside_them():
    done = run("kvtiers-gcs", "lifecycle", "--days", "14", "--prefix", "/llama/", "--bucket", "kv-cache")
    [delete, abort] = json.loads(done.stdout)["rule"]
    assert delete == {"action": {"type": "Delete"}, "condition": {"age": 14, "matchesPrefix": ["llama/"]}}
    assert abort["action"] == {"type": "AbortIncompleteMultipartUpload"}
    assert "gcloud storage buckets update gs://kv-cache --lifecycle-file=rules.json" in done.stderr
    assert "nothing was set. Cloud Storage replaces all rules of a bucket at once" in done.stderr
