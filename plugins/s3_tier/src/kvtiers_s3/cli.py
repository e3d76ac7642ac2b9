"""``kvtiers-s3``: the command line for the bucket's administrator."""

from kvtiers_objectstore.lifecycle_command import run
from kvtiers_s3.lifecycle import rule_for

__all__ = ["main"]

_EXPLANATION = """\
The bucket needs this rule; nothing was set. S3 replaces all rules of a bucket at once, so add it to the existing
ones:
  aws s3api get-bucket-lifecycle-configuration --bucket {place} > rules.json
  (add the rule to "Rules")
  aws s3api put-bucket-lifecycle-configuration --bucket {place} --lifecycle-configuration file://rules.json
"""


def main() -> None:
    """Run the command line."""
    run("kvtiers-s3", "bucket", _EXPLANATION, lambda _bucket, prefix, days: {"Rules": [rule_for(prefix, days)]})
