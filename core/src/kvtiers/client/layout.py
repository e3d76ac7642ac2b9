"""The layout of a client's values: one KV group for each length, under a tensor name that no engine's layout has.

A seal states the length of its value, and the length enters the fingerprint: so values of one length are a KV group,
whose index is a part of each key. Lengths are fixed when the client is opened. The alternative, one group with room for
the largest value and a length in each, would store and hash the room too.
"""

from collections.abc import Sequence

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity

__all__ = ["client_layout"]

_MOST_LENGTHS = 64


def client_layout(identity: ModelIdentity, lengths: Sequence[int]) -> CacheLayout:
    """Return the layout for values of these lengths, in bytes; their order and repetitions make no difference."""
    known = sorted(set(lengths))
    if not known or known[0] < 1 or len(known) > _MOST_LENGTHS:
        raise ConfigError(f"value_bytes is {list(lengths)!r}, expected 1 to {_MOST_LENGTHS} positive numbers of bytes")
    return CacheLayout(
        identity,
        tuple(KVGroup(f"{nbytes} bytes", 1) for nbytes in known),
        # The name is a part of the fingerprint. Engines name their tensors after layers.
        tuple(KVTensor(f"kvtiers-client/{nbytes}", group, nbytes) for group, nbytes in enumerate(known)),
    )
