"""``kvtiers`` and ``kvtiers-s3`` as people run them, on Ceph's gateway."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from s3_servers import ACCESS_KEY, SECRET_KEY, client_of

from kvtiers.layout.seal import seal_value
from kvtiers.layout.storage_name import StorageNames
from kvtiers_s3.store import S3Store

BIN = Path(sys.executable).parent
MODEL = "llama-" + "5f" * 12
NAMES = StorageNames(f"prod/{MODEL}/", bytes.fromhex(MODEL[-24:-8]))
VALUES = 1010
PAGE = 4096


def run(*command, status=0):
    done = subprocess.run(
        [str(BIN / command[0]), *map(str, command[1:])], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == status, (done.stdout[-2000:], done.stderr[-2000:])
    return done


def name_of(number):
    return NAMES.name(number.to_bytes(8, "big") + bytes(4))


@pytest.fixture
def options(config):
    """The options of a tier that has more values than a page of a listing."""
    options = config()
    store = S3Store(options)

    def put(number):
        value = memoryview(bytearray(PAGE))
        seal_value(value, 1000, name_of(number), NAMES.layout_id)
        store.write(name_of(number), value)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(VALUES)))
    store.close()
    return options


@pytest.fixture
def on(options, tmp_path):
    """Return a function that runs ``kvtiers store COMMAND`` on it and returns what it prints as JSON."""
    file = tmp_path / "tiers.yaml"
    tier = {"type": "s3", "endpoint": options.endpoint, "bucket": options.bucket, "prefix": options.prefix}
    tier |= {"region": "us-east-1", "access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
    file.write_text(
        json.dumps({"version": 1, "namespace": "prod", "primary": {"capacity": "64MiB"}, "secondary": [tier]})
    )

    def command(name, *more, status=0):
        return json.loads(run("kvtiers", "store", name, "s3", "--config", file, "--json", *more, status=status).stdout)

    return command


def test_a_store_is_listed_counted_verified_and_pruned_page_by_page(options, on):
    client = client_of(options.endpoint)
    assert len(on("ls")["values"]) == VALUES
    counted = on("du")["total"]
    assert (counted["values"], counted["bytes"]) == (VALUES, VALUES * PAGE)
    client.put_object(Bucket=options.bucket, Key=f"{options.prefix}/{name_of(7)}", Body=bytes(PAGE))
    verified = on("verify", status=1)
    assert verified["ok"]["values"] == VALUES - 1
    assert verified["damaged_names"] == [name_of(7)]
    assert on("prune", "--larger-than", "1KiB")["total"]["values"] == VALUES
    assert on("du")["total"]["values"] == 0


def test_a_check_of_a_file_says_what_is_wrong_and_what_to_do(options, tmp_path):
    file = tmp_path / "tiers.yaml"
    tier = {"type": "s3", "endpoint": options.endpoint, "bucket": options.bucket, "access_key": "ABSENT"}
    tier |= {"secret_key": "canary-secret"}
    file.write_text(
        json.dumps({"version": 1, "namespace": "prod", "primary": {"capacity": "64MiB"}, "secondary": [tier]})
    )
    said = run("kvtiers", "check", file, status=1).stdout
    assert "the server has no such access key; check access_key" in " ".join(said.split())
    assert "canary-secret" not in said


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
