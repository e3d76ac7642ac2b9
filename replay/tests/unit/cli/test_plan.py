"""``kvtiers plan``: what is printed, drawn and returned, how it is stopped, and what is refused."""

import contextlib
import json
import os
import random
import re
import select
import signal
import subprocess
from pathlib import Path

import pytest
from tests.unit.cli.conftest import KVTIERS

LLAMA_31_8B = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def warnings(result):
    """Return the lines on stderr that are no progress, which a busy machine takes long enough to show."""
    return [line for line in result.stderr.splitlines() if not re.match(r"\d+ cases\b", line)]


def trace_lines(requests: int) -> str:
    """Talks that go on, as a Mooncake trace."""
    chance = random.Random(4)
    talks: list[list[int]] = [[-number] for number in range(1, 9)]
    lines = []
    for number in range(requests):
        talk = chance.choice(talks)
        talk += [100 * number + turn for turn in range(chance.randrange(1, 5))]
        del talk[40:]
        tokens = len(talk) * 512 + 9
        lines.append(json.dumps({"timestamp": number, "input_length": tokens, "hash_ids": [*talk, "rest"]}) + "\n")
    return "".join(lines)


@pytest.fixture
def trace(tmp_path) -> str:
    (tmp_path / "trace.jsonl").write_text(trace_lines(120))
    return "trace.jsonl"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_table_has_a_line_for_each_combination(run, trace):
    result = run("plan", "--trace", trace, "--primary", "20%,100%", "--secondary", "0,unlimited", "--policy", "lru,arc")
    assert (result.exit_code, warnings(result)) == (0, [])
    heading, *table = result.stdout.splitlines()
    assert heading.startswith("trace.jsonl: 120 requests, ")
    assert "full blocks of 512 tokens" in heading
    infinite = heading.split()[-2]
    assert cells(table[0])[:5] == ["policy", "primary", "secondary", "hits", "from primary"]
    rows = [cells(line) for line in table[1 : table.index("")]]
    assert len(rows) == 8
    assert [row[0] for row in rows] == ["lru"] * 4 + ["arc"] * 4
    for row in rows:
        enough = row[1].startswith("100 %") or row[2] == "unlimited"
        assert (row[3] == f"{infinite} %") == enough, row


def test_each_case_has_a_bar_as_long_as_its_share_of_what_an_infinite_cache_hits(run, trace):
    result = run("plan", "--trace", trace, "--primary", "5%,20%,100%", "--secondary", "0,50%", "--policy", "lru")
    _, _, bars = result.stdout.partition("Hit rate by primary; the whole width is an infinite cache, ")
    infinite, *lines = bars.splitlines()
    rates = [float(line.split()[-2]) for line in lines]
    assert len(rates) == 6
    assert len(set(rates)) > 3
    for line, rate in zip(lines, rates, strict=True):
        assert line.count("━") + line.count("╸") / 2 == pytest.approx(48 * rate / float(infinite.split()[0]), abs=1)


def test_where_a_terminal_writes_ascii_alone_so_are_the_bars(tmp_path, trace):
    done = subprocess.run(
        [str(KVTIERS), "plan", "--trace", trace, "--primary", "50%"],
        cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"----" in done.stdout
    assert done.stdout.isascii()


def test_a_config_gives_tiers_sizes_and_policy_and_opens_nothing(run, trace, config, tmp_path):
    disk = f"{{type: fs, path: {tmp_path / 'none'}, capacity: 1GiB}}"
    file = config("{type: memory, name: near, capacity: 256MiB}", disk, capacity="128MiB")
    result = run("plan", "--trace", trace, "--config", file, "--bytes-per-token", "1KiB", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["bytes_per_chunk"] == 512 * 1024 + 4096
    assert {tuple(point["secondary"]) for point in data["points"]} == {("near", "fs")}
    # 254 values of 516 KiB fit into 128 MiB
    assert 254 in {point["primary"]["chunks"] for point in data["points"]}
    assert not (tmp_path / "none").exists()


def test_tenants_of_a_config_have_their_shares(run, trace, config, tmp_path):
    lines = (tmp_path / trace).read_text().splitlines()
    whose = [line.replace("{", '{"tenant": "blue", ', 1) if number % 2 else line for number, line in enumerate(lines)]
    (tmp_path / trace).write_text("\n".join(whose) + "\n")
    file = config(more="tenants: {named: {blue: {share: 60%}, red: {share: 10%}}}\n")
    result = run("plan", "--trace", trace, "--config", file, "--bytes-per-token", "1KiB", "--primary", "20%")
    assert (result.exit_code, warnings(result)) == (0, [])
    assert "hits of blue" in cells(result.stdout.splitlines()[1])
    assert "tenants: the trace has no request of red, " in result.stdout


@pytest.mark.parametrize("whom", ["blue", '"*"'])
def test_tenants_of_a_config_have_their_quotas(run, trace, config, tmp_path, whom):
    lines = (tmp_path / trace).read_text().splitlines()
    whose = [line.replace("{", '{"tenant": "blue", ', 1) if number % 2 else line for number, line in enumerate(lines)]
    (tmp_path / trace).write_text("\n".join(whose) + "\n")

    def hits(quotas):
        file = config(f"{{type: memory, capacity: 1GiB{quotas}}}", more="tenants: {}\n")
        result = run(
            "plan", "--trace", trace, "--config", file, "--bytes-per-token", "1KiB", "--primary", "5%", "--json"
        )
        assert (result.exit_code, warnings(result)) == (0, [])
        (point, *_) = json.loads(result.stdout)["points"]
        return point["tenants"]["blue"]["hits"], sum(point["hits"].values())

    (of_blue, of_all), (bounded, of_all_then) = hits(""), hits(f", quotas: {{{whom}: 8MiB}}")
    assert bounded < of_blue
    assert of_all_then - bounded == of_all - of_blue, "the others have no quota"


def test_where_no_value_has_a_size_quotas_are_left_out_and_one_line_says_so(run, trace, config):
    file = config("{type: memory, capacity: 1GiB, quotas: {blue: 8MiB}}", more="tenants: {}\n")
    arguments = ["plan", "--trace", trace, "--config", file, "--primary", "10%", "--secondary", "50%"]
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[0] == (
        "plan: the quotas of memory are left out: give --model or --bytes-per-token to have them simulated"
    )
    assert "plan: " not in run(*arguments, "--bytes-per-token", "1KiB").stderr


def test_json_adds_up(run, trace):
    result = run("plan", "--trace", trace, "--primary", "10%", "--secondary", "50%", "--json", "--wish", "5%")
    data = json.loads(result.stdout)
    (point,) = data["points"]
    assert point["hit_rate"] == pytest.approx(sum(point["hits"].values()) / data["references"])
    assert set(point["hits"]) == {"primary", "secondary"}
    assert point["primary"] == {"chunks": data["unique_chunks"] // 10, "bytes": None}
    assert (
        point["promoted"]["secondary"]["chunks"]
        == point["hits"]["secondary"]
        > 0
        < point["written"]["secondary"]["chunks"]
    )
    assert data["wish"] == 0.05
    assert data["smallest"][0]["hit_rate"] >= 0.05
    assert data["interrupted"] is False


def test_a_models_config_gives_the_bytes_of_a_token(run, trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    result = run("plan", "--trace", trace, "--model", "config.json", "--tp", "2", "--kv-dtype", "fp8",
                 "--primary", "1GiB", "--json")  # fmt: skip
    data = json.loads(result.stdout)
    assert data["bytes_per_chunk"] == 512 * 64 * 1024 + 4096
    assert data["points"][0]["primary"]["chunks"] == (1 << 30) // data["bytes_per_chunk"]


def test_what_was_guessed_about_a_models_shape_is_said_on_stderr(run, trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B | {"model_type": "new"}))
    result = run("plan", "--trace", trace, "--model", "config.json", "--primary", "1GiB", "--policy", "lru")
    assert result.exit_code == 0
    assert result.stderr.startswith("config.json: model_type 'new' is not known here: taken as plain attention")


def test_sizes_in_bytes_without_a_model_are_those_of_a_usual_one_and_one_line_says_so(run, trace, config):
    """As the README and the demo print it, with capacities in bytes."""
    file = config("{type: memory, capacity: 20GiB}", capacity="1GiB")
    result = run("plan", "--trace", trace, "--config", file, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[0] == (
        "plan: sizes in bytes are taken as KV of Llama 3.1 8B (no --model given), 128KiB a token: give --model "
        "config.json or --bytes-per-token"
    )
    data = json.loads(result.stdout)
    assert data["bytes_per_chunk"] == 512 * 128 * 1024 + 4096
    assert (1 << 30) // data["bytes_per_chunk"] in [point["primary"]["chunks"] for point in data["points"]]


def test_a_wish_is_answered_with_the_smallest_sizes(run, trace):
    result = run("plan", "--trace", trace, "--primary", "50%,100%", "--wish", "60%")
    assert result.exit_code == 0
    _, _, answer = result.stdout.partition("The smallest primary that reaches 60.0 %")
    row = cells(answer.splitlines()[2])
    assert float(row[1].split()[0]) < 50
    assert float(row[2].split()[0]) >= 60


def test_whether_turn_hazard_would_pay_is_said_where_the_primary_is_scarce_with_points_and_gpu_seconds(run, trace):
    arguments = ["plan", "--trace", trace, "--primary", "2%,10%,100%", "--prefill-speed", "5000"]
    line = run(*arguments).stdout.splitlines()[-1]
    data = json.loads(run(*arguments, "--json").stdout)
    assert [round(change["primary"]["chunks"] / data["unique_chunks"], 2) for change in data["other_policy"]] == [
        0.02,
        0.1,
    ]
    for change in data["other_policy"]:
        assert (change["policy"], change["instead_of"]) == ("turn-hazard", "lru")
        tokens = change["points"] / 100 * data["references"] * 512
        assert change["gpu_seconds"] == pytest.approx(tokens / 5000)
    best = max(data["other_policy"], key=lambda change: change["points"])
    if best["points"] < 0.3:
        assert line == f"'primary.eviction: turn-hazard' would not pay: {best['points']:+.1f} points over lru at best."
    else:
        assert line.startswith(
            "'primary.eviction: turn-hazard' instead of lru, in points of hits by the primary's share of all different "
            "chunks: "
        )
        assert line.endswith(
            f"At best {best['gpu_seconds']:,.0f} GPU seconds of prefill over this trace, at 5,000 tokens/s."
        )
    plenty = run("plan", "--trace", trace, "--primary", "100%").stdout
    assert "turn-hazard" not in plenty


@pytest.mark.parametrize(
    ("wish", "text"),
    [("60%", "No case reaches 60.0 %."), ("99.9%", "No case reaches 99.9 %; an infinite cache hits ")],
)
def test_a_wish_that_nothing_reaches_is_said_and_is_status_1(run, trace, wish, text):
    result = run("plan", "--trace", trace, "--primary", "1%", "--wish", wish)
    assert result.exit_code == 1
    assert text in result.stdout


@pytest.mark.parametrize("name", ["out.svg", "out.html"])
def test_the_result_is_drawn_where_asked(run, trace, tmp_path, name):
    result = run("plan", "--trace", trace, "--primary", "5%,20%,80%", "--secondary", "0,50%", "--plot", name)
    assert result.exit_code == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    # A line, and a dot for each size.
    assert text.count('<g class="mark">') == (1 + 3) * (2 + 3 + 1)


def test_only_the_wanted_requests_are_read(run, trace):
    result = run("plan", "--trace", trace, "--requests", "7", "--primary", "100%", "--json")
    assert json.loads(result.stdout)["requests"] == 7


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--primary", "5%,,"], "expected values with commas between them, got '5%,,'"),
        (["--primary", "five"], "error: --primary: expected a size such as '64GiB', got 'five'; or a share"),
        (["--primary", "1MiB"], "error: --primary: 1MiB does not hold one chunk of 64MiB"),
        (["--secondary", "disk=5%"], "error: --secondary: no tier is called 'disk'. Tiers: secondary."),
        (["--secondary", "5%", "--secondary", "7%"], "the sizes of 'the first tier' are given twice"),
        (["--secondary", "=5%"], "expected NAME=SIZES or SIZES, got '=5%'"),
        (["--policy", "fifo"], "error: unknown eviction policy 'fifo'. Eviction policies: arc, lru, turn-hazard."),
        (["--wish", "35"], "expected a hit rate such as '35%', got '35'"),
        (["--wish", "0%"], "expected a hit rate such as '35%', got '0%'"),
        (["--wish", "nan%"], "expected a hit rate such as '35%', got 'nan%'"),
        (["--bytes-per-token", "0"], "expected more than 0, got '0'"),
        (["--bytes-per-token", "1KiB", "--model", "x"], "--model and --bytes-per-token exclude each other"),
        (["--model", "absent.json"], "error: absent.json: cannot read: No such file or directory; expected a model's"),
        (["--config", "absent.yaml"], "error: absent.yaml: "),
        (["--trace", "absent.jsonl"], "error: absent.jsonl: cannot read the trace: No such file or directory"),
        (["--plot", "out.png"], "expected a name that ends in .svg or .html, got 'out.png'"),
        (["--plot", "absent/out.svg"], "'absent/out.svg' cannot be written: there is no such folder"),
        (["--processes", "0"], "0 is not in the range"),
    ],
)
def test_what_is_wrong_is_one_clear_line(run, trace, arguments, text):
    result = run("plan", "--trace", trace, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr.splitlines()[-1]


def test_a_wrong_chart_fails_before_the_work(run):
    result = run("plan", "--trace", "absent", "--plot", "out.png")
    assert "expected a name that ends in" in result.stderr


def with_children(parent: int) -> list[int]:
    """Return the ids of a process and of all that it has started."""
    found = [parent]
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_prints_what_was_found_and_leaves_no_process(tmp_path, processes):
    # Far more than can be done while the test runs; each case is small, so that the first is soon there.
    (tmp_path / "trace.jsonl").write_text(trace_lines(3000))
    sizes = ",".join(f"{number / 20}%" for number in range(1, 1900))
    command = [KVTIERS, "plan", "--trace", "trace.jsonl", "--primary", sizes, "--processes", processes]
    # A session of its own: Ctrl-C reaches a terminal's group, and so does this. The workers are not in it: they end
    # when the command says so.
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        for line in running.stderr:  # one every few seconds, the first perhaps before the first case is done
            assert re.match(r"\d+ cases: \d+ %", line), line
            if "%, best so far " in line:
                break
        ends = [os.pidfd_open(pid) for pid in with_children(running.pid)]
        assert len(ends) >= {"1": 1, "2": 3}[processes]
        os.killpg(running.pid, signal.SIGINT)
        stdout, stderr = running.communicate(timeout=500)
        assert running.returncode == 130
    assert "Traceback" not in stderr
    assert "Stopped after " in stdout
    for end in ends:
        assert select.select([end], [], [], 60)[0], "a process outlives the command"
        os.close(end)


def test_the_help_has_examples_and_exit_statuses(run):
    result = run("plan", "--help")
    assert result.exit_code == 0
    assert "  kvtiers plan --trace trace.jsonl.gz\n" in result.output
    assert "Exit status:" in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_the_installed_command_lists_it(process):
    assert "\n  plan " in process("--help").stdout
