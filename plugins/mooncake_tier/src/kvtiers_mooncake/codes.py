"""Result codes of the client library, and what each means for a value.

Numbers as ``ErrorCode`` of Mooncake has them, seen with 0.3.13. The library returns them instead of raising.
"""

from enum import IntEnum

from kvtiers.api import TierUnavailable

__all__ = ["ABSENT", "NO_ROOM", "SUPERSEDED", "UNREACHABLE", "Code", "MooncakeError", "failure", "unavailable"]


class Code(IntEnum):
    """The codes that mean something to a tier."""

    NO_SEGMENT = -101
    NO_ROOM = -200
    INVALID_PARAMS = -600
    NOT_THE_WRITER = -601
    INVALID_WRITE = -700
    INVALID_REPLICA = -702
    NOT_READY = -703
    NOT_FOUND = -704
    EXISTS = -705
    LEASED = -706
    LEASE_EXPIRED = -707
    BEING_COPIED = -708
    REPLICA_NOT_FOUND = -710
    REPLICA_GONE = -712
    REPLICA_BUSY = -714
    TRANSFER_FAILED = -800
    CHECKSUM = -801
    RPC_FAILED = -900
    RPC_TIMEOUT = -901
    NO_OFFLOAD = -1300


ABSENT = frozenset(
    {Code.NOT_READY, Code.NOT_FOUND, Code.INVALID_REPLICA, Code.REPLICA_NOT_FOUND, Code.REPLICA_GONE, Code.CHECKSUM}
)
"""There is no whole value under this name now."""

SUPERSEDED = frozenset({Code.NOT_THE_WRITER, Code.NOT_FOUND, Code.INVALID_WRITE, Code.EXISTS})
"""Of a put: another one of the same name has begun later, and counts."""

NO_ROOM = frozenset({Code.NO_SEGMENT, Code.NO_ROOM})
"""No segment has memory for the value, or there is none."""

UNREACHABLE = frozenset({Code.TRANSFER_FAILED})
"""The segment with the value, or for it, did not take part."""


class MooncakeError(Exception):
    """The client library refused a call, for a reason that another attempt does not change."""


def failure(call: str, code: int) -> MooncakeError:
    """Return the exception for a code that says nothing about a value."""
    name = Code(code).name if code in Code.__members__.values() else "see Mooncake's ErrorCode"
    return MooncakeError(f"{call}: the client library answered {code} ({name})")


def unavailable(call: str, code: int, master: str) -> TierUnavailable:
    """Return the exception for a call that did not reach the master."""
    why = "did not answer in time" if code == Code.RPC_TIMEOUT else "does not answer"
    return TierUnavailable(f"the master {master} {why} ({call}: {code}); see that mooncake_master runs")
