"""``kvtiers-s3``: the command line for the bucket's administrator."""

import argparse
import json
import sys

from kvtiers_s3.lifecycle import rule_for

__all__ = ["main"]

_EXPLANATION = """\
The bucket needs this rule; nothing was set. S3 replaces all rules of a bucket at once, so add it to the existing
ones:
  aws s3api get-bucket-lifecycle-configuration --bucket BUCKET > rules.json
  (add the rule to "Rules")
  aws s3api put-bucket-lifecycle-configuration --bucket BUCKET --lifecycle-configuration file://rules.json
"""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="kvtiers-s3", description="Helps to set up a bucket for kvtiers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    lifecycle = commands.add_parser(
        "lifecycle",
        help="print the lifecycle rule that a bucket needs",
        description="Print, as JSON, the lifecycle rule that removes values this many days after their write, "
        "and the parts of killed uploads. It never sets the rule.",
    )
    lifecycle.add_argument("--days", type=_days, required=True, metavar="N", help="age at which values are removed")
    lifecycle.add_argument("--prefix", default="", help="the tier's prefix (none: the rule is for the whole bucket)")
    options = parser.parse_args()
    prefix = options.prefix.strip("/")
    rule = rule_for(f"{prefix}/" if prefix else "", options.days)
    sys.stdout.write(json.dumps({"Rules": [rule]}, indent=2) + "\n")
    sys.stderr.write(_EXPLANATION)


def _days(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of days from 1 on, got {text!r}")
    return int(text)
