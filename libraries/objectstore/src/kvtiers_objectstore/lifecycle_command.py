"""The command line for a bucket's administrator: it prints the lifecycle rule that a bucket needs, and sets nothing."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["run"]


Rules = Callable[[str, str, int], Mapping[str, Any]]


def run(prog: str, place: str, explanation: str, rules_for: Rules, *, is_in_the_rule: bool = False) -> None:
    """Run the command line ``prog``.

    ``place``: the service's word for a bucket. ``explanation``: what to do with the rule, printed beside it, with
    ``{place}`` for its name. ``rules_for``: makes the JSON from the bucket's name, what all names start with, ``/``
    included, and days. ``is_in_the_rule``: whether the rule has the bucket's name in it, so that it must be given.
    """
    parser = argparse.ArgumentParser(prog=prog, description=f"Helps to set up a {place} for kvtiers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    lifecycle = commands.add_parser(
        "lifecycle",
        help=f"print the lifecycle rule that a {place} needs",
        description="Print, as JSON, the lifecycle rule that removes values this many days after their write, "
        "and the parts of killed uploads where the service keeps those. It never sets the rule.",
    )
    lifecycle.add_argument("--days", type=_days, required=True, metavar="N", help="age at which values are removed")
    lifecycle.add_argument("--prefix", default="", help=f"the tier's prefix (none: the rule is for the whole {place})")
    lifecycle.add_argument(
        f"--{place}",
        dest="place",
        required=is_in_the_rule,
        default=place.upper(),
        metavar="NAME",
        help=f"the {place}'s name",
    )
    options = parser.parse_args()
    prefix = options.prefix.strip("/")
    rules = rules_for(options.place, f"{prefix}/" if prefix else "", options.days)
    sys.stdout.write(json.dumps(rules, indent=2) + "\n")
    sys.stderr.write(explanation.format(place=options.place))


def _days(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of days from 1 on, got {text!r}")
    return int(text)
