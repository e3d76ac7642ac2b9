"""``kvtiers-azure``: the command line for the storage account's administrator.

The rule is a part of the account's management policy, which the Blob service itself neither shows nor sets.
"""

from typing import Any

from kvtiers_objectstore.lifecycle_command import run

__all__ = ["main"]

_EXPLANATION = """\
The account needs this rule for {place}; nothing was set. Azure replaces all rules of an account at once, so add it to
the existing ones:
  az storage account management-policy show --account-name ACCOUNT --resource-group GROUP --query policy > policy.json
  (add the rule to "rules")
  az storage account management-policy create --account-name ACCOUNT --resource-group GROUP --policy @policy.json
Blocks of uploads that never ended need no rule: Azure drops them after a week.
Soft delete keeps what is deleted, and it is paid for: switch it off for this account, or set few days.
"""


def _policy_for(container: str, prefix: str, days: int) -> dict[str, Any]:
    """Return the management policy that removes blobs this many days after their write, as Azure's JSON.

    ``prefix``: what all names in the container start with, with the ``/`` at its end.
    """
    rule = {
        "name": f"kvtiers-{f'{container}-{prefix}'.replace('/', '-').strip('-')}".lower(),
        "enabled": True,
        "type": "Lifecycle",
        "definition": {
            "filters": {"blobTypes": ["blockBlob"], "prefixMatch": [f"{container}/{prefix}"]},
            "actions": {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": days}}},
        },
    }
    return {"rules": [rule]}


def main() -> None:
    """Run the command line."""
    run("kvtiers-azure", "container", _EXPLANATION, _policy_for, is_in_the_rule=True)
