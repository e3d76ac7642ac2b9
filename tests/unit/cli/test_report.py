"""``kvtiers report``: everything that a bug report needs, no secret, and nothing written before it was seen."""

import contextlib
import json
import os
import re
import socket
import time

import pytest
import yaml
from click.testing import CliRunner

from kvtiers import __version__
from kvtiers.api import Secret
from kvtiers.cli.main import cli
from kvtiers.cli.redaction import Redaction
from kvtiers.config.options import options_of
from kvtiers.plugins import installed_tiers, load_tier
from kvtiers.status import ANSWER_SECONDS

CANARY = "canary-5d0e7"
CONFIG = f"""
version: 1
primary: {{capacity: 64MiB}}  # {CANARY}: a comment may have one, too
secondary:
  - {{type: redis, host: "redis://me:{CANARY}@cache.example:6379", password: "${{REPORT_TEST}}"}}
  - {{type: memory, capacity: 64MiB}}
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPORT_TEST", "variable-91c2")
    (tmp_path / "tiers.yaml").write_text(CONFIG)
    (tmp_path / "vllm.log").write_text(
        "an early line\n" * 3
        + "".join(f"kvtiers: line {number}\n" for number in range(9))
        + f"kvtiers.redis: AUTH variable-91c2 failed at redis://me:{CANARY}@cache.example\nanother engine's line\n"
    )
    return lambda *arguments, answer="": CliRunner().invoke(cli, ["report", *arguments], input=answer)


def test_it_is_shown_and_asked_for_before_it_is_written_as_it_was_shown(report, tmp_path):
    arguments = ("tiers.yaml", "--log", "vllm.log", "--lines", "4")
    refused = report(*arguments, answer="n\n")
    file = tmp_path / "kvtiers-report.txt"
    assert refused.exit_code == 1
    assert not file.exists()
    done = report(*arguments, answer="y\n")
    assert done.exit_code == 0, done.output
    text = file.read_text()
    assert text.strip() in done.output
    for title in (
        "versions",
        "machine",
        "config tiers.yaml",
        "kvtiers check --offline",
        "running engines",
        "log vllm.log",
    ):
        assert f"== {title}\n" in text
    for said in (f"kvtiers {__version__}\n", "kvtiers-example", "pydantic ", "processors", "capacity: 64MiB"):
        assert said in text
    assert "kvtiers: line 8" in text
    assert "kvtiers: line 5" not in text  # four lines
    assert "another engine's line" not in text
    for secret in (CANARY, "variable-91c2"):
        assert secret not in done.output
        assert secret not in refused.output
    assert "password: ${REPORT_TEST}" in text  # the name is no secret
    assert "redis://***@cache.example" in text


PROMPT = "does kvtiers print my salary?"


@pytest.mark.parametrize(
    "line",
    [
        f"DEBUG 11-25 10:00:00 [request_logger.py:59] Request cmpl-1 details: prompt: {PROMPT!r}.",
        f"INFO 11-25 10:00:00 [logger.py:43] Received request cmpl-1: prompt: {PROMPT!r}, params: SamplingParams(n=1).",
        f'DEBUG 11-25 10:00:00 [request_logger.py:74] Request cmpl-1 JSON body: {{"messages":["{PROMPT}"]}}',
        f"INFO 11-25 10:00:00 [request_logger.py:108] Generated response cmpl-1: output: {PROMPT!r}",
        f'DEBUG 11-25 10:00:00 [request_logger.py:74] Request a b JSON body: {{"model":"{PROMPT}"}}',
        f"[2026-11-25 10:00:00] Receive: obj=GenerateReqInput(rid='1', text={PROMPT!r})",
        f"[2026-11-25 10:00:00] Receive: obj=EmbeddingReqInput(rid='1', text={PROMPT!r})",
        f"[2026-11-25 10:00:00] Receive OpenAI: obj={{'messages': [{{'role': 'user', 'content': {PROMPT!r}}}]}}",
        f"[2026-11-25 10:00:00] Finish: obj=..., out={{'text': {PROMPT!r}}}",
        f'{{"event": "request.received", "obj": {{"text": "{PROMPT}"}}}}',
        f'{{"event": "request.received.openai", "obj": {{"input": "{PROMPT}"}}}}',
        f'{{"event": "request.finished", "rid": "1", "out": {{"text": "{PROMPT}"}}}}',
        f'{{"level": "debug", "body": "{{\\"content\\": \\"{PROMPT}\\"}}"}}',
        f'{{"level": "debug", "prompt": "{PROMPT}"}}',
    ],
)
def test_no_prompt_and_no_answer_of_an_engine_s_log_is_in_it(report, tmp_path, line):
    with (tmp_path / "vllm.log").open("a") as log:
        log.write(f"{line}\nkvtiers: prompts with more KV lose hits\n")
    text = report("--log", "vllm.log", answer="n\n").output
    assert "salary" not in text
    assert "(1 line that names kvtiers in a request's prompt or answer is left out)" in text
    assert "kvtiers: prompts with more KV lose hits" in text


OWN = "redis: out of use: it does not answer; its lookups miss until it is back"


@pytest.mark.parametrize(
    "line",
    [
        f'{{"time": "10:00:00", "logger": "kvtiers.secondary", "text": "{OWN}"}}',
        f'{{"text": "{OWN}", "level": "WARNING", "name": "kvtiers"}}',
        f'{{"text": "10:00:00 | {OWN}", "record": {{"name": "kvtiers.secondary", "message": "{OWN}"}}}}',
        f'2026-11-25T10:00:00Z stdout F {{"log": {{"logger": "kvtiers.secondary"}}, "text": "{OWN}"}}',
    ],
)
def test_what_kvtiers_says_is_in_it_where_a_log_in_json_calls_its_messages_text(report, tmp_path, line):
    with (tmp_path / "vllm.log").open("a") as log:
        log.write(f"{line}\n")
    text = report("--log", "vllm.log", answer="n\n").output
    assert line in text
    assert "left out)" not in text


@pytest.mark.parametrize(
    "line",
    [
        f'{{"text": "{PROMPT}", "rid": "1"}}',
        f'{{"text": "{PROMPT}", "level": "DEBUG", "name": "vllm.entrypoints.logger"}}',
        f'{{"text": "Receive: obj={PROMPT}", "logger": "kvtiers.secondary"}}',
        f'{{"text": "kvtiers", "logger": "kvtiers.secondary", "prompt": "{PROMPT}"}}',
        f'{{"text": {{"logger": "kvtiers", "of": "{PROMPT}"}}, "logger": "kvtiers"}}',
        f'{{"text": "{PROMPT}", "logger": "kvtiersome"}}',
        f'{{"text": "{PROMPT}", "logger": "kvtiers"',
        f'[{{"text": "{PROMPT}", "logger": "kvtiers"}}]',
    ],
)
def test_no_text_of_another_logger_and_no_prompt_beside_one_of_kvtiers_is_in_it(report, tmp_path, line):
    with (tmp_path / "vllm.log").open("a") as log:
        log.write(f"{line}\n")
    text = report("--log", "vllm.log", answer="n\n").output
    assert "salary" not in text
    assert "(1 line that names kvtiers in a request's prompt or answer is left out)" in text


def test_how_many_lines_of_requests_are_left_out_is_said_if_there_are_any(report, tmp_path):
    assert "left out)" not in report("--log", "vllm.log", answer="n\n").output
    with (tmp_path / "vllm.log").open("a") as log:
        log.write(f"Generated response cmpl-1: output: {PROMPT!r}\n" * 2)
    text = report("--log", "vllm.log", answer="n\n").output
    assert "(2 lines that name kvtiers in a request's prompt or answer are left out)" in text


def test_what_an_engine_says_of_itself_has_its_histograms_in_one_line_each(report, monkeypatch):
    said = {"name": "x", "tiers": ["a"], "latency": {"count": 3, "buckets": [0, 1, 2.5, 1e-09]}}
    monkeypatch.setattr("kvtiers.cli.report.ask_all", lambda: [("x", said, "")])
    text = report(answer="n\n").output
    assert '  "buckets": [ 0, 1, 2.5, 1e-09 ]' in text
    _, _, engines = text.partition("== running engines\n")
    assert json.loads(engines.partition("\n\n")[0]) == said


@pytest.mark.slow
def test_engines_that_do_not_answer_are_waited_for_side_by_side(report):
    with contextlib.ExitStack() as closing:
        for number in range(12):
            hangs = closing.enter_context(socket.socket(socket.AF_UNIX))
            hangs.bind(f"\0kvtiers-control-{os.getpid()}-{number}-0")
            hangs.listen()
        began = time.monotonic()
        text = report(answer="n\n").output
        took = time.monotonic() - began
    assert text.count("no answer: it has not answered in time") >= 12
    assert took < 12 * ANSWER_SECONDS, "one after the other"


@pytest.mark.parametrize("arguments", [("FIFO",), ("--log", "FIFO")])
def test_a_config_and_a_log_that_never_answer_are_one_line(report, tmp_path, arguments):
    os.mkfifo(tmp_path / "fifo")
    done = report(*(word.replace("FIFO", "fifo") for word in arguments))
    assert done.exit_code == 2
    assert re.fullmatch("error: fifo: .*expected a regular file.*\n", done.output)


def test_without_a_terminal_nothing_is_written_unless_it_is_said(report, tmp_path):
    assert report().exit_code == 1
    assert not (tmp_path / "kvtiers-report.txt").exists()
    assert report("--yes", "--output", "it.md").exit_code == 0
    assert "== versions" in (tmp_path / "it.md").read_text()


SECRET_OPTIONS = [
    (entry.name, option)
    for entry in installed_tiers()
    for option, field in load_tier(entry.name).config.model_fields.items()
    if "Secret" in str(field.annotation)
]


@pytest.mark.parametrize(("tier_type", "option"), SECRET_OPTIONS)
def test_every_secret_option_of_an_installed_tier_is_taken_out(tier_type, option):
    assert Secret.__name__ in str(load_tier(tier_type).config.model_fields[option].annotation)
    assert option in {it.name for it in options_of(load_tier(tier_type).config)}
    redaction = Redaction()
    text = yaml.safe_dump({"secondary": [{"type": tier_type, option: CANARY}]})
    assert CANARY not in "\n".join(redaction.config(text))
    assert redaction.apply(f"the log has {CANARY}") == "the log has ***"


def test_an_option_is_a_secret_by_its_type_whatever_its_name(distributions):
    source = """
from pydantic import Field
from kvtiers.api import Secret, TierConfig, TierPlugin, hookimpl

class Config(TierConfig):
    plate: Secret | None = Field(default=None, description="x")
    shelf: str = Field(default="", description="x")

@hookimpl
def kvtiers_tier():
    return TierPlugin(name="car", kind="store", config=Config, open=print, api_version=1)
"""
    distributions.install_tier("car", source)
    text = "\n".join(Redaction().config(f"secondary: [{{type: car, plate: {CANARY}, shelf: here}}]"))
    assert CANARY not in text
    assert "shelf: here" in text


def test_there_are_secret_options():
    assert {"redis", "s3", "azure"} <= {tier_type for tier_type, _ in SECRET_OPTIONS}


@pytest.mark.parametrize(
    "option",
    [
        "password: {}",
        "api_key: {}",
        "auth: {{user: x, pass: {}}}",
        "tokens: [{}]",
        "url: 'x://{}@h'",
        "access-token: {}",
        "X-Api-Key: {}",
        "pwd: {}",
        "pass: {}",
        "db_pass: {}",
        "dsn: {}",
        "cookie: {}",
        "key: {}",
        "connection_string: {}",
    ],
)
def test_in_a_tier_that_is_not_installed_names_say_what_is_secret(option):
    redaction = Redaction()
    text = "secondary:\n  - {type: nowhere, " + option.format(CANARY) + "}\n"
    assert "nowhere" in "\n".join(redaction.config(text))
    assert CANARY not in "\n".join(redaction.config(text))
    assert CANARY not in redaction.apply(f"a line with {CANARY} in it")


def test_what_a_secret_s_file_has_is_taken_out_of_all_else(tmp_path):
    file = tmp_path / "secret"
    file.write_text(f"{CANARY}\n")
    redaction = Redaction()
    assert f"file: {file}" in "\n".join(redaction.config(f"secondary: [{{type: redis, password: {{file: {file}}}}}]"))
    assert CANARY not in redaction.apply(CANARY)


@pytest.mark.parametrize(
    "line",
    [
        f"GET https://x.example/c?sv=1&sig={CANARY}&se=2",
        f"GET https://x.example/c?X-Amz-Security-Token={CANARY}&X-Amz-Date=1",
        f"GET https://x.example/c?access_token={CANARY}",
        f"GET https://x.example/c?a=1&api_key={CANARY}",
        f'{{"url": "https://x.example/c?a=1\\u0026sig={CANARY}"}}',
        f"Authorization: Bearer {CANARY}",
        f"authorization: {CANARY}",
        f"{{'Authorization': 'Basic {CANARY}'}}",
        f"{{'Authorization': b'Basic {CANARY}'}}",
        f"('Authorization', 'Basic {CANARY}')",
        f'headers {{\\"Authorization\\": \\"Basic {CANARY}\\"}}',
        f"Authorization: AWS4-HMAC-SHA256 Credential=AKIA/s3, SignedHeaders=host, Signature={CANARY}",
        f'Authorization: Digest username="me", response="{CANARY}"',
        f"HTTP_AUTHORIZATION=Basic {CANARY}",
        f"proxy-auth: Basic {CANARY}",
        f"Set-Cookie: ***; session={CANARY}",
        f"Cookie: a=b; session={CANARY}",
        f"X-Auth-Token: {CANARY}",
        f"X-Api-Key: {CANARY}",
        f"aws_secret_access_key={CANARY}",
        f"AccountName=it;AccountKey={CANARY}==;EndpointSuffix=x",
        f"Client(host='h', accessKey='{CANARY}')",
        f"Client(host=h,tokens=128,password={CANARY})",
        f"access key: {CANARY}",
        f"password='one \\'two {CANARY}'",
        f"tokens=['one', '{CANARY}']",
        f'{{\\"password\\": \\"{CANARY}\\"}}',
        f"<a><SessionToken>{CANARY}</SessionToken></a>",
        f"started with --redis-password {CANARY}",
        f"started with ['--token', '{CANARY}']",
        f"connecting to s://user:{CANARY}@h",
        f"connecting to redis://u:p@{CANARY}@h",
        f"connecting to redis://u:p/{CANARY}@h",
        f"connecting to redis://u:p'{CANARY}@h",
        f"connecting to redis://:{CANARY}@h1,redis://:b@h2",
        f"connecting to redis://:a@h1,redis://:{CANARY}@h2",
        f"connecting to redis://u:{CANARY}@h1:1,h2:2/0",
    ],
)
def test_lines_of_a_log_have_no_secrets_that_the_config_has_not(line):
    assert CANARY not in Redaction().apply(line)


@pytest.mark.parametrize(
    "line",
    [
        "kvtiers.redis: connected to redis://cache.example:6379/0 after 12.5 ms",
        "kvtiers: tokens=128 blocks=8, max_tokens: 4096, prompt_tokens=17",
        "Request(tokens=128,blocks=8)",
        "blocks_per_chunk: 16",
        "tokens_per_block: 16",
        'kvtiers_tier_hits{tier="redis",kind="store"} 128',
        "tokenizer='meta-llama/Llama-3.1-8B', author: kvtiers, bypass=1, passed: 3",
        "key=ab12/0 hash=93fe row=7",
        "--num-tokens 128 --token-file /run/token",
        '  "tokens": {',
        "secondary[0] (redis): password: environment variable 'NAME' is not set",
        "secondary[0] (redis): password: expected a text (a number in quotes), '${NAME}' or {file: PATH}",
        "password: ${NAME}",
        "password: null",
        "password=Secret(from ${NAME})",
        "git@example.org and me@example.org",
    ],
)
def test_lines_without_a_secret_stay_as_they_are(line):
    assert Redaction().apply(line) == line


def test_only_the_secret_of_a_line_is_taken_out():
    redaction = Redaction()
    assert redaction.apply("host=h password=abcdef, rows=3") == "host=h password=*** rows=3"
    assert redaction.apply("'password': 'ab cd', 'rows': 3") == "'password': ***, 'rows': 3"
    assert redaction.apply("redis://u:p@ssw0rd@h") == "redis://***@h"
    assert redaction.apply("redis://u:p@h1:1,h2:2/0") == "redis://***@h1:1,h2:2/0"
    assert redaction.apply("x://h/c?sig=abcdef&se=2") == "x://h/c?sig=***&se=2"


@pytest.mark.parametrize(
    "option",
    [f"pasword: {CANARY}", f"accesskay: [a, {CANARY}]", f"breaker: {{pasword: {CANARY}}}"],
)
def test_an_option_that_a_tier_type_does_not_have_may_be_a_secret_with_a_typo(option):
    redaction = Redaction()
    text = "\n".join(redaction.config(f"secondary: [{{type: redis, url: 'redis://h:1', threads: 3, {option}}}]"))
    assert CANARY not in text
    assert "threads: 3" in text
    assert "redis://h:1" in text
    assert CANARY not in redaction.apply(CANARY)


def test_a_size_behind_a_typo_is_hidden_there_and_stays_elsewhere():
    redaction = Redaction()
    text = redaction.config("secondary: [{type: memory, capacty: 64MiB, capacity: 64MiB}]")
    assert text[-2:] == ["  capacty: '***'", "  capacity: 64MiB"]
    assert redaction.apply("a region of 64MiB") == "a region of 64MiB"


@pytest.mark.parametrize(
    ("written", "logged"),
    [
        ("abc${REPORT_TEST}def", "abcvariable-91c2def"),
        ("abcdef${NOT_SET_AT_ALL}", "abcdef"),
        ("p%40ss%2Fword", "p@ss/word"),
        ("p@ss/word", "p%40ss%2Fword"),
        ('one"two\\three', 'one\\"two\\\\three'),
        ("pässwört", "p\\u00e4ssw\\u00f6rt"),
    ],
)
def test_a_secret_is_taken_out_whole_in_each_form_that_it_may_have(monkeypatch, written, logged):
    monkeypatch.setenv("REPORT_TEST", "variable-91c2")
    redaction = Redaction()
    redaction.config(yaml.safe_dump({"secondary": [{"type": "redis", "password": written}]}))
    assert redaction.apply(f"it is <{logged}>") == "it is <***>"


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("redis://u:p@ssw0rd@h", "p@ssw0rd"),
        ("redis://u:pass%40word@h", "pass@word"),
        ("redis://u:pass word@h", "pass word"),
        ("redis://:word-a@h1,redis://:word-b@h2", "word-a"),
        ("redis://:word-a@h1,redis://:word-b@h2", "word-b"),
        ("u:word-a@h:1", "word-a"),
    ],
)
def test_the_password_of_a_url_in_the_config_is_taken_out_of_all_else(url, password):
    redaction = Redaction()
    text = "\n".join(
        redaction.config(yaml.safe_dump({"note": f"{password}", "secondary": [{"type": "x", "url": url}]}))
    )
    assert password not in text
    assert url not in text
    assert redaction.apply(f"it is <{password}>") == "it is <***>"


def test_a_long_secret_is_not_hidden_by_the_folding_of_lines():
    redaction = Redaction()
    secret = " ".join(["word"] * 40)
    text = yaml.safe_dump({"note": secret, "secondary": [{"type": "redis", "password": secret}]})
    assert redaction.config(text)[0] == "note: '***'"


def test_what_stands_beside_a_file_is_no_file():
    assert CANARY not in "\n".join(Redaction().config(f"password: {{file: /nowhere, pasword: {CANARY}}}"))


@pytest.mark.parametrize("text", [f"a: [{CANARY}", f"a: &it [*it, {CANARY}]", f"{{a: 2026-99-99, b: {CANARY}}}"])
def test_a_config_that_cannot_be_read_is_left_out(text):
    (line,) = Redaction().config(text)
    assert CANARY not in line


def test_options_that_only_look_like_secrets_stay():
    text = "secondary:\n- token_file: /run/token\n  tokens_per_block: 16\n  authority: https://login.example\n"
    assert Redaction().config(text) == text.splitlines()


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        (f"https://h.example/?sv=1&sig={CANARY}", CANARY),
        (f"rediss://h:1/0?ssl_password={CANARY}", CANARY),
        (f"https://h.example/c?X-Amz-Security-Token={CANARY}&X-Amz-Date=1", CANARY),
        (f"https://h.example/c?code={CANARY}", CANARY),
        (f"https://h.example/c?bearer={CANARY}&timeout=3", CANARY),
        (f"https://h.example/c?{CANARY}", CANARY),
        (f"https://h.example/c#access_token={CANARY}", CANARY),
        (f"host=h password={CANARY} dbname=d", CANARY),
        (f"AccountName=it;AccountKey={CANARY}==;EndpointSuffix=x", CANARY),
        (f"Authorization: Basic {CANARY}", CANARY),
        (f"Bearer {CANARY}", CANARY),
        ("https://h.example/c?code=one%2Ftwo%2Fthree", "one/two/three"),
    ],
)
def test_what_is_hidden_by_its_form_in_the_config_is_hidden_in_the_log(url, secret):
    redaction = Redaction()
    text = "\n".join(redaction.config(yaml.safe_dump({"secondary": [{"type": "nowhere", "address": url}]})))
    assert secret not in text
    assert redaction.apply(f"the server refused <{secret}> (wrong)") == "the server refused <***> (wrong)"


def test_a_url_keeps_the_values_of_its_query_that_are_known_to_be_harmless():
    redaction = Redaction()
    url = "rediss://h:1/0?db=3&socket_timeout=2&ssl_cert_reqs=none&code=abcdef"
    assert redaction.apply(f"open {url}") == f"open {url.replace('abcdef', '***')}"
    text = "\n".join(redaction.config(yaml.safe_dump({"secondary": [{"type": "nowhere", "url": url}]})))
    assert "db=3&socket_timeout=2&ssl_cert_reqs=none&code=***" in text


@pytest.mark.parametrize(
    "lines",
    [
        "- {type: redis, url: 'redis://h:1', password: SECRET}\n bad: [",
        "- {type: redis, password: 'SECRET, threads: 3}",
        "- type: redis\n  password:\n    SECRET\n bad: [",
        "- type: redis\n  password: |\n    SECRET\n bad: [",
        "- {type: redis, url: 'redis://me:SECRET@h:1'}\n bad: [",
        "- {type: redis, url: 'redis://h:1/0?code=SECRET'}\n bad: [",
        "- {type: redis, pasword: SECRET}\n bad: [",
        "- {type: redis, threads: 3}\nencryption: {key: {command: [vault, --for, SECRET]}}\n bad: [",
        "- {type: redis, password: SECRET, password: another}",
        "- {type: redis, password: !!int SECRET}",
        '- {type: redis, "password" : "SECRET"}\n bad: [',
        "- {type: redis, password: SECRET}\n\t- x",
        "- {type: redis, password: more=SECRET, threads: 3}\n bad: [",
    ],
)
def test_what_may_be_a_secret_in_a_config_that_is_no_yaml_is_hidden_in_the_log(lines):
    redaction = Redaction()
    (line,) = redaction.config(
        f"version: 1\nprimary: {{capacity: 1MiB}}\nsecondary:\n{lines.replace('SECRET', CANARY)}\n"
    )
    assert "it is no YAML" in line
    assert redaction.apply(f"refused <{CANARY}>") == "refused <***>"
    for kept in ("redis: 3 threads, region of 1MiB", "redis://h:1 does not answer"):
        assert redaction.apply(kept) == kept


def test_a_config_whose_aliases_stand_for_millions_of_values_is_left_out():
    text = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(20))
    (line,) = Redaction().config(text)
    assert "left out" in line


@pytest.mark.parametrize("again", ["password: ", "pasword: ", "key: ", "a:", "password:\n- ", "x://", "?a", "a=b?"])
def test_a_long_config_that_is_no_yaml_takes_no_minutes(again):
    began = time.monotonic()
    (line,) = Redaction().config("a: [\n" + again * (50_000 // len(again)))
    assert "left out" in line
    assert time.monotonic() - began < 60
