"""Lifecycle rules: the one that a bucket of this tier needs, and the effect of the existing ones.

Nothing here sets a rule: S3 replaces a bucket's rules as a whole, so that setting one takes all the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Effect", "effect_of", "rule_for"]

_LEFTOVER_DAYS = 1


class Effect(NamedTuple):
    """After how many days objects, and uploads that never ended, are removed; None: never."""

    objects: int | None
    uploads: int | None


def rule_for(prefix: str, days: int) -> dict[str, Any]:
    """Return the rule that removes objects this many days after their write, as S3's JSON.

    ``prefix``: what all keys start with, with the ``/`` at its end.
    """
    return {
        "ID": f"kvtiers-{prefix.replace('/', '-').strip('-') or 'all'}",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "Expiration": {"Days": days},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _LEFTOVER_DAYS},
    }


def effect_of(rules: Sequence[Mapping[str, Any]], prefix: str) -> Effect:
    """Return the effect of these rules on everything under the prefix; a rule for a part of it does not count."""
    ruling = [rule for rule in rules if rule.get("Status") == "Enabled" and _covers(rule, prefix)]
    return Effect(
        _least(rule.get("Expiration", {}).get("Days") for rule in ruling),
        _least(rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation") for rule in ruling),
    )


def _covers(rule: Mapping[str, Any], prefix: str) -> bool:
    wanted = dict(rule.get("Filter") or {})
    wanted = dict(wanted.get("And", wanted))
    ruled = wanted.pop("Prefix", None) or rule.get("Prefix") or ""
    return not wanted and prefix.startswith(ruled)  # anything else it asks for, tags or sizes, makes it a rule for some


def _least(days: Iterable[int | None]) -> int | None:
    return min((number for number in days if number), default=None)
