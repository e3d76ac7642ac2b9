"""What an engine sees of Cloud Storage when it goes wrong: misses and counters, never wrong bytes."""

import pytest
from objectstore_faults import FaultTests, always, fill, load_again, sound
from objectstore_service import new_keys, service

from kvtiers_objectstore.testing.proxy import Fault, refusal


class TestGcsFaults(FaultTests):
    @pytest.mark.parametrize(
        ("status", "code", "retried"),
        [
            (503, "ServiceUnavailable", True),
            (429, "SlowDown", True),
            (401, "AuthenticationRequired", False),
            (403, "UserProjectAccountProblem", False),
            (404, "NoSuchBucket", False),
            (400, "UserProjectMissing", False),
        ],
    )
    def test_what_the_service_refuses_is_a_miss_and_retried_if_it_may_pass(self, stored, status, code, retried):
        tier, proxy, keys, expected = stored
        errors = tier.figure("errors")
        proxy.script = always(Fault(refusal(status, code)), "GET")
        assert not load_again(tier, keys).success
        assert tier.figure("errors") == errors + 1
        assert (proxy.methods().count("GET") > len(keys)) is retried
        proxy.script = lambda _request: None
        assert load_again(tier, keys).success
        assert sound(tier, expected)


def test_two_engines_share_the_values(config):
    options = config()
    with service(options, 65536, 4) as one, service(options, 65536, 4) as other:
        keys = new_keys(4)
        expected = fill(one, keys)
        assert other.hits(keys) == 4
        assert load_again(other, keys).success
        assert sound(other, expected)
