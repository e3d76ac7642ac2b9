"""Every command line that documents and ``--help`` print is accepted as printed; sizing, plans and replays are run.

``bench`` has tests of its own. A command that speaks to a running engine is only parsed: this machine may have one. So
is one for a store, which has none of what the documents speak of.
"""

import gzip
import json
import re
import shlex
import shutil
from itertools import chain
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvtiers.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    chain(ROOT.glob("*.md"), ROOT.glob("docs/*.md"), *(ROOT.glob(f"{each}/*.md") for each in ("core", "replay")),
          ROOT.glob("plugins/*/*.md"), ROOT.glob("integrations/*/*.md"))
)  # fmt: skip
RUN = ("check", "evaluate", "plan", "replay", "size", "tiers")
PARSED = ("completion", "store", "ctl", "metrics", "new-tier", "report", "status", "top", "vllm-config", "warm")
FENCED = re.compile(r"^```(?:sh|bash|console|)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(kvtiers [^`\n]+)`")
COMMAND = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(kvtiers (?:" + "|".join(map(re.escape, RUN + PARSED)) + r")\b.*)$")
# Words that stand for something of the reader's own.
STANDS_FOR = {"TIER": "fs", "NAME": "some", "PID": "1", "5c1a...": "5c1a", "disk": "fs"}
FILES = {"--trace": "trace.jsonl", "--log": "requests.jsonl", "--model": "config.json"}
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


def lines_of(text):
    """Yield the command lines of a text, without what is said beside them."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        for part in line.split(" && "):
            if found := COMMAND.match(part):
                yield re.split(r"\s{2,}|\s[#|>]|;", found[1])[0].strip()


def printed():
    """Yield each command line with the place where it stands, and whether it is in a block of commands."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        place = str(path.relative_to(ROOT))
        yield from ((place, line, True) for block in FENCED.findall(text) for line in lines_of(block))
        yield from ((place, line, False) for found in INLINE.findall(FENCED.sub("", text)) for line in lines_of(found))
    context = click.Context(cli)
    for name in (*RUN, *PARSED):
        command = cli.get_command(context, name)
        yield from ((f"{name} --help", line, True) for line in lines_of(command.epilog or ""))


CASES = {}
for place, line, is_block in printed():
    CASES.setdefault(line, (place, is_block))


def arguments_of(line):
    """Return the arguments of a command line, with files of this test where the reader's own stand."""
    words = shlex.split(line)[1:]
    for at, word in enumerate(words):
        if word == "FILE":
            words[at] = FILES.get(words[at - 1], "config.json")
        words[at] = STANDS_FOR.get(words[at], words[at])
    return words


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """The folder of a reader who has what the documents name: a config, a trace, logs, a model."""
    monkeypatch.chdir(tmp_path)
    tiers = f"secondary:\n  - {{type: fs, path: {tmp_path / 'values'}, capacity: 1GiB, min_free: 0}}\n"
    config = f"version: 1\nnamespace: prod\nprimary: {{capacity: 256MiB}}\n{tiers}"
    prompts = [{"prompt_token_ids": [n % 5] * 900 + [n] * 100, "timestamp": 10 * n} for n in range(40)]
    trace = [
        {
            "timestamp": 100 * n,
            "input_length": 65,
            "tokens_per_block": 16,
            "hash_ids": [n % 4, 10 + n % 4, 100 + n, n, 9],
        }
        for n in range(20)
    ]
    details = "DEBUG 11-25 10:00:{:02} [x.py:1] Request r{} details: prompt: None, prompt_token_ids: {}, embeds: None."
    texts = {
        "tiers.yaml": config,
        "config.json": json.dumps(LLAMA),
        "requests.jsonl": "".join(json.dumps(each) + "\n" for each in prompts),
        "trace.jsonl": "".join(json.dumps(each) + "\n" for each in trace),
        "server.log": "".join(details.format(n, n, each["prompt_token_ids"]) + "\n" for n, each in enumerate(prompts)),
        "batch.jsonl": "".join(json.dumps({"custom_id": "a", "body": each}) + "\n" for each in prompts),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        if name.endswith(".jsonl"):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    shutil.copy("server.log", "vllm.log")
    shutil.copy("trace.jsonl.gz", "conversation_trace.jsonl.gz")
    (tmp_path / "values").mkdir()
    return tmp_path


def parse(arguments):
    """Parse a command line, down to its last subcommand, and run nothing. Raises click.UsageError."""
    command, context = cli, click.Context(cli, info_name="kvtiers")
    while isinstance(command, click.Group):
        if not any(word == "--help" or not word.startswith("-") for word in arguments):
            raise click.UsageError("requires an argument: a command")
        if arguments[0] == "--help":
            return
        name, command, arguments = command.resolve_command(context, list(arguments))
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=name, parent=context)
    command.make_context(command.name, list(arguments), parent=context)


def is_complete(line, error):
    """Return whether an error is more than that a mention of a command leaves out what it needs."""
    return not isinstance(error, click.MissingParameter) and "requires an argument" not in error.message


@pytest.mark.parametrize("line", list(CASES), ids=lambda line: re.sub(r"[^\w.=-]+", " ", line)[8:80])
def test_a_printed_command_line_is_accepted_and_what_needs_no_engine_does_what_it_says(line, reader):
    place, is_block = CASES[line]
    if any(word in line for word in ("...`", "COMMAND", "[")):
        pytest.skip("a pattern, not a command")
    arguments = arguments_of(line)
    try:
        parse(arguments)
    except click.exceptions.Exit:
        return  # --help
    except click.UsageError as error:
        if not is_block and not is_complete(line, error):
            return
        pytest.fail(f"{place} prints {line!r}: {error.format_message()}")
    if arguments[0] not in RUN:
        return
    if "--workload" in arguments and "--requests" not in arguments:
        arguments += ["--requests", "10"]  # of several hundred
    done = CliRunner().invoke(cli, arguments, prog_name="kvtiers")
    if not is_block and "Usage: " in done.output:
        return  # such as 'kvtiers replay', which names the command
    # A plan's 1 says that a wish is out of reach, a check's that the machine lacks something.
    allowed = (0, 1) if "--wish" in arguments or arguments[0] == "check" else (0,)
    assert done.exit_code in allowed, f"{place} prints {line!r}: {done.output[-2000:]}"


def test_the_command_lines_of_the_documents_are_found():
    assert {
        "kvtiers plan --trace trace.jsonl.gz --config tiers.yaml",
        "kvtiers warm --from fs --config tiers.yaml",
    } < set(CASES)
    assert {line.split()[1] for line in CASES} >= set(RUN)
