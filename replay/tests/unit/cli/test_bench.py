"""``kvtiers bench``: every installed type through the client, what is printed, and what is refused."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from kvtiers_replay.bench import Case, Figures, advise

PAGE = Path(__file__).parents[4] / "docs/which-store.md"

QUICK = ("--sizes", "64KiB,256KiB", "--batches", "1,3", "--threads", "2", "--processes", "1", "--bytes", "1MiB")
QUICK += ("--seconds", "0.02")


def test_a_memory_tier_is_measured_by_size_batch_and_threads_beside_the_machine(run, tmp_path):
    data = json.loads(run("bench", "memory", "--set", "io=thread", *QUICK, "--json", "--plot", "page.html").stdout)
    assert data["limits"]["memory_copy"] > 1e8
    assert data["limits"]["disk_read"] is None
    (tier,) = data["tiers"].values()
    assert [each["case"]["value_bytes"] >> 10 for each in tier["by_size"]] == [64, 256]
    assert [each["case"]["batch"] for each in tier["by_batch"]] == [1, 3]
    assert [each["case"]["threads"] for each in tier["by_threads"]] == [2]
    assert tier["by_processes"] == []
    for each in tier["by_size"]:
        assert each["write"] > 0
        assert each["hot"] > 0
        assert each["cold"] is None  # its values end with its client
        assert 0 < each["hot_seconds"][0] <= each["hot_seconds"][1]
    assert tier["advice"]["value_bytes"] in (64 << 10, 256 << 10)
    assert (tmp_path / "page.html").read_text().count("<svg") == 2


def test_a_directory_is_read_cold_too_compared_in_turns_and_left_without_values(run, tmp_path):
    for name in ("one", "two"):
        tier = f"{{type: fs, io: thread, path: {tmp_path}/{name}, capacity: 64MiB}}"
        (tmp_path / f"{name}.yaml").write_text(f"version: 1\nprimary: {{capacity: 1MiB}}\nsecondary: [{tier}]\n")
    result = run("bench", "--compare", "one.yaml", "two.yaml", *QUICK)
    assert result.exit_code == 0, result.output
    assert "disk, reading past the page cache" in result.stdout
    assert "Side by side, in turns" in result.stdout
    assert "one: fs" in result.stdout
    assert "two: fs: cold GB/s" in result.stdout
    left = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 32 << 10  # records of fingerprints
    assert all("kvtiers-bench" in path.parts for path in left if "_layout" in path.parts)


@pytest.mark.parametrize("sizes", ["8MiB", "2MiB,8MiB"])
def test_no_case_moves_more_than_the_bytes_that_are_given_whatever_its_batch(run, tmp_path, sizes):
    tier = ("fs", "--set", f"path={tmp_path}/fs", "--set", "io=thread")
    options = ("--sizes", sizes, "--batches", "16", "--threads", "2", "--processes", "1", "--bytes", "16MiB")
    result = run("bench", *tier, *options, "--json")
    assert result.exit_code == 0, result.output
    for each in json.loads(result.stdout)["tiers"]["fs"]["by_size"]:
        size = each["case"]["value_bytes"]
        assert each["case"]["batch"] == 16 * 2**20 // size  # what is printed is what was measured
        assert each["values"] * size <= (16 << 20) + max(4 << 20, size)  # and a quarter, or one value, alone


def test_a_size_of_which_the_capacity_holds_no_four_is_said_and_not_called_lost(run, tmp_path):
    tier = ("fs", "--set", f"path={tmp_path}/fs", "--set", "capacity=24MiB", "--set", "io=thread")
    options = ("--sizes", "1MiB,8MiB", "--batches", "16", "--threads", "2", "--processes", "1", "--seconds", "0.02")
    result = run("bench", *tier, *options)
    assert result.exit_code == 0, result.output
    assert "Not measured: fs: values of 8MiB, 1 at a time, threads: " in result.stdout
    assert ": a capacity of 24MiB is less than 4 of them" in result.stdout


def documented_commands():
    """Return the arguments of each command of the page, and of the first one with the options that its text names."""
    text = PAGE.read_text(encoding="utf-8")
    commands = [shlex.split(line, comments=True)[2:] for line in re.findall(r"^kvtiers bench .*", text, re.MULTILINE)]
    (quicker,) = re.findall(r"`(--bytes [^`]+)`", text)
    assert len(commands) == 3
    return [*commands, [*commands[0][:3], *shlex.split(quicker)]]


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.is_file(), reason="the page is not beside an installed distribution")
@pytest.mark.parametrize("number", range(4))
def test_the_commands_of_the_page_work_as_they_are_printed(run, tmp_path, number):
    model = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 16, "num_key_value_heads": 8,
             "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    for name in ("nvme", "network"):
        tier = f"{{type: fs, io: thread, path: {tmp_path}/{name}, capacity: 256MiB}}"
        (tmp_path / f"{name}.yaml").write_text(f"version: 1\nprimary: {{capacity: 1MiB}}\nsecondary: [{tier}]\n")
    arguments = [argument.replace("/mnt/nvme", str(tmp_path)) for argument in documented_commands()[number]]
    arguments = [argument.replace("redis://cache:6379", "redis://127.0.0.1:1") for argument in arguments]
    given = set(arguments)
    # Small: what a command does not name itself is set to little.
    little = {"--batches": "16", "--threads": "2", "--processes": "1", "--seconds": "0.02", "--bytes": "8MiB"}
    more = [word for option, value in little.items() if option not in given for word in (option, value)]
    more += ["--set", "io=thread"] if "--set" in given else []
    result = run("bench", *arguments, *more)
    if "redis" in given:  # the options are right, and no server is there
        assert result.exit_code == 2
        assert "127.0.0.1:1" in result.output
        assert "No such option" not in result.output
    else:
        assert result.exit_code == 0, result.output
        assert "what suits is" in result.stdout
    assert ("--plot" not in given or "redis" in given) or (tmp_path / arguments[-1]).is_file()


def test_a_third_partys_store_and_a_tier_of_the_third_rung_are_measured(run, store):
    mine = store()
    result = run("bench", mine, "--set", "io=thread", *QUICK)
    assert result.exit_code == 0, result.output
    assert f"{mine}: what suits is values of " in result.stdout
    third = run("bench", "memory-async", "--set", "max_blocks=64", *QUICK, "--json")
    assert "memory-async: it moves rows by itself" in third.stderr
    (tier,) = json.loads(third.stdout)["tiers"].values()
    assert tier["by_threads"] == []


def test_with_a_model_sizes_are_those_of_its_chunks(run, tmp_path):
    config = {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--model", "config.json", "--kv-dtype", "fp8", "--batches", "2", "--threads", "2", "--bytes", "1MiB")
    data = json.loads(run("bench", "memory", "--set", "io=thread", *options, "--seconds", "0.01", "--json").stdout)
    (tier,) = data["tiers"].values()
    sizes = [each["case"]["value_bytes"] for each in tier["by_size"]]
    assert sizes == [65_536 << power for power in range(5)]  # 16 tokens of 4 KiB a block
    assert tier["advice"]["blocks_per_chunk"] == tier["advice"]["value_bytes"] // 65_536


def test_a_size_that_a_tier_does_not_take_is_said_and_the_others_are_measured_and_compared(run, store, tmp_path):
    small = store("""
def write(self, name, src):
    if len(src) > 100_000:
        raise NotKept("too large", full=False)
    super().write(name, src)
""")
    for name, tier in (("all", "memory, capacity: 64MiB"), ("some", small)):
        text = f"version: 1\nprimary: {{capacity: 1MiB}}\nsecondary: [{{type: {tier}, io: thread}}]\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    result = run("bench", "--compare", "some.yaml", "all.yaml", *QUICK, "--plot", "page.html")
    assert result.exit_code == 0, result.output
    case = rf"some: {small}: values of 256KiB, 3 at a time, threads: \d+"
    assert re.search(f"Not measured: {case}: 1 of 1 values were not stored", result.stdout)
    assert f"some: {small}: what suits is values of 64KiB" in result.stdout
    side_by_side = result.stdout.partition("Side by side")[2].splitlines()
    (row,) = [line.split() for line in side_by_side if line.split()[:1] == ["256KiB"]]
    assert row[1] == "-"  # written; of the other one there is a figure
    assert float(row[2]) >= 0
    assert "Not measured: some" in (tmp_path / "page.html").read_text()


def test_a_tier_that_takes_no_size_is_named_though_another_one_takes_no_small_one(run, store, tmp_path):
    nothing, large = (
        store(f"def write(self, name, src):\n    if {what}: raise NotKept('no')\n    super().write(name, src)")
        for what in ("True", "len(src) < 100_000")
    )
    for name, tier in (("nothing", nothing), ("large", large)):
        text = f"version: 1\nprimary: {{capacity: 1MiB}}\nsecondary: [{{type: {tier}, io: thread}}]\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    result = run("bench", "--compare", "nothing.yaml", "large.yaml", *QUICK)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: nothing: {nothing}: values of 64KiB")


def test_a_slab_is_measured_at_every_size_though_its_segments_are_made_for_one(run, tmp_path):
    options = (
        "--set",
        f"path={tmp_path}/slab",
        "--set",
        "layout=slab",
        "--set",
        "capacity=256MiB",
        "--set",
        "io=thread",
    )
    sizes = ("--sizes", "64KiB,20MiB", "--batches", "1", "--threads", "2", "--bytes", "20MiB", "--seconds", "0.02")
    data = json.loads(run("bench", "fs", *options, *sizes, "--json").stdout)
    assert data["not_stored"] == {}
    assert [each["case"]["value_bytes"] for each in data["tiers"]["fs"]["by_size"]] == [64 << 10, 20 << 20]


@pytest.mark.parametrize("load", [0.5, 19.0])
def test_a_busy_machine_is_said_beside_what_suits(run, monkeypatch, load):
    monkeypatch.setattr("os.getloadavg", lambda: (load * len(os.sched_getaffinity(0)), 0.0, 0.0))
    result = run("bench", "memory", "--set", "io=thread", *QUICK)
    assert ("This machine was busy before" in result.stdout) == (load > 0.5)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def write(self, *_): raise NotKept('no room here', full=False)", "were not stored"),
        (
            "def read_into(self, name, view): return 0",
            "that were stored were not found again, of 1.8MiB in all; has the tier room",
        ),
    ],
)
def test_a_tier_that_does_not_give_back_what_it_took_is_an_error_of_one_line(run, store, body, said):
    # All of its bytes are written, however long a busy machine takes for them.
    result = run("bench", store(body), "--set", "io=thread", *QUICK, "--seconds", "60")
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("memory", "fs"), "give one TYPE or file, or --compare and several"),
        (("--compare", "memory"), "give one TYPE or file, or --compare and several"),
        (("memory", "--set", "capacity"), "expected NAME=VALUE"),
        (("memory", "--threads", "0"), "numbers from 1 to 256"),
        (("memroy",), "memory"),
        (("a.yaml", "--set", "a=1"), "--set is for a TYPE"),
        (("read.yaml",), "memory is read_only, and a benchmark writes"),
        (("none.yaml",), "there is no tier below 'secondary'"),
        (("--compare", "memory", "memory"), "'memory' is measured twice"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(run, tmp_path, arguments, said):
    head = "version: 1\nprimary: {capacity: 1MiB}\nsecondary: "
    (tmp_path / "read.yaml").write_text(f"{head}[{{type: memory, capacity: 1MiB, read_only: true}}]\n")
    (tmp_path / "none.yaml").write_text(f"{head}[]\n")
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_the_least_that_is_nearly_as_fast_as_the_best_is_advised():
    def figures(value=1, batch=1, threads=1, processes=1, rate=1.0):
        return Figures(Case(value, batch, threads, processes), 1, rate, rate, rate, (0, 0), (0, 0), 0)

    sizes = [figures(value=size, rate=rate) for size, rate in ((1, 0.5), (2, 0.95), (4, 1.0))]
    threads = [figures(threads=count, rate=rate) for count, rate in ((1, 0.89), (4, 0.91), (16, 1.0))]
    advice = advise(sizes, [], threads, [], {1: 10, 2: 20, 4: 40})
    assert (advice.value_bytes, advice.blocks_per_chunk, advice.threads, advice.processes) == (2, 20, 4, None)
