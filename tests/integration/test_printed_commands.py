"""Every command line that documents and ``--help`` print is run as printed, and so is each option that they name.

``ctl``, ``warm`` and others speak to an engine of the test: this machine may have others. What goes on until
it is interrupted, ``top`` and ``metrics --listen``, and ``bench`` with its servers have tests of their own.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import threading
from itertools import chain
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from kvtiers import open_manager, open_worker
from kvtiers.cli import engines as cli_engines
from kvtiers.cli import metrics as cli_metrics
from kvtiers.cli.main import cli
from kvtiers.control_actions import EngineActions
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.status import Troubles, answer_status

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    chain(ROOT.glob("*.md"), ROOT.glob("docs/*.md"), *(ROOT.glob(f"{each}/*.md") for each in ("core", "replay")),
          ROOT.glob("plugins/*/*.md"), ROOT.glob("integrations/*/*.md"))
)  # fmt: skip
RUN = ("check", "completion", "evaluate", "new-tier", "plan", "replay", "report", "size", "store", "tiers",
       "vllm-config")  # fmt: skip
TO_AN_ENGINE = ("ctl", "metrics", "pool", "status", "top", "warm")
ALL = RUN + TO_AN_ENGINE
SAYS_NO = {
    # What the reader has who prints these lines.
    "store rekey": "has no two live keys",
    "warm --from fs --config": "has no values of this engine's fingerprint",
    "ctl clear --fingerprint": "nothing was changed",
    "ctl clear --tenant": "has no 'tenants'",
    "pool clear": "no keeper serves at",
    "pool status": "no keeper serves at",
}
FENCED = re.compile(r"^```(?:sh|bash|console|)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(kvtiers [^`\n]+)`")
OPTIONS = re.compile(r"`(--[a-z][^`\n]*)`")
RUN_TOO = (
    "kvtiers bench memory --bytes 16MiB --seconds 0.2",
    "kvtiers ctl clear --model some --engine PID",
    "kvtiers ctl clear --fingerprint 5c1a5c1a",
    "kvtiers ctl clear --tenant acme",
    (
        "kvtiers evaluate --log requests.jsonl --hours 24 --chars-per-token 3.5 --media-tokens 1000 "
        "--tokens-per-chunk 64 --gpu-cache 20GiB --most-memory 64GiB --prefill-speed 20000 --model config.json --tp 2 "
        "--gbps disk=3 --rtt network=2ms --tier-price disk=0.02 --no-replay"
    ),
    "kvtiers evaluate --log named.jsonl --only-model some --no-replay",
    "kvtiers evaluate --log hashes.jsonl --tokens-per-block 16 --no-replay",
    "kvtiers new-tier some --batch --listing",
    "kvtiers new-tier other --kind manager",
    "kvtiers plan --trace trace.jsonl.gz --config tiers.yaml --model config.json --json",
    "kvtiers replay --workload code --requests 10 --seed 7 --config tiers.yaml --report page.html",
    "kvtiers store prune fs --config tiers.yaml --older-than 30d --dry-run",
    "kvtiers warm --from fs --keys keys.txt --rate 500MiB/s --most 1MiB --all",
)
"""Lines with the options that only a sentence names."""
OF_OTHERS = {
    "vLLM": "--block-size --kv-cache-dtype --kv-events-config --kv-offloading-size --kv-transfer-config --log-level "
    "--max-log-len --otlp-traces-endpoint --prefix-cache-retention-interval --shutdown-timeout --tensor-parallel-size",
    "SGLang": "--dtype --enable-hierarchical-cache --hicache-mem-layout --hicache-ratio --hicache-storage-backend "
    "--hicache-storage-backend-extra-config --hicache-storage-prefetch-policy --hicache-write-policy --lora-paths "
    "--model-impl --page-size --quantization",
    "LMCache": "--l2-adapter --shm-name",
    "Mooncake": "--enable_multi_tenants --enable_offload=true --metrics_port",
    "pip": "--extra-index-url --find-links",
    "programs of this repository": "--delays --device --folder --path --quick --random",
}
"""Options that documents name and that are not kvtiers' own."""
COMMAND = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(kvtiers (?:" + "|".join(map(re.escape, ALL)) + r")\b.*)$")
# Words that stand for something of the reader's own.
STANDS_FOR = {"TIER": "fs", "NAME": "some", "PID": str(os.getpid()), "5c1a...": "5c1a", "disk": "fs", "far": "fs",
              "mooncake": "fs", "redis": "fs"}  # fmt: skip
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
    for name in ALL:
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
        "hashes.jsonl": "".join(
            json.dumps({name: value for name, value in each.items() if name != "tokens_per_block"}) + "\n"
            for each in trace
        ),
        "named.jsonl": "".join(json.dumps(each | {"model": "some"}) + "\n" for each in prompts),
        "keys.txt": "".join(f"{n:064x}\n" for n in range(3)),
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


def about(_tier, _figures):
    return {"off": "", "shared": True, "tokens": 0}


@pytest.fixture
def engine(reader, monkeypatch):
    """An engine with the reader's config, that steps and is commanded as vLLM's is, and the only one that is found."""
    layout = CacheLayout(ModelIdentity("some", weights="w"), (KVGroup("all", 16),), (KVTensor("t", 0, 4096),))
    manager, over = open_manager(str(reader / "tiers.yaml"), layout), threading.Event()
    worker = open_worker(
        str(reader / "tiers.yaml"), layout, [np.zeros((8, 4096), np.uint8)], engine_id=manager.engine_id
    )

    def steps():
        while not over.wait(0.005):
            with manager.lock:
                manager.on_schedule_end()

    stepping = threading.Thread(target=steps)
    stepping.start()
    actions = EngineActions(manager, "some").actions()
    answering = answer_status("test", "some", Troubles(["fs"]), manager.stats, about, actions=actions)
    for room in (cli_engines, cli_metrics):
        monkeypatch.setattr(room, "running", lambda: [answering.name])
    yield
    answering.close()
    over.set()
    stepping.join(60)
    worker.shutdown()
    manager.shutdown()


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


def id_of(line):
    """Return the name of a line's test."""
    return re.sub(r"[^\w.=-]+", " ", line)[8:80]


def is_complete(line, error):
    """Return whether an error is more than that a mention of a command leaves out what it needs."""
    return not isinstance(error, click.MissingParameter) and "requires an argument" not in error.message


def accepted(line):
    """Return the arguments of a printed line that is complete, and fail if it is not accepted."""
    place, is_block = CASES[line]
    if any(word in line for word in ("...`", "COMMAND", "[")):
        pytest.skip("a pattern, not a command")
    arguments = arguments_of(line)
    try:
        parse(arguments)
    except click.exceptions.Exit:
        return []  # --help
    except click.UsageError as error:
        if not is_block and not is_complete(line, error):
            return []
        pytest.fail(f"{place} prints {line!r}: {error.format_message()}")
    return arguments


def succeeds(line, arguments):
    """Run a printed line, which is to succeed, or to say what a mention of a command leaves out."""
    place, is_block = CASES.get(line, ("", True))
    done = CliRunner().invoke(cli, arguments, input="y\n", prog_name="kvtiers")  # a report asks
    # A plan's 1 says that a wish is out of reach, a check's that the machine lacks something.
    allowed = (0, 1) if "--wish" in arguments or arguments[0] == "check" else (0,)
    refused = any(" ".join(arguments).startswith(start) and text in done.output for start, text in SAYS_NO.items())
    if not is_block and "Usage: " in done.output:
        return  # such as 'kvtiers replay', which names the command
    assert done.exit_code in allowed or refused, f"{place} prints {line!r}: {done.output[-2000:]}"


def goes_on(arguments):
    """Return whether a command goes on until it is interrupted."""
    return arguments == ["top"] or arguments[:2] in (["metrics", "--listen"], ["pool", "serve"])


@pytest.mark.parametrize("line", [line for line in CASES if line.split()[1] not in TO_AN_ENGINE], ids=id_of)
def test_a_printed_command_line_is_accepted_and_what_needs_no_engine_does_what_it_says(line, reader):
    arguments = accepted(line)
    if not arguments:
        return
    if "--workload" in arguments and "--requests" not in arguments:
        arguments += ["--requests", "10"]  # of several hundred
    succeeds(line, arguments)


@pytest.mark.parametrize("line", [line for line in CASES if line.split()[1] in TO_AN_ENGINE], ids=id_of)
def test_a_printed_command_to_an_engine_is_carried_out(line, request):
    arguments = accepted(line)
    if not arguments or arguments[-1] == "--help" or goes_on(arguments) or "--trace" in arguments:
        return  # a trace's keys are for engines of 'kvtiers replay'
    request.getfixturevalue("engine")
    if "attach" in arguments:
        CliRunner().invoke(cli, ["ctl", "detach", "fs"])
    succeeds(line, arguments)


def leaves(command, context):
    """Yield each command that has no subcommands, with its context."""
    if not isinstance(command, click.Group):
        yield command, context
        return
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        yield from leaves(below, click.Context(below, info_name=name, parent=context))


def takes(command, context, words):
    """Return whether a command has these options, and takes their values; words in capitals stand for some value."""
    try:
        given, left, _ = command.make_parser(context).parse_args(list(words))
        if left:
            return False  # words behind an option that takes none
        for option in command.params:
            value = given.get(option.name)
            if isinstance(value, str) and not re.fullmatch(r"[A-Z]+", value):
                option.type_cast_value(context, value)
    except click.UsageError:
        return False
    return True


PROSE = {
    options: str(path.relative_to(ROOT))
    for path in DOCUMENTS
    for options in OPTIONS.findall(FENCED.sub("", path.read_text(encoding="utf-8")))
    if options.split()[0] not in chain(*(each.split() for each in OF_OTHERS.values()))
}


@pytest.mark.parametrize("options", PROSE, ids=id_of)
def test_options_that_a_sentence_names_are_those_of_a_command_with_the_values_that_it_gives(options):
    words = shlex.split(options)
    commands = list(leaves(cli, click.Context(cli, info_name="kvtiers")))
    # A mention of an option without its value, which parsing would miss, gets one.
    assert any(
        takes(command, context, words) or takes(command, context, [*words, "X"]) for command, context in commands
    ), f"{PROSE[options]} names `{options}`, which no command takes"


@pytest.mark.parametrize("line", RUN_TOO, ids=id_of)
def test_options_that_a_sentence_names_do_what_it_says(line, engine):
    succeeds(line, arguments_of(line))


def test_each_option_that_a_sentence_names_is_in_a_line_that_is_run():
    lines = [set(line.split()) for line in (*CASES, *RUN_TOO)]
    names = {options: {word for word in options.split() if word.startswith("--")} for options in PROSE}
    assert not [options for options, words in names.items() if not any(words <= line for line in lines)]


def test_the_command_lines_of_the_documents_are_found():
    assert {
        "kvtiers plan --trace trace.jsonl.gz --config tiers.yaml",
        "kvtiers warm --from fs --config tiers.yaml",
    } < set(CASES)
    assert {line.split()[1] for line in CASES} >= {*RUN, *TO_AN_ENGINE}
