"""Tests of a third-rung tier that keeps quotas of tenants (``SupportsQuotas``)."""

from typing import Any, ClassVar

from kvtiers.api import JobResult, OffloadKey, SecondaryTierManager, SupportsQuotas
from kvtiers.testing.applies import applies_to
from kvtiers.testing.guarded import same_bytes
from kvtiers.testing.secondary_tier.engine import SmallEngine, new_keys
from kvtiers.testing.secondary_tier.promises import TierTestBase

__all__ = ["QuotaTests"]

_QUOTA = 4  # chunks of the tenant "blue"


def _keeps_quotas(tests: Any) -> bool:
    return bool(tests.keeps_quotas)


class QuotaTests(TierTestBase):
    """Each tenant within its quota. The author's side: ``keeps_quotas``."""

    keeps_quotas: ClassVar[bool] = False

    def test_quotas_that_the_tier_keeps_are_tested(self, engine: SmallEngine) -> None:
        assert self.keeps_quotas == isinstance(engine.tier, SupportsQuotas), (
            f"{type(engine.tier).__name__} has {'no ' if self.keeps_quotas else ''}set_quotas() (SupportsQuotas): "
            f"'keeps_quotas = {not self.keeps_quotas}' in the test class says so"
        )

    @applies_to(_keeps_quotas)
    def test_a_tenant_at_its_quota_loses_its_oldest_chunks_and_no_other_loses_one(self, engine: SmallEngine) -> None:
        _set_quota(engine)
        others = [*new_keys(3), *new_keys(3, "red")]
        _store(engine, others)
        keys = new_keys(2 * _QUOTA, "blue")
        for number, key in enumerate(keys, start=1):
            assert _store(engine, [key]).success, "a tenant that had chunks to lose could not store a new one"
            there = engine.present(keys[:number])
            assert there[-1], "a store of a new chunk succeeded, and it is absent"
            assert sum(there) <= _QUOTA, f"a tenant has {sum(there)} chunks, its quota is {_QUOTA}"
            assert there == sorted(there), "of a tenant without room the oldest chunks go first"
        assert all(engine.present(others)), "a chunk of another tenant, or of none, went for a tenant at its quota"

    @applies_to(_keeps_quotas)
    def test_a_store_larger_than_the_quota_keeps_what_has_room_and_declines_the_rest(self, engine: SmallEngine) -> None:
        _set_quota(engine)
        for count in (_QUOTA + 2, 2 * _QUOTA):  # the first one into an empty tier
            keys = new_keys(count, "blue")
            result = _store(engine, keys)
            assert not result.success, f"{count} chunks of a tenant with a quota of {_QUOTA} were all stored"
            assert result.successful_keys is not None, "chunks without room are no error: report those that were stored"
            there = {key for key, is_there in zip(keys, engine.present(keys), strict=True) if is_there}
            assert there == set(result.successful_keys), "what is reported as stored is not what is there"
            assert 0 < len(there) <= _QUOTA, f"{len(there)} chunks were stored, the quota is {_QUOTA}"

    @applies_to(_keeps_quotas)
    def test_chunks_of_a_tenant_with_a_quota_come_back_as_they_were_stored(self, engine: SmallEngine) -> None:
        _set_quota(engine)
        keys = new_keys(_QUOTA, "blue")
        contents = [engine.fill(row, row) for row in range(_QUOTA)]
        assert engine.finish(engine.store(keys, range(_QUOTA)))[0].success, "a tenant may use all of its quota"
        assert engine.finish(engine.load(keys, range(20, 20 + _QUOTA)))[0].success
        for row, content in enumerate(contents, start=20):
            same_bytes(engine.value_in(row), content, "a chunk of a tenant with a quota")


def _set_quota(engine: SmallEngine) -> None:
    """Give the tenant "blue" a quota of four chunks, which no other tenant has."""
    tier: SecondaryTierManager | SupportsQuotas = engine.tier
    assert isinstance(tier, SupportsQuotas)
    tier.set_quotas({"blue": _QUOTA * engine.value_bytes}.get)


def _store(engine: SmallEngine, keys: list[OffloadKey]) -> JobResult:
    [result] = engine.finish(engine.store(keys, range(len(keys))))
    return result
