"""The bucket's settings, for ``kvtiers check``: what removes old values, and what keeps those that were deleted."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from kvtiers.api import Finding
from kvtiers_gcs.config import GcsConfig
from kvtiers_objectstore.failures import Failures, ObjectStoreError
from kvtiers_objectstore.route import Route

__all__ = ["Effect", "effect_of", "rules_for", "settings_findings"]

_LEFTOVER_DAYS = 1
_DAY = 86400


class Effect(NamedTuple):
    """After how many days objects, and uploads that never ended, are removed; None: never."""

    objects: int | None
    uploads: int | None


def rules_for(prefix: str, days: int) -> dict[str, Any]:
    """Return the lifecycle rules that remove objects this many days after their write, as the service's JSON.

    ``prefix``: what all names start with, with the ``/`` at its end.
    """
    of_prefix = {"matchesPrefix": [prefix]} if prefix else {}
    return {
        "rule": [
            {"action": {"type": "Delete"}, "condition": {"age": days, **of_prefix}},
            {
                "action": {"type": "AbortIncompleteMultipartUpload"},
                "condition": {"age": _LEFTOVER_DAYS, **of_prefix},
            },
        ]
    }


def effect_of(rules: Sequence[Mapping[str, Any]], prefix: str) -> Effect:
    """Return the effect of these rules on everything under the prefix; a rule for a part of it does not count."""
    ruling = [rule for rule in rules if _covers(rule.get("condition", {}), prefix)]

    def days(kind: str) -> int | None:
        ages = [rule["condition"]["age"] for rule in ruling if rule.get("action", {}).get("type") == kind]
        return min(ages, default=None)

    return Effect(days("Delete"), days("AbortIncompleteMultipartUpload"))


def _covers(condition: Mapping[str, Any], prefix: str) -> bool:
    # Anything else it asks for, a class or a date, makes it a rule for some.
    if "age" not in condition or condition.keys() - {"age", "matchesPrefix"}:
        return False
    return any(prefix.startswith(ruled) for ruled in condition.get("matchesPrefix") or [""])


def settings_findings(
    config: GcsConfig, route: Route, failures: Failures, token: Callable[[], str], prefix: str
) -> Iterator[Finding]:
    """Examine the bucket's settings. ``prefix``: what all names start with, its ``/`` included."""
    try:
        settings = _settings(config, route, failures, token())
    except ObjectStoreError as error:
        yield Finding(
            "warning",
            f"the bucket's settings cannot be read: {error}",
            "grant storage.buckets.get to who runs this check; the tier itself works without it",
        )
        return
    yield from _rules(settings.get("lifecycle", {}).get("rule", ()), prefix)
    yield from _kept(config.bucket, settings)


def _settings(config: GcsConfig, route: Route, failures: Failures, token: str) -> dict[str, Any]:
    url = f"{route.endpoint}/storage/v1/b/{quote(config.bucket)}?fields=lifecycle,versioning,softDeletePolicy"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})  # noqa: S310 -- as the options are checked
    try:
        with route.open(request, timeout=config.timeout) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        with error:
            is_the_services = b'"error"' in error.read()  # the JSON API's words, which have no code of their own
        code = failures.by_status.get(error.code, "") if is_the_services else ""
        raise failures.failure("GET of the bucket's settings", error.code, code) from None
    except (OSError, ValueError) as error:
        raise failures.failure("GET of the bucket's settings", 0, "", f"{type(error).__name__}: {error}") from None


def _rules(rules: Sequence[Mapping[str, Any]], prefix: str) -> Iterator[Finding]:
    effect = effect_of(rules, prefix)
    command = f"'kvtiers-gcs lifecycle --days N{f' --prefix {prefix[:-1]}' if prefix else ''}'"
    if effect.objects is None:
        yield Finding(
            "warning",
            "no lifecycle rule removes old values, so the bucket grows for ever",
            f"{command} prints one; or run 'kvtiers store prune' from time to time",
        )
    else:
        yield Finding("ok", f"values are removed {effect.objects} days after they were written")
    if effect.uploads is None:
        yield Finding(
            "warning",
            "no lifecycle rule aborts uploads that a killed process left; their parts are invisible, and paid for",
            f"{command} prints one",
        )
    else:
        yield Finding("ok", f"uploads that never ended are aborted after {effect.uploads} days")


def _kept(bucket: str, settings: Mapping[str, Any]) -> Iterable[Finding]:
    if settings.get("versioning", {}).get("enabled"):
        yield Finding(
            "warning",
            "the bucket keeps versions: values that are deleted or replaced stay, and are paid for",
            f"gcloud storage buckets update gs://{bucket} --no-versioning",
        )
    seconds = int(settings.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))
    if seconds:
        yield Finding(
            "warning",
            f"soft delete keeps values for {seconds / _DAY:g} days after they were deleted or replaced, and they are "
            "paid for",
            f"gcloud storage buckets update gs://{bucket} --clear-soft-delete",
        )
