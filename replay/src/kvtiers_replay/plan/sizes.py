"""The cases of a plan: every combination of the written sizes and policies."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtiers.api import ConfigError, TierConfig
from kvtiers.api.units import format_size, parse_size
from kvtiers.config import BudgetConfig, OffloadConfig
from kvtiers.layout.cache_layout import SEAL_BYTES, VALUE_ALIGN
from kvtiers.plugins import did_you_mean
from kvtiers.primary.eviction import policy_class
from kvtiers_replay.plan.simulate import PlanCase, PlanTier

__all__ = ["DEFAULT_PRIMARY", "BytesUnknownError", "PlanSizes", "Wanted", "plan_cases"]

DEFAULT_PRIMARY = ("2%", "5%", "10%", "20%", "50%", "100%")
_ONLY_TIER = "secondary"  # its name, where no config names one
_MOST_CASES = 2000
_MOST_TIMES = 4  # of all chunks: a primary that is larger still hits the same, and would cost memory


class BytesUnknownError(ConfigError):
    """A size in bytes, where nothing says how many bytes a chunk has."""


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Sizes in chunks of a trace: ``unique``, all there are; ``value_bytes`` of each, None: not known."""

    unique: int
    value_bytes: int | None = None

    @classmethod
    def of_tokens(cls, unique: int, tokens_per_chunk: int, bytes_per_token: int) -> "PlanSizes":
        """Return the sizes of a model with this many bytes a token: each chunk is one sealed value."""
        payload = tokens_per_chunk * bytes_per_token + SEAL_BYTES
        return cls(unique, -(-payload // VALUE_ALIGN) * VALUE_ALIGN)

    def parse(self, where: str, text: str) -> int | None:
        """Return the chunks that ``10%`` (of all unique ones), ``64GiB`` or ``unlimited`` (None) stand for."""
        text = text.strip()
        if text == "unlimited":
            return None
        if text.endswith("%"):
            return self._share(where, text)
        try:
            nbytes = parse_size(text)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}; or a share such as '10%', or 'unlimited'") from None
        return self.from_bytes(where, nbytes)

    def from_bytes(self, where: str, nbytes: int) -> int:
        """Return how many values these bytes hold. ConfigError: not one.

        BytesUnknownError: the bytes of a value are not known.
        """
        if not nbytes:
            return 0
        if self.value_bytes is None:
            raise BytesUnknownError(
                f"{where}: {format_size(nbytes)} is how many chunks? Give --model or --bytes-per-token, "
                "or sizes as shares such as '10%'"
            )
        if nbytes < self.value_bytes:
            raise ConfigError(
                f"{where}: {format_size(nbytes)} does not hold one chunk of {format_size(self.value_bytes)}"
            )
        return nbytes // self.value_bytes

    def _share(self, where: str, text: str) -> int:
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = math.nan
        if not 0 <= percent <= 100:
            raise ConfigError(f"{where}: expected a share from 0% to 100% of the trace's chunks, got {text!r}")
        chunks = int(self.unique * percent / 100)
        return max(1, chunks) if percent else 0

    def shown(self, chunks: int | None) -> str:
        """Return a size as people read it: its share of all chunks, and its bytes or chunks."""
        if chunks is None:
            return "unlimited"
        if not chunks:
            return "none"
        number = f"{chunks:,}" if self.value_bytes is None else format_size(chunks * self.value_bytes)
        return f"{100 * chunks / self.unique:.3g} % ({number})"

    def amount(self, chunks: int) -> str:
        """Return the size of so many chunks: in bytes where a chunk's size is given, else their number."""
        return f"{chunks:,}" if self.value_bytes is None else format_size(chunks * self.value_bytes)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A user's choices: lists of sizes, by tier (``""``: the first), and policies. Empty: as the config says."""

    primary: Sequence[str] = ()
    secondary: Mapping[str, Sequence[str]] | None = None
    policies: Sequence[str] = ()


def plan_cases(wanted: Wanted, sizes: PlanSizes, config: OffloadConfig | None = None) -> list[PlanCase]:
    """Return all combinations, the primary's size changing fastest. ConfigError, one line, if that is impossible."""
    policies = wanted.policies or ([config.primary.eviction] if config else ["lru"])
    for name in policies:
        policy_class(name)
    tiers = list(_tiers(wanted.secondary or {}, sizes, config))
    primaries = _primaries(wanted, sizes, config)
    count = len(policies) * len(primaries) * math.prod(len(choices) for choices in tiers)
    if count > _MOST_CASES:
        raise ConfigError(f"{count:,} combinations of sizes and policies, expected at most {_MOST_CASES:,}")
    budgets = config.budgets if config else BudgetConfig()
    reserve = config.clean_reserve if config else PlanCase(1).clean_reserve
    shares = config.tenants.shares() if config and config.tenants else {}
    return [
        PlanCase(
            primary,
            policy,
            tuple(tier for tier in combination if tier.chunks != 0),
            budgets,
            reserve,
            tuple(shares.items()),
        )
        for policy in dict.fromkeys(policies)
        for combination in itertools.product(*tiers)
        for primary in primaries
    ]


def _primaries(wanted: Wanted, sizes: PlanSizes, config: OffloadConfig | None) -> list[int]:
    found = []
    for text in wanted.primary or DEFAULT_PRIMARY:
        chunks = sizes.parse("--primary", text)
        if chunks == 0:
            raise ConfigError(f"--primary: {text!r} is no primary at all, expected at least one chunk")
        found.append(sizes.unique if chunks is None else chunks)
    if config and not wanted.primary:
        found.append(sizes.from_bytes("the config's primary.capacity", config.primary.capacity))
    return sorted({min(chunks, _MOST_TIMES * sizes.unique) for chunks in found})


def _tiers(
    wanted: Mapping[str, Sequence[str]], sizes: PlanSizes, config: OffloadConfig | None
) -> Iterator[list[PlanTier]]:
    """Yield, for each tier in its place, what it may be."""
    configured = {tier.tier_name: tier for tier in config.secondary} if config else {}
    names = list(configured) or [_ONLY_TIER] * bool(wanted)
    chosen = {name or names[0]: texts for name, texts in wanted.items()}
    for name in chosen:
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(f"--secondary: no tier is called {name!r}.{hint} Tiers: {', '.join(names)}.")
    for name in names:
        tier = configured.get(name)
        if name in chosen:
            found = [sizes.parse(f"--secondary {name}", text) for text in chosen[name]]
        else:
            found = [_capacity(tier, sizes)]
        # None stands behind all numbers.
        ordered = sorted(set(found), key=lambda chunks: (chunks is None, chunks or 0))
        yield [_tier(tier, chunks, sizes) if tier else PlanTier(name, chunks) for chunks in ordered]


def _tier(tier: TierConfig, chunks: int | None, sizes: PlanSizes) -> PlanTier:
    name, writes = tier.tier_name, tier.writes_per_hour
    if writes is not None:
        writes = sizes.from_bytes(f"the config's tier {name!r}: writes_per_hour", writes)
    quotas: tuple[tuple[str, int], ...] = ()
    if sizes.value_bytes is not None:  # else left out: the sizes may all be shares
        # A quota that holds not one value is one of none, as in a tier host.
        quotas = tuple((tenant, quota // sizes.value_bytes) for tenant, quota in tier.quotas.items())
    return PlanTier(name, chunks, tier.admission, tier.read_only, tier.may_lose, writes, quotas)


def _capacity(tier: TierConfig | None, sizes: PlanSizes) -> int | None:
    """Return what a configured tier holds; one without a ``capacity`` in bytes has no bound that is known here."""
    nbytes = getattr(tier, "capacity", None)
    if tier is None or not isinstance(nbytes, int):
        return None
    return sizes.from_bytes(f"the config's tier {tier.tier_name!r}: capacity", nbytes)
