"""Request logs of every kind: what is read from them, what is said of bad lines, and that no prompt is kept."""

import gc
import gzip
import itertools
import json
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers_replay.logs import Reading, read_log

IDS = list(range(1000, 1200))


def read(folder, lines, kind="log", **reading):
    path = folder / "a.log"
    path.write_text("".join(line if line.endswith("\n") else f"{line}\n" for line in map(_text, lines)))
    return read_log(path, Reading(kind, **reading))


def _text(line):
    return line if isinstance(line, str) else json.dumps(line)


def shared(log, first=0, second=1) -> int:
    """Return how many leading chunks two requests have in common."""
    hashes = (log.workload.requests[each].block_hashes for each in (first, second))
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*hashes, strict=False))))


@pytest.mark.parametrize("field", ["prompt_token_ids", "token_ids", "input_ids", "prompt"])
def test_token_ids_are_cut_into_chunks_whose_hashes_stand_for_the_whole_prefix(tmp_path, field):
    log = read(tmp_path, [{field: IDS}, {field: IDS[:128] + [7] * 72}, {field: [7, *IDS[1:]]}])
    requests = log.workload.requests
    assert [request.num_tokens for request in requests] == [200] * 3
    assert [len(request.block_hashes) for request in requests] == [3] * 3
    first, second, third = (request.block_hashes for request in requests)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert not set(first) & set(third)
    assert log.texts == 0


@pytest.mark.parametrize(
    "wrap",
    [
        lambda body: body,
        lambda body: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body},
        lambda body: {"request": body, "response": {"usage": {"prompt_tokens": 999, "completion_tokens": 5}}},
        lambda body: {"body": json.dumps(body)},
    ],
    ids=["a body", "a batch", "request and response", "a body as text"],
)
def test_conversations_that_go_on_share_their_beginning_however_they_are_wrapped(tmp_path, wrap):
    turn = [{"role": "system", "content": "Be brief. " * 100}, {"role": "user", "content": "Why? " * 100}]
    more = [*turn, {"role": "assistant", "content": [{"type": "text", "text": "So. " * 100}]}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    bodies = [{"messages": turn}, {"messages": more}, {"messages": turn, "tools": tools}]
    log = read(tmp_path, [wrap(body) for body in bodies], kind="openai")
    first, second, third = (request.block_hashes for request in log.workload.requests)
    assert len(first) >= 5
    assert second[: len(first)] == first
    assert first[0] != third[0]  # tools stand before the messages
    assert log.problems == {}


@given(length=st.integers(1, 9000), letters=st.floats(0.25, 64), tokens=st.sampled_from([1, 16, 64, 512]))
def test_a_text_has_as_many_hashes_as_its_tokens_fill_chunks(tmp_path_factory, length, letters, tokens):
    """Or a replay of the log would store chunks whose tokens it does not have."""
    # The second prompt only sees to it that there is a chunk in the log.
    texts = ({"prompt": "x" * length}, {"prompt_token_ids": [1] * tokens})
    log = read(tmp_path_factory.mktemp("log"), texts, tokens_per_chunk=tokens, chars_per_token=letters)
    request = log.workload.requests[0]
    assert len(request.block_hashes) == request.num_tokens // tokens
    chunk = max(1, round(tokens * letters))  # letters, a whole number of them
    assert abs(request.num_tokens - length / chunk * tokens) <= 1


def test_the_responses_api_and_completions_with_several_prompts_are_read(tmp_path):
    text = "A question about a document. " * 40
    message = {"role": "user", "content": text}
    log = read(tmp_path, [
        {"input": text, "instructions": "Be kind."},
        {"input": [message], "instructions": "Be kind."},
        {"prompt": [text, text + text]},
        {"input": [{"type": "function_call_output", "output": "x" * 1000}]},
    ])  # fmt: skip
    assert [len(request.block_hashes) for request in log.workload.requests] == [4, 4, 4, 9, 4]
    assert log.workload.requests[0].block_hashes == log.workload.requests[1].block_hashes
    assert shared(log, 2, 3) == 4


SCOPES = [
    lambda name: {"model": name},
    lambda name: {"cache_salt": name},
    lambda name: {"lora_path": name},
    lambda name: {"tenant": name},
    lambda name: {"kv_transfer_params": {"kvtiers_tenant": name}},
]


@pytest.mark.parametrize("scope", SCOPES, ids=["model", "salt", "adapter", "tenant", "tenant of kvtiers"])
@pytest.mark.parametrize("prompt", [{"prompt": "a text " * 100}, {"prompt_token_ids": IDS}], ids=["text", "ids"])
def test_prompts_of_different_models_salts_or_tenants_share_nothing(tmp_path, scope, prompt):
    """As engines' keys: with one model, salt and tenant all of it is a hit, else none is."""
    log = read(tmp_path, [{"body": prompt | scope(name)} for name in ("a", "a", "b")])
    first, second, third = (request.block_hashes for request in log.workload.requests)
    assert first == second
    assert not set(first) & set(third)
    assert any("no KV of one is a hit of another" in note for note in log.notes)
    assert not read(tmp_path, [{"body": prompt | scope("a")}] * 2).notes[1:]


def test_models_are_counted_and_named_and_one_may_be_chosen(tmp_path):
    lines = [{"model": name, "prompt_token_ids": IDS} for name in ("sql", "sql", "law", "code", "chat")]
    log = read(tmp_path, lines)
    assert log.models == {"sql": 2, "law": 1, "code": 1, "chat": 1}
    (note,) = [note for note in log.notes if "models" in note]
    assert note.startswith(
        "4 models or adapters ('sql', 'law', 'code', ...): no KV of one is a hit of another. They are"
    )
    assert note.endswith("evaluate different models one by one with --only-model NAME")
    one = read(tmp_path, lines, only_model="sql")
    assert len(one.workload.requests) == 2
    assert "3 requests of other models than 'sql' are left out" in one.notes
    with pytest.raises(ConfigError, match=r"none of its 5 requests is of the model 'sq'$"):
        read(tmp_path, lines, only_model="sq")
    with pytest.raises(ConfigError, match="a trace names no models, so --only-model cannot choose one"):
        read(tmp_path, [{"hash_ids": [1], "input_length": 512}], only_model="sql")


def test_models_of_several_sizes_are_not_added_up(tmp_path):
    names = ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct-AWQ", "v2b", "Mixtral-8x7B"]
    read(tmp_path, [{"model": name, "prompt_token_ids": IDS} for name in names])
    lines = [{"model": name, "prompt_token_ids": IDS} for name in [*names, "meta-llama/Llama-3.1-70B"]]
    with pytest.raises(
        ConfigError, match=r"its models are of several sizes \(.*70B, .*8B-.*\), whose KV and speed differ"
    ):
        read(tmp_path, lines)
    read(tmp_path, lines, only_model=names[0])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
OTHERS = [
    {"type": "input_audio", "input_audio": {"data": "B" * 9000, "format": "wav"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "B" * 9000}},
    {"type": "document", "source": {"type": "base64", "data": "B" * 9000}},
    {"type": "input_image", "image_url": "https://example.org/picture.png"},
    {"image": "B" * 9000},
    {"type": "tool_result", "content": [IMAGE]},
]
TEXT = {"type": "text", "text": "What is on it? " * 80}  # 1,200 letters, 300 tokens


def messages(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize("part", [IMAGE, *OTHERS], ids=lambda part: str(part.get("type", "no type")))
def test_a_part_that_is_no_text_counts_a_number_of_tokens_whatever_its_letters(tmp_path, part):
    log = read(tmp_path, [messages(part, TEXT)], kind="openai")
    assert log.workload.requests[0].num_tokens == pytest.approx(1024 + 300, abs=4)
    assert (
        "1 parts of messages are no text, taken as what 'usage' leaves for them, or 1,024 tokens each (--media-tokens)"
        in log.notes
    )
    fewer = read(tmp_path, [messages(part, TEXT) | {"usage": {"prompt_tokens": 900}}], media_tokens=256)
    assert fewer.workload.requests[0].num_tokens == pytest.approx(256 + 300, abs=4)


def test_a_log_s_own_counts_say_what_its_images_have_and_a_conversation_goes_on_as_it_began(tmp_path):
    first = messages(IMAGE, TEXT)
    longer = {"messages": [*first["messages"], {"role": "assistant", "content": "A cat. " * 100}]}
    lines = [first | {"usage": {"prompt_tokens": 900}}, longer | {"usage": {"prompt_tokens": 1200}}]
    log = read(tmp_path, [*lines, messages(IMAGE | {"image_url": {"url": "x"}}, TEXT)], kind="openai")
    assert [request.num_tokens for request in log.workload.requests] == pytest.approx([900, 1080, 1324], abs=5)
    assert shared(log) == 14  # all of the first one
    assert shared(log, 0, 2) == 0  # another image
    assert log.texts == 3


def test_each_kind_of_bad_line_is_counted_with_the_number_of_its_first_line_and_the_rest_is_read(tmp_path):
    good = {"prompt_token_ids": IDS}
    log = read(tmp_path, [
        good, "no json", "", "[1]", {"a": 1}, {"prompt": 5}, {"prompt": [1, "x"]}, {"messages": []},
        {"prompt_token_ids": [1, -2]}, {"prompt_token_ids": [True, 2]}, {"prompt_token_ids": IDS, "time": "soon"},
        {"custom_id": "1", "response": {"body": {}}}, {"hash_ids": [1], "input_length": 512}, "no json", {"body": "{"},
        {"prompt": ""}, {"messages": "x"}, good, '{"prompt": "cut',
    ])  # fmt: skip
    assert len(log.workload.requests) == 3
    assert log.lines == 19
    said = log.problem_lines()
    assert said[0] == "3 lines are no JSON; the first is line 2"
    assert "1 line is JSON and no object; the first is line 4" in said
    assert any(line.startswith("1 line has an answer and no request") for line in said)
    assert any(line.endswith("; the first is line 9") and "token ids" in line for line in said)
    assert any("is of another kind than the first request" in line for line in said)
    # All lines but the blank one and the good ones, of which the one with a bad time was read and is counted too.
    assert sum(count for count, _ in log.problems.values()) == 19 - 1 - 2


def test_a_last_line_that_is_cut_off_is_said_to_be_that(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": IDS}) + '\n{"prompt": "cut')
    assert read_log(path, Reading()).problem_lines() == ["1 line is cut off at the end of the log; the first is line 2"]


@pytest.mark.parametrize(
    ("times", "arrivals", "seconds"),
    [
        ([1700000000, 1700000060.5], [0.0, 60.5], 60.5),
        ([1700000000000, 1700000060500], [0.0, 60.5], 60.5),
        (["2026-11-25T10:00:00Z", "2026-11-25T11:01:00+01:00"], [0.0, 60.0], 60.0),
        ([1700000000000000, 1700000060500000], [0.0, 60.5], 60.5),
        ([1700000000000000000, 1700000060500000000], [0.0, 60.5], 60.5),
        (["1700000000000000000", "1700000060500000000"], [0.0, 60.5], 60.5),
        (["1700000000", "1700000060.5"], [0.0, 60.5], 60.5),
        ([30, 10], [0.0, 20.0], 20.0),
        ([5, None, 7], [0.0, 0.0, 2.0], 2.0),
        ([None, None], [0.0, 1.0], None),
    ],
)
def test_times_are_seconds_milliseconds_or_iso(tmp_path, times, arrivals, seconds):
    lines = [{"prompt_token_ids": IDS} | ({} if time is None else {"timestamp": time}) for time in times]
    log = read(tmp_path, lines)
    assert [request.arrival for request in log.workload.requests] == pytest.approx(arrivals)
    assert log.seconds == (None if seconds is None else pytest.approx(seconds))


def test_a_trace_of_block_hashes_is_a_log_too_and_may_be_gzipped(tmp_path):
    path = tmp_path / "trace.gz"
    lines = [{"timestamp": 1000 * at, "input_length": 1100, "hash_ids": [1, at, at]} for at in range(3)]
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(line) + "\n" for line in [*lines, {"hash_ids": [1]}]))
    log = read_log(path, Reading())
    assert log.workload.tokens_per_block == 512
    assert [len(request.block_hashes) for request in log.workload.requests] == [2] * 3
    assert log.seconds == 2.0
    assert shared(log) == 1
    assert len(log.problems) == 1


NEW = "(APIServer pid=7) DEBUG {time} [utils/request_logger.py:59] Request {id} details: prompt: {prompt!r}, "
NEW += "prompt_token_ids: {ids}, prompt_embeds shape: None."
RECEIVED = "(APIServer pid=7) INFO {time} [utils/request_logger.py:68] Received request {id}: "
RECEIVED += "params: SamplingParams(n=1, stop=[]), lora_request: None."
OLD = "INFO {time} [logger.py:43] Received request {id}: prompt: {prompt!r}, params: SamplingParams(n=1), "
OLD += "prompt_token_ids: {ids}, prompt_embeds shape: None, lora_request: None, prompt_adapter_request: None."


def test_vllms_log_is_read_as_its_releases_write_it(tmp_path):
    tricky = 'it\'s "quoted", prompt_token_ids: [1], Received request x: \n details: prompt: ' * 20
    values = [{"time": "11-25 10:00:00", "id": "cmpl-1", "prompt": tricky, "ids": IDS},
              {"time": "11-25 10:00:30", "id": "cmpl-2", "prompt": None, "ids": IDS},
              {"time": "11-25 10:01:00", "id": "cmpl-3", "prompt": tricky, "ids": None}]  # fmt: skip
    lines = ["INFO 11-25 09:59:59 [api_server.py:1] Starting"]
    for each in values:
        lines += [NEW.format(**each), RECEIVED.format(**each)]
    lines += [
        OLD.format(**values[0] | {"time": "11-25 10:02:00"}),
        OLD.format(**values[2] | {"time": "11-25 10:02:00"}),
    ]
    lines += [f"\x1b[32m{NEW.format(**values[0] | {'time': '11-25 10:03:00'})}\x1b[0m"]
    lines += [json.dumps({"asctime": "2026-11-25 10:04:00,123", "message": NEW.format(**values[1]).partition("] ")[2]})]
    log = read(tmp_path, lines, kind="vllm")
    assert log.problems == {}
    requests = log.workload.requests
    assert [request.num_tokens for request in requests[:2]] == [200, 200]
    assert [request.arrival for request in requests] == [0.0, 30.0, 60.0, 120.0, 120.0, 180.0, 240.0]
    assert shared(log, 0, 1) == shared(log, 0, 3) == shared(log, 0, 5) == shared(log, 0, 6) == 3
    assert requests[2].num_tokens == requests[4].num_tokens == round(len(tricky) / 4)
    assert shared(log, 2, 4) == len(requests[2].block_hashes) > 0
    assert log.texts == 2


def test_adapters_in_vllms_log_share_nothing_whichever_line_names_them(tmp_path):
    adapter = "LoRARequest(lora_name='sql', lora_int_id=1, lora_path='/l')"
    values = {"time": "11-25 10:00:00", "prompt": None, "ids": IDS}
    lines = []
    for each in ("a", "b"):  # two at the same time
        lines += [NEW.format(id=each, **values)]
    lines += [RECEIVED.format(id="b", **values).replace("lora_request: None", f"lora_request: {adapter}")]
    lines += [RECEIVED.format(id="a", **values), NEW.format(id="c", **values)]
    old = OLD.format(id="d", time="11-25 10:00:00", prompt="x", ids=IDS)
    old = old.replace("n=1", "n=1, stop=['lora_request: None']")
    lines += [old.replace("lora_request: None,", f"lora_request: {adapter},"), old]
    log = read(tmp_path, lines, kind="vllm")
    assert log.problems == {}
    assert log.models == {"": 3, "sql": 2}
    assert shared(log, 0, 1) == shared(log, 0, 3) == 0
    assert shared(log, 0, 2) == shared(log, 0, 4) == shared(log, 1, 3) == 3
    assert any(note.startswith("2 models or adapters (none named, 'sql')") for note in log.notes)


def test_what_vllm_generates_and_the_body_of_a_request_are_no_requests_whatever_they_say(tmp_path):
    text = "Received request x: prompt: 'y', params: Request x details: prompt: 'y', prompt_token_ids: [1]"
    heads = ("Generated response cmpl-1: output: ", "Request cmpl-1 JSON body: ", "Request a b JSON body: ")
    lines = [f"INFO 11-25 10:00:00 [request_logger.py:108] {head}{text!r}" for head in heads]
    lines += [json.dumps({"asctime": "2026-11-25 10:04:00,123", "message": f"{head}{text!r}"}) for head in heads]
    log = read(tmp_path, [*lines, NEW.format(time="11-25 10:00:00", id="a", prompt=text, ids=IDS)], kind="vllm")
    assert len(log.workload.requests) == 1
    assert log.problems == {}


def test_the_ids_of_an_older_vllm_s_line_are_the_last_ones_whatever_its_parameters_have(tmp_path):
    line = OLD.format(time="11-25 10:00:00", id="a", prompt="x", ids=IDS)
    line = line.replace("n=1", "n=1, stop=['prompt_token_ids: [7, 7]']")
    log = read(tmp_path, [line], kind="vllm")
    assert [request.num_tokens for request in log.workload.requests] == [len(IDS)]


def test_an_id_that_a_client_has_sent_may_have_spaces_and_colons(tmp_path):
    lines = [line.format(time="11-25 10:00:00", id="a b:c", prompt="x", ids=IDS) for line in (NEW, RECEIVED, OLD)]
    log = read(tmp_path, lines, kind="vllm")
    assert log.problems == {}
    assert [request.num_tokens for request in log.workload.requests] == [len(IDS)] * 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (NEW.format(time="11-25 10:00:00", id="a", prompt="x", ids="[1,]"), "has token ids that cannot be read"),
        (OLD.format(time="11-25 10:00:00", id="a", prompt="x", ids="[1 2]"), "has token ids that cannot be read"),
        ('{"message": "Received request ", "a": ' + "[" * 100_000, "is no JSON, though they begin so"),
    ],
    ids=["ids", "ids of an older release", "deep JSON"],
)
def test_a_bad_line_of_vllms_log_is_counted_and_the_rest_is_read(tmp_path, line, said):
    good = NEW.format(time="11-25 10:00:00", id="a", prompt=None, ids=IDS)
    log = read(tmp_path, [good, line, good], kind="vllm")
    assert len(log.workload.requests) == 2
    assert log.problem_lines() == [f"1 line {said}; the first is line 2"]


def test_a_vllm_log_without_prompts_says_how_to_start_the_server(tmp_path):
    lines = [RECEIVED.format(time="11-25 10:00:00", id=f"cmpl-{number}") for number in range(3)]
    with pytest.raises(ConfigError, match=r"3 lines have a request and not its prompt .*VLLM_LOGGING_LEVEL=DEBUG"):
        read(tmp_path, lines, kind="vllm")


def test_the_year_that_vllms_dates_do_not_have_may_end_in_a_log(tmp_path):
    lines = [NEW.format(time=time, id="a", prompt=None, ids=IDS) for time in ("12-31 23:59:59", "01-01 00:00:01")]
    assert read(tmp_path, lines, kind="vllm").seconds == 2.0


def test_what_a_log_lets_one_suspect_is_noted(tmp_path):
    text = {"prompt": "abcd efg " * 100, "usage": {"prompt_tokens": 300}}
    log = read(tmp_path, [text, {"prompt": "short"}, *[{"prompt_token_ids": [n, *IDS]} for n in range(9)]])
    assert any("the log's own counts say 3 letters a token: --chars-per-token 3" in note for note in log.notes)
    assert any("1 prompt is shorter than one chunk of 64 tokens: it is not stored" in note for note in log.notes)
    cut = read(tmp_path, [{"prompt_token_ids": [n, *IDS[: 199 - n * (n > 8)]]} for n in range(12)])
    assert any("9 prompts have 200 tokens, and none has more" in note for note in cut.notes)


def test_a_trace_with_blocks_of_another_size_is_refused_and_read_with_the_size(tmp_path):
    """As 512, a trace of 64 gave hits of 99.7 % instead of 31.9 %."""
    lines = [{"input_length": 640, "hash_ids": [n, *range(9)], "timestamp": n} for n in range(5)]
    with pytest.raises(ConfigError, match=r"a\.log:1: 'hash_ids' has 10 entries.*--tokens-per-block 64$"):
        read(tmp_path, lines)
    log = read(tmp_path, lines, tokens_per_block=64)
    assert log.workload.tokens_per_block == 64
    assert [len(request.block_hashes) for request in log.workload.requests] == [10] * 5
    short = {"input_length": 20, "hash_ids": [1]}
    with pytest.raises(ConfigError, match=r"a\.log:2: 'hash_ids' has 10 entries"):
        read(tmp_path, [short, *lines])


def test_the_first_bad_line_of_a_trace_says_what_is_wrong(tmp_path):
    good = {"input_length": 512, "hash_ids": [1], "timestamp": 1}
    log = read(tmp_path, [good, good | {"timestamp": 6.5}, good | {"timestamp": 7.5}])
    (said,) = log.problem_lines()
    assert said.startswith(
        "2 lines are no line of a trace with block hashes, as the first request is ('timestamp' is 6.5,"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "it has no request"), ('{"prompt": "hi"}\n', "its one request has fewer than 64 tokens"), ("x\n", "no JSON")],
)
def test_a_log_without_a_request_to_use_is_an_error_of_one_line(tmp_path, content, said):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said) as error:
        read_log(path, Reading())
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    path.write_text(content * 2)
    if "one request" in said:
        with pytest.raises(ConfigError, match="none of its 2 requests has 64 tokens"):
            read_log(path, Reading())
    with pytest.raises(ConfigError, match="cannot read the log: No such file"):
        read_log(tmp_path / "absent", Reading())


def test_another_option_is_named_where_a_log_has_no_request_at_all(tmp_path):
    with pytest.raises(ConfigError, match=r"is no JSON; .* is read with --vllm-log$"):
        read(tmp_path, ["INFO 11-25 09:59:59 [api_server.py:1] Starting"])
    with pytest.raises(ConfigError, match=r"its one request has fewer than 64 tokens$"):
        read(tmp_path, ["INFO 11-25 09:59:59 [api_server.py:1] Starting", {"prompt": "hi"}])


def test_no_prompt_is_kept_and_hashes_differ_from_reading_to_reading(tmp_path):
    secret = secrets.token_hex(500)
    begin = secret[:40].encode()  # no text
    first, second = (read(tmp_path, [{"prompt": secret}]) for _ in range(2))
    assert first.workload.requests[0].block_hashes != second.workload.requests[0].block_hashes
    del secret
    gc.collect()
    # Texts themselves are not among the objects of the collector, but what has them is.
    texts = (each for has in gc.get_objects() for each in gc.get_referents(has) if type(each) is str)
    assert not any(begin.decode() in each for each in texts)
    assert begin.decode() not in repr(first)
