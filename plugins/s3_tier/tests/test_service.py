"""What an engine sees of S3 when it goes wrong: misses and counters, never wrong bytes, never a wait without end."""

import ssl

import pytest
import trustme
from libraries.objectstore.tests.faults import COUNT, POISON, FaultTests, fill, load_again, sound
from libraries.objectstore.tests.service import new_keys, service
from plugins.s3_tier.tests.differences import CLIENTS, S3

from kvtiers_objectstore.testing.proxy import Proxy


class TestS3Faults(FaultTests):
    differences = S3


def certified(authority):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    return tls


@pytest.mark.parametrize("client", CLIENTS)
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
