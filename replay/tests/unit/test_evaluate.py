"""Evaluations: what pays and what does not, with the reason, on logs whose answers are clear beforehand."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvtiers.config import load_config
from kvtiers_replay.evaluate import Evaluation, Question, evaluate
from kvtiers_replay.evaluate.first_requests import try_it
from kvtiers_replay.evaluate.offers import config_size
from kvtiers_replay.evaluate.starter import starter_yaml
from kvtiers_replay.evaluate.text import MEMORY_COLUMNS, about, assumed, assumptions, memory_rows, verdict
from kvtiers_replay.logs import Reading, ReadLog, read_log
from kvtiers_replay.sizing import LayerGroup, ModelShape
from kvtiers_replay.workload import ReplayRequest

from .synthetic import synthetic

pytestmark = pytest.mark.slow

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SHAPE = ModelShape("eight", "GQA", "bfloat16", 1, (LayerGroup(32, 4096),))  # 128 KiB a token, 2 MiB a chunk
TRACES = os.environ.get("KVTIERS_TRACES")


def log_of(requests=120, seconds=3600.0) -> ReadLog:
    workload = synthetic(requests)
    return ReadLog(workload, lines=requests, seconds=seconds)


def question(**given) -> Question:
    return Question(SHAPE, **({"gpu_cache": 16 * MIB, "most_memory": 64 * MIB, "engines": 1} | given))


@pytest.fixture(scope="module")
def usual() -> Evaluation:
    return evaluate(log_of(), question())


def offer(evaluation: Evaluation, link: str):
    return next(each for each in evaluation.offers if each.tier.link == link)


def test_hits_grow_with_memory_and_a_tier_that_holds_all_reaches_the_infinite_cache(usual):
    rates = [usual.rate(point) for point in usual.memory]
    assert rates == sorted(rates)
    assert usual.gpu.rate <= rates[0] < usual.infinite_rate
    assert usual.rate(usual.behind[-1]) == pytest.approx(usual.infinite_rate, abs=0.05)  # budgets of so small a primary


def test_what_is_saved_is_what_is_hit_beyond_the_gpus_own_cache_at_the_prefill_speed_and_price(usual):
    point = usual.behind[-1]
    chunks = sum(point.hits.values()) - sum(usual.gpu.hits.values())
    assert usual.gpu_seconds(point) == pytest.approx(chunks * 16 / 10_000)
    data = usual.as_data()
    by_day = data["behind"][-1]["money_saved_a_day"]
    assert by_day == pytest.approx(usual.gpu_seconds(point) / 3600 * 2.5 * 24)
    assert json.loads(json.dumps(data)) == data
    larger = evaluate(log_of(), question(gpu_cache=64 * GIB))
    assert larger.total_saved() == 0
    assert verdict(larger)[0].startswith("It does not pay: the GPU's own cache hits all of the ")


def test_a_tier_that_pays_is_in_the_yaml_which_loads(usual):
    assert usual.chosen is offer(usual, "disk")
    assert usual.chosen.pays
    text = starter_yaml(usual)
    assert "type: fs" in text
    assert "# pip install --find-links wheels kvtiers-fs" in text
    config = load_config(yaml.safe_load(text))
    assert config.secondary[0].capacity >= usual.chosen.size


def test_sizes_are_those_that_were_asked_for_and_not_what_so_many_chunks_fill():
    asked = [100 * MIB, 9 << 40, (3 << 40) + 1]
    found = evaluate(log_of(), question(memory=asked))
    assert asked[0] % found.sizes.value_bytes  # it has room for a part of a chunk
    data = found.as_data()
    assert [each["primary_bytes"] for each in data["memory"]] == sorted(asked)[:2]  # both large ones hold all there is
    assert data["primary_bytes"] in asked
    small = evaluate(log_of(), question(memory=[8 * MIB + 1]))
    tiers = [each["tier_bytes"] for each in small.as_data()["behind"]]
    assert all(size & (size - 1) == 0 for size in tiers[:-1])
    assert tiers[-1] == small.bytes_of(None)
    assert {each.size for each in small.offers} <= set(tiers)
    assert "primary: {capacity: 64MiB}" in starter_yaml(evaluate(log_of(), question(memory=[64 * MIB])))


@pytest.mark.parametrize("engines", [1, 3])
def test_the_yaml_s_sizes_have_room_for_a_chunk_however_little_memory_was_asked_for(engines):
    found = evaluate(log_of(), question(memory=[MIB], engines=engines))
    found.offers_by_memory = {found.primary.case.primary: [replace(offer(found, "disk"), size=4 * MIB, pays=True)]}
    config = load_config(yaml.safe_load(starter_yaml(found)))
    assert config.primary.capacity == found.as_data()["primary_bytes"] == found.sizes.value_bytes > 2 * MIB
    assert config.secondary[0].capacity >= found.sizes.value_bytes


def test_a_tier_that_holds_everything_has_one_size_whatever_memory_was_asked_for():
    whole = evaluate(log_of(), question()).bytes_of(None)
    found = evaluate(log_of(), question(memory=[MIB * 8, whole + 1]))  # as many chunks as there are, and a byte
    data = found.as_data()
    assert data["memory"][-1]["primary_bytes"] == whole + 1
    assert data["behind"][-1]["tier_bytes"] == whole
    assert {tier["bytes"] for tier in data["tiers"]} <= {case["tier_bytes"] for case in data["behind"]}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7.0, "7 seconds"),
        (396.0, "6.6 minutes"),
        (5400.0, "90 minutes"),
        (40_000, "11.1 hours"),
        (3e5, "3.47 days"),
        (1.0, "1 second"),
        (119.0, "119 seconds"),
        (1234 * 86400.0, "1,234 days"),
    ],
)
def test_a_log_is_as_long_as_people_say_it(usual, seconds, text):
    shown = replace(usual, pricing=replace(usual.pricing, seconds=seconds))
    assert f" requests in {text}, " in about(shown)


@pytest.mark.parametrize(
    ("given", "link", "why"),
    [
        ({}, "object", "computing is faster at any length: 10,000 tokens/s are 1.3 GB/s of KV, and it reads 1 GB/s"),
        ({"prices": {"disk": 1e6}}, "disk", "a day and saves $"),
        ({"memory": [64 * GIB]}, "disk", "in the GPU's cache and the memory in front of it already"),
    ],
)
def test_a_tier_that_does_not_pay_says_why(given, link, why):
    found = offer(evaluate(log_of(), question(**given)), link)
    assert not found.pays
    assert why in found.why


def test_where_no_size_pays_the_reason_is_that_of_a_size_which_has_what_comes_back():
    """In turns, so that an LRU has nothing of them unless it has all; the smallest, which has nothing, costs least."""
    requests = [ReplayRequest(161, [f"{n % 40}.{at}".encode() for at in range(10)], float(n)) for n in range(160)]
    log = log_of()
    log = replace(log, workload=replace(log.workload, requests=requests))
    evaluation = evaluate(log, question(memory=[256 * MIB], prices={"network": 1e6}))
    found = offer(evaluation, "network")
    assert sum(evaluation.behind[0].hits.values()) == 0
    assert not found.pays
    assert found.saved > 0
    assert found.why.startswith("it costs $")
    assert found.size == evaluation.bytes_of(None)


def test_memory_costs_money_and_a_small_one_with_a_disk_is_a_row(usual):
    """64 GiB and an NVMe drive is the commonest machine; its row is here, and what both cost."""
    rows = [dict(zip(MEMORY_COLUMNS, row, strict=True)) for row in memory_rows(usual)]
    alone = [row for row in rows[1:] if not row["disk behind it"]]
    sizes = [row["memory"].removesuffix(" *") for row in alone]
    assert sizes == ["2 MiB", "8 MiB", "16 MiB", "32 MiB", "64 MiB"]  # 4 MiB have room for one sealed chunk, too
    with_disk = [row for row in rows if row["disk behind it"]]
    assert [row["memory"].removesuffix(" *") for row in with_disk] == sizes[1:]  # with one row nothing can be promoted
    rates = [[float(row["hits"].split()[0]) for row in some] for some in (alone[1:], with_disk)]
    assert all(disk > memory for memory, disk in zip(*rates, strict=True))
    assert [bool(row["disk behind it"]) for row in rows if row["memory"].endswith("*")] == [True]
    dear = evaluate(log_of(), question(prices={"memory": 1e5}))
    assert dear.primary.case.primary < usual.primary.case.primary


def test_what_hardware_costs_is_taken_from_what_is_saved(usual):
    data = usual.as_data()
    per_day = [data["primary_bytes"] / GIB * 0.3 / 30.4, usual.chosen.size / GIB * 0.01 / 30.4]
    assert data["hardware_a_day"] == pytest.approx(sum(per_day))
    assert data["prices_a_gib_month"]["memory"] == 0.3
    left = data["money_saved_a_day"] - data["hardware_a_day"]
    assert f"${data['money_saved_a_day']:,.2f} a day before hardware and ${left:,.2f} after it" in verdict(usual)[0]
    lost = evaluate(log_of(), question(prices={"memory": 1e9, "disk": 1e9, "network": 1e9, "object": 1e8}))
    assert not lost.pays
    assert "neither memory nor a tier that could hold the rest is worth its price" in verdict(lost)[0]


def test_two_lines_say_which_model_engines_and_prices_are_assumed():
    model, prices = assumed(evaluate(log_of(), question(engines=3, gpu_cache=16 * MIB, prices={"disk": 0.5})))
    assert model == (
        "Assumed: eight, 128 KiB of KV a token; 3 engines of 1 GPU, each with 16 MiB of KV on its GPUs and 10,000 "
        "tokens/s of prefill."
    )
    assert prices.startswith("Prices: $2.5 for a GPU's hour; for a GiB and month memory $0.3, disk $0.5, as bought")
    assert ", as many as the log keeps busy, each" in assumed(evaluate(log_of(), question(engines=0)))[0]


def test_sizes_of_several_engines_are_those_of_all_and_the_yaml_says_of_which_a_capacity_is():
    found = evaluate(log_of(), question(engines=2))
    assert memory_rows(found)[-1][0].removesuffix(" *") == "128 MiB (2 x 64 MiB)"
    text = starter_yaml(found)
    assert "# memory of the machine of one of 2 engines" in text
    share = -(-found.chosen.size // 2)
    assert f"of one of 2 engines: give engines that share the folder {config_size(2 * share)} together" in text


def test_a_link_that_the_log_overfills_does_not_pay():
    found = offer(evaluate(log_of(seconds=0.05), question()), "disk")
    assert not found.pays
    assert "the log moves" in found.why
    assert "than the 3 GB/s of such a link" in found.why


def test_prompts_that_share_too_little_to_be_worth_a_load_do_not_pay(usual):
    slow = [replace(link, round_trip=60.0) if link.name == "disk" else link for link in usual.question.links]
    found = offer(evaluate(log_of(), question(links=slow)), "disk")
    assert found.break_even > 60 * 16
    assert found.gpu_seconds == 0
    assert "no prompt has a prefix of" in found.why


def test_a_log_without_times_is_evaluated_without_days_and_one_with_hours_by_them():
    without = evaluate(log_of(seconds=None), question())
    assert without.pricing.seconds is None
    assert offer(without, "disk").saved is None
    assert without.chosen is offer(without, "disk") or without.chosen is offer(without, "network")
    assert any("no times" in text for text, _ in assumptions(without))
    assert "a day" not in verdict(without)[0]
    assert evaluate(log_of(seconds=None), question(hours=2.0)).pricing.seconds == 7200


def test_a_log_with_nothing_that_comes_back_does_not_pay():
    requests = [ReplayRequest(161, [f"{n}.{at}".encode() for at in range(10)], float(n)) for n in range(20)]
    log = log_of()
    found = evaluate(replace(log, workload=replace(log.workload, requests=requests)), question())
    assert verdict(found)[0] == "It does not pay: nothing comes back in this log."
    assert found.chosen is None
    assert "secondary: []" in starter_yaml(found)


def test_as_many_engines_are_taken_as_the_prompts_keep_busy():
    log = log_of(seconds=2.0)
    tokens = sum(request.num_tokens for request in log.workload.requests)
    found = evaluate(log, question(engines=0))
    assert found.pricing.engines == -(-tokens // 20_000) > 1
    assert f"memory of the machine of one of {found.pricing.engines} engines" in starter_yaml(found)


def test_the_first_requests_go_through_a_real_tier_and_hit_what_the_plan_says(usual):
    few = replace(usual.log.workload, requests=usual.log.workload.requests[:110])
    tried = try_it(replace(usual, log=replace(usual.log, workload=few)), lambda _doing, _share: None)
    assert tried.tier == "fs"
    assert tried.requests > 100
    assert tried.wrong_bytes == 0
    assert 0 < tried.rate == pytest.approx(tried.planned, abs=0.002)


def test_the_memory_of_the_first_requests_is_named_which_is_none_of_the_tables(usual):
    """With a primary of one chunk the table has next to no hits, and the trial beside it most of them."""
    log = replace(usual.log, workload=replace(usual.log.workload, requests=usual.log.workload.requests[:110]))
    small = evaluate(log, question(gpu_cache=2 * MIB, memory=[2 * MIB]))
    tried = small.trial = try_it(small, lambda _doing, _share: None)
    assert tried.rate > small.rate(small.primary) + 0.1
    assert tried.primary_chunks == small.as_data()["replayed"]["primary_chunks"] > small.primary.case.primary == 1
    (line,) = [line for line in verdict(small) if line.startswith("Tried: ")]
    assert f"with memory for {tried.primary_chunks:,} chunks and a real fs tier: all bytes right" in line
    assert "where the plan for that says" in line


@pytest.mark.skipif(not TRACES, reason="KVTIERS_TRACES is not set")
@pytest.mark.parametrize(("name", "low", "high"), [("conversation", 0.2, 0.4), ("synthetic", 0.2, 0.4)])
def test_the_public_traces_are_logs(name, low, high):
    log = read_log(Path(TRACES) / f"{name}_trace.jsonl.gz", Reading(limit=1500))
    found = evaluate(log, Question(SHAPE))
    assert log.problems == {}
    assert low < found.infinite_rate < high
    assert found.total_saved() > 0
    assert "infinite cache hits" in about(found)
    assert not offer(found, "object").pays
