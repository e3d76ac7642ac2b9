"""What ``kvtiers check`` and the commands say of Cloud Storage: one line, with what to do about it."""

import json

import pytest
from objectstore_checks import CheckTests, check_here, refused, the_error
from objectstore_commands import CommandTests, run, write_file

from kvtiers_gcs.store import GcsStore
from kvtiers_objectstore.testing.proxy import Fault, refusal


@pytest.fixture
def opened():
    stores = []

    def open_store(config):
        stores.append(GcsStore(config))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def of_settings(request):
    return request.path.startswith("/storage/v1/b/")


def with_settings(settings):
    body = json.dumps(settings).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    return lambda request: Fault(answer) if of_settings(request) else None


class TestGcsCheck(CheckTests):
    def test_a_missing_bucket(self, config):
        said = the_error(config(bucket="there-is-none"))
        assert "bucket 'there-is-none'" in said
        assert "404 NoSuchBucket: there is no such bucket here; check bucket and endpoint, or create it" in said

    @pytest.mark.parametrize(
        ("status", "code", "expected"),
        [
            (401, "AuthenticationRequired", "the token is not taken; check credentials_file"),
            (401, "", "the token is not taken; check credentials_file"),
            (403, "AccessDenied", "grant the role 'Storage Object User' (roles/storage.objectUser) on the bucket"),
            (403, "UserProjectAccountProblem", "there is a problem with the project's billing"),
            (403, "RequestTimeTooSkewed", "this machine's clock is wrong; run an NTP service"),
            (429, "SlowDown", "too many requests at once for this bucket"),
            (503, "", "503 SlowDown: too many requests"),
            (400, "UserProjectMissing", "the bucket wants its readers to pay"),
        ],
    )
    def test_a_refusal_is_named_with_its_cure(self, config, between, through, status, code, expected):
        between.script = lambda _: Fault(refusal(status, code, "Retry-After: 1\r\n"))
        assert expected in refused(GcsStore, config(**through(between)))

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
    store_class = GcsStore

    @pytest.fixture
    def tier(self):
        def options_in_a_file(config):
            where = {"endpoint": config.endpoint, "bucket": config.bucket, "prefix": config.prefix}
            return {"type": "gcs", "anonymous": True, **where}

        return options_in_a_file

    def test_a_check_of_a_file_says_what_is_wrong(self, config, tier, tmp_path):
        file = tmp_path / "tiers.yaml"
        write_file(file, {**tier(config()), "bucket": "there-is-none"})
        assert "there is no such bucket here; check bucket" in " ".join(
            run("kvtiers", "check", file, status=1).stdout.split()
        )


def test_the_rules_are_printed_and_what_to_do_with_them_is_said_beside_them():
    done = run("kvtiers-gcs", "lifecycle", "--days", "14", "--prefix", "/llama/", "--bucket", "kv-cache")
    [delete, abort] = json.loads(done.stdout)["rule"]
    assert delete == {"action": {"type": "Delete"}, "condition": {"age": 14, "matchesPrefix": ["llama/"]}}
    assert abort["action"] == {"type": "AbortIncompleteMultipartUpload"}
    assert "gcloud storage buckets update gs://kv-cache --lifecycle-file=rules.json" in done.stderr
    assert "nothing was set. Cloud Storage replaces all rules of a bucket at once" in done.stderr
