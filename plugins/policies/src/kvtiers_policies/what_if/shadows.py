"""The shadow caches: keys-only stacks of other sizes, policies and tiers, served with a sample of the requests' chunks.

A chunk is in the sample by its hash, always or never, and each shadow has as small a share of the rows as the sample
has of the chunks (Waldspurger et al., SHARDS, FAST 2015). That alone is off by several points: a few chunks are asked
for thousands of times, and are in the sample or not. So the reuse age of every use is taken, of all chunks: how many
chunks were asked for since the same one was asked for last. The sample gives the share of hits at each age, and the
ages of all uses are the weights (post-stratification). A use at a young age is a hit in every shadow, so a system
prompt counts as it should without being in the sample.

A policy that learns, learns from the sample alone: what it would gain is estimated too low until it has seen more.

Tenants' shares of the primary are shares of each shadow's rows. Ages are counted by tenant then, of those with a share
and of all others together: what is a hit at an age differs between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtiers.api.keys import make_offload_key
from kvtiers.types import TENANT_FIELD
from kvtiers_policies.what_if.keys_only import Case, KeysOnlyStack, ServedRequest

__all__ = ["TIMES", "Asked", "Shadows"]

TIMES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes of the primary, as multiples of the engine's own."""
_LIMIT = 1 << 32  # of a chunk's hash, by which it is in the sample
_SLOTS = 1 << 20  # chunks whose last use is remembered, about; each with the next bits of its hash, and its position
_TAG_SHIFT, _TAG_BITS, _POSITION_BITS = 20, 20, 43
_TAG = ((1 << _TAG_BITS) - 1) << _TAG_SHIFT
_PER_OCTAVE, _AGES = 4, 160
_NEVER = _AGES - 1
_HALVED_AT = 1 << 24
_PRIOR = 1.0  # uses that a share of hits begins with: as at the next younger age


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request that has ended: one hash for each full chunk of its prompt, and how many of them may be hits."""

    arrival: float
    hashes: Sequence[bytes]
    usable: int
    params: Mapping[str, object]
    output_tokens: int


class Shadows:
    """The cases around ``now``, the engine's own, each with the hits of the sample by age. One thread at a time.

    ``policies``: those to be compared. ``share``: of the chunks that are in the sample, more than 0, at most 1.
    ``step_chunks``: what the engine computes in a step, in chunks. ``halved_at``: chunks counted, at which all counts
    are halved, so that what was long ago counts less.
    """

    def __init__(
        self, now: Case, policies: Sequence[str], share: float, step_chunks: int, halved_at: int = _HALVED_AT
    ) -> None:
        self._halved_at = halved_at
        self.share = share
        self.chunks = 0
        """Full chunks that requests have asked for."""
        self._now = now
        self._with_share = {name: number for number, (name, _) in enumerate(now.shares, 1)}
        shape = len(now.shares) + 1, _AGES  # 0: tenants without a share, and requests without a tenant
        self._cases = {f"{policy} {times:g}": self._case(policy, times) for policy in policies for times in TIMES}
        for tier in now.tiers:
            rest = tuple(other for other in now.tiers if other is not tier)
            self._cases[f"without {tier.name}"] = self._sized(replace(now, tiers=rest))
        sampled_step = round(step_chunks * share)
        self._stacks = {name: KeysOnlyStack(case, sampled_step) for name, case in self._cases.items()}
        self._last = np.zeros(_SLOTS, np.int64)
        self._position = 1
        self._all: npt.NDArray[np.float64] = np.zeros(shape)
        self._sampled: npt.NDArray[np.float64] = np.zeros(shape)
        self._hits = {name: np.zeros(shape) for name in self._stacks}
        self._ages: npt.NDArray[np.intp] = np.zeros(0, np.intp)  # of the request that was taken last
        self._whose = 0  # that request's
        self._references = 0.0

    def _case(self, policy: str, times: float) -> Case:
        return self._sized(replace(self._now, policy=policy, primary=round(self._now.primary * times)))

    def _sized(self, case: Case) -> Case:
        """Return the case with the sample's share of all rows."""
        tiers = [
            replace(
                tier,
                chunks=None if tier.chunks is None else max(1, round(tier.chunks * self.share)),
                writes_per_hour=None if tier.writes_per_hour is None else tier.writes_per_hour * self.share,
            )
            for tier in case.tiers
        ]
        return replace(case, primary=max(1, round(case.primary * self.share)), tiers=tuple(tiers))

    def take(self, asked: Asked) -> ServedRequest | None:
        """Count a request's reuse ages; return the sampled part of it, None if there is none, for ``serve``."""
        count = len(asked.hashes)
        if not count:
            return None
        tenant = _tenant_of(asked)
        self._whose = self._with_share.get(tenant, 0)
        hashes = _of_tenant(asked.hashes, tenant)
        words = np.frombuffer(b"".join([each[:8].ljust(8) for each in hashes]), np.uint64)
        slots = (words & np.uint64(_SLOTS - 1)).astype(np.intp)
        tags = (words & np.uint64(_TAG)).astype(np.int64) << _POSITION_BITS - _TAG_SHIFT
        last = self._last[slots] - tags  # the position, if the chunk is the one that was there
        octaves = np.log2(np.maximum(1, self._position - last))
        self._ages = np.where(
            (last > 0) & (last < self._position),
            np.minimum(_NEVER - 1, (octaves * _PER_OCTAVE).astype(np.intp)),
            _NEVER,
        )
        self._last[slots] = tags + self._position
        self._position += count
        self._all[self._whose] += np.bincount(self._ages[: asked.usable], minlength=_AGES)
        self.chunks += count
        self._references += count
        sampled = np.flatnonzero((words >> np.uint64(32)) < self.share * _LIMIT)
        if self._references >= self._halved_at:
            self._halve()
        if not len(sampled):
            return None
        usable = int(np.searchsorted(sampled, asked.usable))
        self._ages = self._ages[sampled[:usable]]
        self._sampled[self._whose] += np.bincount(self._ages, minlength=_AGES)
        keys = [make_offload_key(hashes[place], 0, tenant if self._whose else "") for place in sampled.tolist()]
        return ServedRequest(asked.arrival, keys, usable, asked.params, asked.output_tokens)

    def names(self) -> Sequence[str]:
        """Return the names of all cases."""
        return list(self._stacks)

    def serve(self, name: str, request: ServedRequest) -> None:
        """Serve what ``take`` returned last in one case."""
        hits = self._stacks[name].serve(request)
        if hits:
            self._hits[name][self._whose] += np.bincount(self._ages[:hits], minlength=_AGES)

    def rates(self) -> dict[str, float]:
        """Return the estimated hit rate of each case: a share of all full chunks asked for."""
        hits = np.stack([*self._hits.values()])
        rate = np.ones(hits.shape[:-1])
        found = np.zeros(len(hits))
        for age in range(_AGES):
            prior = rate if age < _NEVER else 0.0
            rate = (hits[..., age] + _PRIOR * prior) / (self._sampled[:, age] + _PRIOR)
            found += (rate * self._all[:, age]).sum(-1)
        return dict(zip(self._hits, (found / max(1.0, self._references)).tolist(), strict=True))

    def infinite_rate(self) -> float:
        """Return the hit rate of a cache without bounds, as far back as ages are counted."""
        return float(self._all[:, :_NEVER].sum()) / max(1.0, self._references)

    def report(self) -> dict[str, Any]:
        """Return the hit rates as plain data: ``hit_rates`` by policy and multiple, what each tier ``adds``."""
        rates = self.rates()
        policies = dict.fromkeys(name.split()[0] for name in rates if not name.startswith("without "))
        now = rates[f"{self._now.policy} 1"]
        return {
            "policy": self._now.policy,
            "rows": self._now.primary,
            "sampled": self.share,
            "chunks": self.chunks,
            "infinite": self.infinite_rate(),
            "hit_rates": {
                policy: {f"{times:g}": rates[f"{policy} {times:g}"] for times in TIMES} for policy in policies
            },
            "adds": {tier.name: now - rates[f"without {tier.name}"] for tier in self._now.tiers},
        }

    def _halve(self) -> None:
        self._references /= 2
        for counts in (self._all, self._sampled, *self._hits.values()):
            np.divide(counts, 2, out=counts)


def _tenant_of(asked: Asked) -> str:
    tenant = asked.params.get(TENANT_FIELD)
    return tenant if isinstance(tenant, str) else ""


def _of_tenant(hashes: Sequence[bytes], tenant: str) -> Sequence[bytes]:
    """Return the hashes of a request, those of another tenant's same tokens being others."""
    if not tenant:
        return hashes
    key = tenant.encode(errors="replace")[:64]
    return [blake2b(each, key=key, digest_size=16).digest() for each in hashes]
