"""What an engine sees of a store that goes wrong: misses and counters, never wrong bytes, never a wait without end."""

import ssl

import numpy as np
import pytest
import trustme
from objectstore_service import NAMES, new_keys, service
from s3_servers import client_of

from kvtiers_objectstore.testing.proxy import Fault, Proxy, refusal

COUNT = 4
POISON = 0xDB
PASSING = {
    "internal errors": Fault(refusal(500, "InternalError")),
    "throttling": Fault(refusal(503, "SlowDown")),
    "too many requests": Fault(refusal(429, "TooManyRequests")),
    "a truncated body": Fault(cut=5000),
    "a body cut off by a reset": Fault(cut=5000, reset=True),
    "a reset before the answer": Fault(cut=0, reset=True),
    "a body that drips": Fault(drip=0.1),
    "what is no HTTP": Fault(b"hello\r\n\r\n"),
    "no answer": Fault(first_byte=4.0),
}
LASTING = {
    "a wrong key": Fault(refusal(403, "InvalidAccessKeyId")),
    "a wrong secret": Fault(refusal(403, "SignatureDoesNotMatch")),
    "an expired token": Fault(refusal(400, "ExpiredToken")),
    "no permission": Fault(refusal(403, "AccessDenied")),
    "a missing bucket": Fault(refusal(404, "NoSuchBucket")),
    "a redirect": Fault(refusal(301, "PermanentRedirect")),
    "a wrong region": Fault(refusal(400, "AuthorizationHeaderMalformed")),
}


def always(fault, method):
    return lambda request: fault if request.method == method else None


def fill(tier, keys):
    """Store values that say whose they are; return them."""
    for row, key in zip(tier.payload, keys, strict=False):
        row[:] = np.resize(np.frombuffer(key, np.uint8), len(row))
    expected = tier.payload[: len(keys)].copy()
    result = tier.store(keys)
    assert result.success, result
    return expected


def load_again(tier, keys):
    tier.rows[:] = POISON
    return tier.load(keys)


@pytest.fixture
def stored(proxied):
    tier, proxy = proxied
    proxy.script = lambda _request: None
    keys = new_keys(COUNT)
    expected = fill(tier, keys)
    proxy.log.clear()
    yield tier, proxy, keys, expected
    proxy.script = lambda _request: None


def sound(tier, expected):
    return bool((tier.payload[: len(expected)] == expected).all())


@pytest.mark.parametrize("fault", [*PASSING.values(), *LASTING.values()], ids=[*PASSING, *LASTING])
def test_a_load_that_fails_is_a_miss_and_counted_and_the_next_one_is_right(stored, fault):
    tier, proxy, keys, expected = stored
    errors = tier.figure("errors")
    proxy.script = always(fault, "GET")
    result = load_again(tier, keys)
    assert not result.success
    assert not result.successful_keys
    assert tier.figure("errors") == errors + 1
    proxy.script = lambda _request: None
    assert load_again(tier, keys).success
    assert sound(tier, expected)


def certified(authority):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    return tls


@pytest.mark.parametrize("client", ["obstore", "boto3"])
def test_a_certificate_that_is_not_trusted_any_more_is_a_miss_and_counted(radosgw, config, tmp_path, client):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trusted, other = certified(authority), certified(trustme.CA())
    with Proxy(int(radosgw.endpoint.rpartition(":")[2]), tls=trusted) as proxy:
        options = config(client=client, endpoint=proxy.endpoint, ca_file=tmp_path / "ca.pem")
        with service(options, 65536, COUNT) as tier:
            keys = new_keys(COUNT)
            expected = fill(tier, keys)
            proxy.tls = other
            proxy.hang_up()
            result = load_again(tier, keys)
            assert not result.success
            assert not result.successful_keys
            assert (tier.rows == POISON).all()
            assert tier.figure("errors") == 1
            assert tier.hits(keys) == 0
            proxy.tls = trusted
            assert load_again(tier, keys).success
            assert sound(tier, expected)


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_load_is_tried_again_after_what_passes(stored, fault):
    tier, proxy, keys, expected = stored
    retries = tier.figure("retries")
    failed_once = set()

    def script(request):
        if request.method == "GET" and request.path not in failed_once:
            failed_once.add(request.path)
            return fault
        return None

    proxy.script = script
    assert load_again(tier, keys).success
    assert sound(tier, expected)
    assert tier.figure("retries") == retries + COUNT


@pytest.mark.parametrize("fault", LASTING.values(), ids=LASTING)
def test_what_will_not_pass_is_not_tried_again(stored, fault):
    tier, proxy, keys, _ = stored
    proxy.script = always(fault, "GET")
    assert not load_again(tier, keys).success
    gets = [request.path for request in proxy.log if request.method == "GET"]
    assert len(gets) <= COUNT


@pytest.mark.parametrize("fault", [*PASSING.values(), *LASTING.values()], ids=[*PASSING, *LASTING])
def test_a_store_that_fails_is_counted_and_leaves_what_is_there(stored, fault):
    tier, proxy, keys, expected = stored
    errors = tier.figure("errors")
    more = new_keys(COUNT)
    proxy.script = always(fault, "PUT")
    tier.rows[:] = POISON
    result = tier.store(more)
    proxy.script = lambda _request: None
    if fault.cut is None and not fault.drip and not fault.first_byte:  # else the object is written, and the answer lost
        assert not result.success
        assert tier.figure("errors") == errors + 1
        assert tier.hits(more) == 0
    assert load_again(tier, keys).success
    assert sound(tier, expected)


# What happens behind an answer's head does not matter to a question.
IN_THE_HEAD = {name: fault for name, fault in (PASSING | LASTING).items() if fault.cut is None and not fault.drip}


@pytest.mark.parametrize("fault", IN_THE_HEAD.values(), ids=IN_THE_HEAD)
def test_a_question_that_fails_is_a_miss_and_counted(stored, fault):
    tier, proxy, keys, _ = stored
    tier.tier.set_names(NAMES)  # forget what is known
    errors = tier.figure("errors")
    proxy.script = always(fault, "HEAD")
    assert tier.hits(keys) == 0
    # What has no body cannot say that it is the bucket which is missing.
    assert tier.figure("errors") == errors + (fault is not LASTING["a missing bucket"])
    proxy.script = lambda _request: None
    assert load_again(tier, keys).success


@pytest.mark.parametrize("change", [-4096, -1, 1, 4096, 1 << 20])
def test_an_object_of_another_size_is_a_miss_before_a_byte_of_it_reaches_the_row(stored, change):
    tier, _, keys, _ = stored
    missing = tier.figure("missing")
    bucket, key = tier.config.bucket, f"{tier.config.prefix}/{NAMES.names(keys[:1])[0]}"
    client_of(tier.config.endpoint).put_object(Bucket=bucket, Key=key, Body=bytes(tier.rows.shape[1] + change))
    result = load_again(tier, keys[:1])
    assert not result.success
    assert (tier.rows == POISON).all()
    assert tier.figure("missing") == missing + 1


def test_wrong_bytes_are_a_miss_and_deleted(stored):
    tier, _, keys, _ = stored
    damaged = tier.figure("seal_failures")
    bucket, key = tier.config.bucket, f"{tier.config.prefix}/{NAMES.names(keys[1:2])[0]}"
    client = client_of(tier.config.endpoint)
    value = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    value[77] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(value))
    result = load_again(tier, keys)
    assert list(result.successful_keys) == [keys[0], *keys[2:]]
    assert tier.figure("seal_failures") == damaged + 1
    assert tier.hits(keys) == 1


def test_a_chunk_that_is_absent_is_a_miss_and_the_others_land(stored):
    tier, _, keys, expected = stored
    absent = new_keys(1)[0]
    result = load_again(tier, [keys[0], absent, keys[2]])
    assert list(result.successful_keys) == [keys[0], keys[2]]
    assert (tier.payload[0] == expected[0]).all()
    assert (tier.payload[2] == expected[2]).all()


def test_a_prefix_of_200_chunks_is_located_in_nine_requests(stored):
    tier, proxy, _, _ = stored
    chunks = new_keys(200)
    for present in (0, 1, 137, 200):
        held = chunks[:present]
        for start in range(0, present, COUNT):
            fill(tier, held[start : start + COUNT])
        proxy.log.clear()
        tier.tier.set_names(NAMES)  # forget what is known
        assert tier.hits(chunks) == present
        assert len(proxy.log) <= 9, proxy.methods()
        chunks = new_keys(200)
