"""The first ten minutes of an evaluator, with kvtiers from wheels: a request log, a verdict, a config that is valid.

The log is such that its figures can be computed by hand: documents that are asked about in turns come back after more
chunks than a small memory holds, so that an LRU has none of them, and a tier that holds all of them has each.
"""

import gzip
import html
import json
import random
import re

import pytest

LETTERS = 4 * 64  # of a chunk of 64 tokens
DOCUMENTS, CHUNKS, ROUNDS, EVERY = 20, 40, 5, 36  # chunks of a document, seconds between requests
REQUESTS = DOCUMENTS * ROUNDS
ASKED = REQUESTS * (CHUNKS + 1)
BACK = DOCUMENTS * (ROUNDS - 1) * CHUNKS
DIFFERENT = DOCUMENTS * CHUNKS + REQUESTS
SPEED, GPU_HOUR, MONTH = 8_000, 3.0, 30.4
GIB = 1 << 30
VALUE = 64 * (128 << 10) + 4096  # a token of Llama 3.1 8B has 128 KiB; the seal takes a page
DAYS = (REQUESTS - 1) * EVERY / 86_400


@pytest.fixture(scope="module")
def evaluator(environment, tmp_path_factory):
    """The environment that the documentation has an evaluator install, and two logs with the same prompts."""
    evaluator = environment(tmp_path_factory.mktemp("evaluator"))
    evaluator.create("kvtiers[replay]", "kvtiers-fs")
    letters = random.Random(7)
    documents = ["".join(letters.choices("abcdefgh ", k=CHUNKS * LETTERS)) for _ in range(DOCUMENTS)]
    # A question is a chunk, and one letter less than another.
    questions = ["".join(letters.choices("abcdefgh ", k=2 * LETTERS - 1)) for _ in range(REQUESTS)]
    prompts = [documents[number % DOCUMENTS] + question for number, question in enumerate(questions)]
    plain, batch = evaluator.folder / "requests.jsonl", evaluator.folder / "batch.jsonl.gz"
    with plain.open("w") as log:
        for number, prompt in enumerate(prompts):
            log.write(json.dumps({"timestamp": 1_764_000_000 + number * EVERY, "prompt": prompt}) + "\n")
        log.write("a line that is no request\n")
    with gzip.open(batch, "wt") as log:
        for number, prompt in enumerate(prompts):
            body = {"model": "m", "prompt": prompt}
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
            log.write(json.dumps(line) + "\n")
    return evaluator


def evaluated(evaluator, *arguments) -> dict:
    sizes = ("--tokens-per-chunk", "64", "--gpu-cache", "1GiB", "--memory", "2GiB,4GiB", "--engines", "1")
    prices = ("--prefill-speed", f"{SPEED}", "--gpu-price", f"{GPU_HOUR}")
    return json.loads(evaluator.run("kvtiers", "evaluate", *arguments, *sizes, *prices, "--json"))


def test_the_figures_are_those_of_the_log_and_the_page_has_them(evaluator):
    found = evaluated(evaluator, "--log", "requests.jsonl", "--output", "page.html")
    assert [(each["lines"], each["first_line"]) for each in found["problems"]] == [(1, REQUESTS + 1)]
    assert (found["requests"], found["references"], found["different_chunks"]) == (REQUESTS, ASKED, DIFFERENT)
    assert found["different_bytes"] == DIFFERENT * VALUE
    assert found["hit_rates"] == {"infinite": pytest.approx(BACK / ASKED), "gpu": 0.0}
    assert [each["hit_rate"] for each in found["memory"]] == [0.0, 0.0]
    small, whole = found["behind"][0], found["behind"][-1]
    assert (small["tier_bytes"] < DIFFERENT * VALUE, small["hit_rate"]) == (True, 0.0)
    assert (whole["tier_bytes"], whole["hit_rate"]) == (DIFFERENT * VALUE, pytest.approx(BACK / ASKED))

    seconds = BACK * 64 / SPEED
    saved = seconds / 3600 * GPU_HOUR / DAYS
    assert found["gpu_seconds_saved"] == pytest.approx(seconds)
    assert found["money_saved_a_day"] == pytest.approx(saved)
    disk, server, bucket = found["tiers"]
    room = DIFFERENT * VALUE / GIB * 0.01 / MONTH
    assert (disk["pays"], disk["cost_a_day"]) == (True, pytest.approx(room))
    assert disk["points"] == pytest.approx(100 * BACK / ASKED)
    assert found["primary_bytes"] == 2 * GIB
    assert found["hardware_a_day"] == pytest.approx(2 * 0.3 / MONTH + room)
    cost = DIFFERENT * VALUE / GIB * 5 / MONTH
    assert cost > saved
    assert (server["pays"], server["cost_a_day"]) == (False, pytest.approx(cost))
    assert server["why"] == f"it costs ${cost:.2f} a day and saves ${saved:.2f}"
    assert (bucket["pays"], bucket["break_even_tokens"]) == (False, None)  # 8,000 tokens/s of KV are more than 1 GB/s
    assert found["chosen"] == "disk"
    assert found["replayed"]["wrong_bytes"] == 0
    assert found["replayed"]["rate"] == pytest.approx(found["replayed"]["planned"], abs=0.02)

    page = (evaluator.folder / "page.html").read_text()
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for figure in (f"{100 * BACK / ASKED:.1f} %", f"{seconds:,.0f} s", f"${saved:,.2f}", f"${cost:,.2f}"):
        assert figure in text
    assert "1 line is no JSON; the first is line 101" in text
    config = html.unescape(re.search(r"<pre[^>]*>(# tiers\.yaml.*?)</pre>", page, re.DOTALL)[1])
    (evaluator.folder / "tiers.yaml").write_text(config)
    assert "no errors" in evaluator.run("kvtiers", "check", "--offline", "tiers.yaml")


def test_the_same_prompts_in_a_batch_have_the_same_hits_and_nothing_is_said_by_the_day(evaluator):
    found = evaluated(evaluator, "--openai-log", "batch.jsonl.gz", "--no-replay", "--output", "batch.html")
    assert (found["requests"], found["references"], found["different_chunks"]) == (REQUESTS, ASKED, DIFFERENT)
    assert found["behind"][-1]["hit_rate"] == pytest.approx(BACK / ASKED)
    assert found["gpu_seconds_saved"] == pytest.approx(BACK * 64 / SPEED)
    assert found["money_saved_a_day"] is None
