"""The public contract for tier authors: every name that a plugin may import.

Three rungs: a blocking ``ChunkStore``, the abilities that a store may add to it (``SupportsBatch``,
``SupportsPieces``, ``SupportsListing``, ``SupportsDiagnosis``, ``SupportsStats``), and ``SecondaryTierManager`` for
tiers that bring their own asynchrony (``SupportsQuotas``, ``SupportsDiagnosis`` and ``SupportsStats`` are abilities of
theirs).
"""

from kvtiers.api.config import BreakerConfig, Compression, Quotas, RateLimit, Secret, StrictModel, TierConfig
from kvtiers.api.errors import (
    ChunkCorrupt,
    ConfigError,
    KvtiersError,
    NotKept,
    StartError,
    StoreContractError,
    TierPluginError,
    TierUnavailable,
)
from kvtiers.api.keys import OffloadKey, block_hash_of, group_of, make_offload_key, tenant_of
from kvtiers.api.plugin import API_VERSION, TierContext, TierPlugin, hookimpl, hookspec
from kvtiers.api.store import (
    ChunkStore,
    Finding,
    StoreEntry,
    SupportsBatch,
    SupportsDiagnosis,
    SupportsListing,
    SupportsPieces,
    SupportsStats,
)
from kvtiers.api.tenant_room import TenantRoom
from kvtiers.api.tier import (
    JobResult,
    LookupResult,
    SecondaryTierManager,
    SupportsQuotas,
    TierRequest,
    TransferJob,
)
from kvtiers.api.units import Duration, Share, Size

__all__ = [
    "API_VERSION",
    "BreakerConfig",
    "ChunkCorrupt",
    "ChunkStore",
    "Compression",
    "ConfigError",
    "Duration",
    "Finding",
    "JobResult",
    "KvtiersError",
    "LookupResult",
    "NotKept",
    "OffloadKey",
    "Quotas",
    "RateLimit",
    "SecondaryTierManager",
    "Secret",
    "Share",
    "Size",
    "StartError",
    "StoreContractError",
    "StoreEntry",
    "StrictModel",
    "SupportsBatch",
    "SupportsDiagnosis",
    "SupportsListing",
    "SupportsPieces",
    "SupportsQuotas",
    "SupportsStats",
    "TenantRoom",
    "TierConfig",
    "TierContext",
    "TierPlugin",
    "TierPluginError",
    "TierRequest",
    "TierUnavailable",
    "TransferJob",
    "block_hash_of",
    "group_of",
    "hookimpl",
    "hookspec",
    "make_offload_key",
    "tenant_of",
]
