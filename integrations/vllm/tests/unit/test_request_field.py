"""The field ``kvtiers`` of a request: what is read, and that anything else is a count and one clipped line."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kvtiers.types import RequestContext, RequestHints, request_hints
from kvtiers_vllm.never_raise import BugCount
from kvtiers_vllm.request_field import FIELD, NEED_OWN_PRIMARY, RequestField
from kvtiers_vllm.stack.adapter_digests import AdapterDigests
from kvtiers_vllm.stack.keys import GroupKeys, RequestKeys
from kvtiers_vllm.stack.requests import RequestBook, Weights

from . import fake_vllm


def test_each_name_is_read_and_stands_among_the_others():
    field = RequestField()
    given = {"session": "s", "ttl": "1s", FIELD: {"ttl": "1h", "priority": "high", "prefetch": True}}
    assert field.params(given) == {"session": "s", "ttl": 3600.0, "priority": "high", "prefetch": True}
    assert FIELD in given, "it is the client's"
    assert field.params({FIELD: {"ttl": 10**400}}) == {"ttl": 86_400.0}
    assert field.refused == 0


@pytest.mark.parametrize("tenant", ["blue", 5, None, ["blue"], "Not a tenant"])
def test_a_tenant_is_never_left_out_whatever_it_is(tenant):
    """Else the request would be one without a tenant: the rule of tenants refuses what is wrong."""
    field = RequestField(NEED_OWN_PRIMARY)
    assert field.params({FIELD: {"tenant": tenant}, "kvtiers_tenant": "red"}) == {"kvtiers_tenant": tenant}
    assert field.refused == 0


def test_without_the_field_nothing_is_copied():
    field, given = RequestField(), {"session": "s"}
    assert field.params(given) is given
    assert field.params(None) == {}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("1h", "kvtiers is '1h'; expected an object"),
        ([{}], "kvtiers is of type list; expected an object"),
        ({"ttl": "soon"}, "ttl is 'soon'; "),
        ({"ttl": -1}, "ttl is -1; expected seconds above 0, or a text such as '1h'"),
        ({"ttl": float("nan")}, "ttl is nan; expected seconds above 0"),
        ({"ttl": -(10**5000)}, "ttl is of type int; expected seconds above 0"),
        ({"ttl": True}, "ttl is True; expected seconds above 0"),
        ({"ttl": {"h": 1}}, "ttl is of type dict; expected seconds above 0"),
        ({"ttl": "1" * 10_000_000}, "ttl is '1111"),
        ({"priority": "urgent"}, "priority is 'urgent'; expected high, normal, low"),
        ({"priority": ["high"]}, "priority is of type list; expected high, normal, low"),
        ({"prefetch": 1}, "prefetch is 1; expected true or false"),
        ({"tll": "1h"}, "a name of the field is 'tll'; expected ttl, priority, prefetch"),
        ({7: 1}, "a name of the field is 7; expected ttl"),
    ],
)
def test_what_is_no_such_value_is_left_out_counted_and_said_once(value, says, caplog):
    field = RequestField()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert field.params({FIELD: value}) == {}
    (record,) = caplog.records
    assert says in record.getMessage()
    assert len(record.getMessage()) < 700
    assert field.refused == 3


def test_a_wrong_value_leaves_the_right_ones_and_lines_are_bounded(caplog):
    field = RequestField()
    names = {f"n{number}": 1 for number in range(1000)}
    assert field.params({FIELD: {"ttl": "no", "priority": "low", **names}}) == {"priority": "low"}
    assert field.refused == 1001
    assert len(caplog.records) == 2


def test_under_vllms_own_tiering_its_names_have_no_effect_and_one_line_says_why(caplog):
    field = RequestField(NEED_OWN_PRIMARY, "under vLLM's own tiering the primary is vLLM's")
    for _ in range(2):
        assert field.params({FIELD: {"ttl": "1h"}, "kv_load_tiers": []}) == {"kv_load_tiers": []}
    (record,) = caplog.records
    assert "ttl is '1h'; under vLLM's own tiering the primary is vLLM's; it is left out" in record.getMessage()


def test_a_request_of_the_whole_stack_has_them_in_its_context():
    digests = AdapterDigests()
    weights = Weights("w", lambda: "1", lambda: 0)
    try:
        book = RequestBook({0: GroupKeys(0, 1, whole_prefix=True)}, weights, digests, 0.02)
        book.show(SimpleNamespace(request_id="r", block_hashes=[b"h" * 32], lora_request=None, cache_salt=None))
        request = book.open("r", {FIELD: {"ttl": 60, "prefetch": True}})
        assert request.context.params == {"ttl": 60.0, "prefetch": True}
    finally:
        digests.close()


def test_a_prompt_is_prefetched_and_kept_as_a_whole_when_its_request_comes(monkeypatch):
    """Also the part that vLLM has itself, of which it looks nothing up."""
    module = fake_vllm.load(monkeypatch, "stack.manager", "0.32.0")
    manager = object.__new__(module.KvtiersManager)
    called = []
    manager._manager = SimpleNamespace(
        keep=lambda keys, context: called.append(("keep", list(keys), context)),
        prefetch=lambda keys, context: called.append(("prefetch", list(keys), context)),
    )
    hashes = [bytes([number]) * 32 for number in range(4)]
    keys = RequestKeys({0: GroupKeys(0, 2, whole_prefix=True)}, hashes, b"", "")
    prompt = [each + bytes(4) for each in hashes[1::2]]
    for params, names in (({"ttl": 60.0, "prefetch": True}, ["keep", "prefetch"]), ({"session": "s"}, ["keep"])):
        context = RequestContext("r", params)
        manager._follow_hints(context, keys)
        assert called == [(name, prompt, context) for name in names]
        called.clear()


def test_a_requests_hints_and_the_length_that_vllm_says_of_its_answer_reach_the_manager(monkeypatch):
    module = fake_vllm.load(monkeypatch, "stack.manager", "0.32.0")
    digests = AdapterDigests()
    manager, called = object.__new__(module.KvtiersManager), []
    manager.requests = RequestBook({}, Weights("w", lambda: "", lambda: 0), digests, lookup_wait=0.02)
    manager.bugs = BugCount("test")
    manager._answered_for, manager._asked = None, set()
    manager.pipelined = SimpleNamespace(drop=lambda request: None)
    manager._manager = SimpleNamespace(
        lock=nullcontext(),
        takes_requests=False,
        on_request_finished=lambda context, tokens: called.append((request_hints(context.params), tokens)),
    )
    for params, tokens in (({"session": "s", "expects_turn_in": 3}, 7), ({"session_ends": True}, 0), (None, 5)):
        shown = SimpleNamespace(request_id="r", block_hashes=[], lora_request=None, cache_salt=None)
        shown.num_output_tokens = tokens
        manager.requests.show(shown)
        manager.requests.open("r", params)
        manager.on_request_finished(SimpleNamespace(req_id="r"))
    digests.close()
    assert called == [
        (RequestHints("s", expects_turn_in=3.0), 7),
        (RequestHints(session_ends=True), 0),
        (RequestHints(), 5),
    ]
    assert manager.bugs.count == 0
