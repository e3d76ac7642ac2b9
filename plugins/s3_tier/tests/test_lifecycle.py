"""What a bucket's rules do to a tier's prefix."""

import pytest

from kvtiers_s3.lifecycle import Effect, effect_of, rule_for

ON = {"Status": "Enabled"}
NEVER = Effect(None, None)


@pytest.mark.parametrize("prefix", ["", "llama/", "team/llama/"])
def test_the_rule_for_a_prefix_does_what_is_wanted(prefix):
    assert effect_of([rule_for(prefix, 14)], prefix) == Effect(14, 1)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"Filter": {"Prefix": ""}, "Expiration": {"Days": 3}}, Effect(3, None)),
        ({"Filter": {}, "Expiration": {"Days": 3}}, Effect(3, None)),
        ({"Prefix": "te", "Expiration": {"Days": 3}}, Effect(3, None)),
        ({"Filter": {"And": {"Prefix": "team/"}}, "Expiration": {"Days": 3}}, Effect(3, None)),
        ({"Filter": {"Prefix": "team/kv/ns/"}, "Expiration": {"Days": 3}}, NEVER),
        ({"Filter": {"Prefix": "other/"}, "Expiration": {"Days": 3}}, NEVER),
        ({"Filter": {"Tag": {"Key": "a", "Value": "b"}}, "Expiration": {"Days": 3}}, NEVER),
        ({"Filter": {"And": {"Prefix": "", "Tags": []}}, "Expiration": {"Days": 3}}, NEVER),
        ({"Filter": {"Prefix": ""}, "Expiration": {"Days": 3}, "Status": "Disabled"}, NEVER),
        ({"Filter": {"Prefix": ""}, "Transitions": [{"Days": 3}]}, NEVER),
        ({"Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}, Effect(None, 7)),
    ],
)
def test_a_rule_counts_if_it_is_on_and_for_all_of_the_prefix(rule, expected):
    assert effect_of([ON | rule], "team/kv/") == expected


def test_of_several_rules_the_strictest_counts():
    rules = [rule_for("", 30), rule_for("team/", 7), rule_for("other/", 1)]
    assert effect_of(rules, "team/kv/").objects == 7
