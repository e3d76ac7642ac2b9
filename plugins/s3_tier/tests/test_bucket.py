"""The bucket's own operations, which are boto3's whatever moves the values."""

from datetime import timedelta

import pytest
from libraries.objectstore.tests.stores import BucketTests, value
from plugins.s3_tier.tests.differences import S3
from s3_servers import client_of, uploads

from kvtiers_objectstore.testing.proxy import Fault, refusal

PART = S3.part


class TestS3Bucket(BucketTests):
    differences = S3

    def test_uploads_that_a_killed_process_left_are_aborted_when_they_are_old(self, opened, config):
        options = config(part_size=PART)
        client = client_of(options.endpoint)
        where = {"Bucket": options.bucket, "Key": f"{options.prefix}/a/b"}
        client.create_multipart_upload(**where)
        elsewhere = client.create_multipart_upload(Bucket=options.bucket, Key="elsewhere")
        store = opened(options, value_bytes=2 * PART)  # it looks for old ones at its start
        store.close()
        assert len(uploads(options)) == 1, "an upload that may be in flight was aborted"
        store = opened(options)
        store._parts.start_clean_up(f"{options.prefix}/", timedelta(seconds=-60))
        store.close()
        assert uploads(options) == []
        client.abort_multipart_upload(Bucket=options.bucket, Key="elsewhere", UploadId=elsewhere["UploadId"])

    def test_looking_for_old_uploads_is_not_worth_an_error(self, opened, config, between):
        between.script = lambda r: Fault(refusal(403, "AccessDenied")) if "uploads" in r.path else None
        opened(config(endpoint=between.endpoint, part_size=PART), value_bytes=2 * PART).close()
        assert any("?uploads" in request.path for request in between.log)

    @pytest.mark.parametrize("code", ["NotImplemented", "MissingContentMD5"])
    def test_values_are_deleted_one_by_one_where_the_server_cannot_do_more(self, opened, config, between, code):
        store = opened(config(endpoint=between.endpoint))
        for name in ("a", "b", "c"):
            store.write(name, value(1))
        status = 501 if code == "NotImplemented" else 400
        between.script = lambda r: Fault(refusal(status, code)) if r.method == "POST" else None
        store.delete(["a", "c", "absent"])
        assert store.exists(["a", "b", "c"]) == [False, True, False]
