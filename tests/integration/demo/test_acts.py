"""Each act runs alone, in seconds, and can fail: what breaks its promise is one line and exit status 1."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner
from demo import __main__ as demo
from demo.acts import ActError
from demo.acts.aside import Pace, judge
from demo.acts.pays import it_pays
from demo.acts.safe import flip_bits, it_is_safe
from demo.acts.shared import it_is_shared
from demo.machine import Process, children, holders, host_of, is_alive, wait_until
from demo.process import EngineError, EngineProcess
from demo.setting import Setting


class AltogetherBroken(Setting):
    """Its directory takes only what is asked for a second time: nothing, here."""

    def fs(self, folder="fs", **more):
        return super().fs(folder, **more, admission="second_access")


@pytest.fixture
def broken(setting):
    return AltogetherBroken.quick(setting.folder)


# -- the acts hold


@pytest.fixture
def rows(command):
    """Run one act alone; it must hold. Return the rows of its table that begin with one of these words."""

    def run(number, *words):
        done = command("--quick", "--act", str(number))
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert re.findall(r"^Act (\d)", done.stdout, re.MULTILINE) == [str(number)]
        assert len(re.findall(r"^  Holds: ", done.stdout, re.MULTILINE)) == 1
        assert "What to try next" in done.stdout
        return [line for line in done.stdout.splitlines() if line.startswith(tuple(f"  {word}" for word in words))]

    return run


def test_it_pays_with_every_tier_that_there_is(rows):
    missing = {"primary", "memory", "fs", "redis"}
    for _ in range(6):  # a busy machine drops writes to one of them, as it should
        found = [line for line in rows(1, "       ") if " again " in line]
        assert all(line.endswith("the same") for line in found)
        missing -= {tier for tier in missing if any(tier in line for line in found)}
        if not missing:
            break
    assert not missing, "nothing came from these; for redis: apt-get install redis-server"


def test_it_is_shared_both_ways(rows):
    found = rows(2, "first ", "second ")
    assert ["fs " in line for line in found] == [False, False, True, True, False, True]
    assert len({line.split()[1] for line in found}) == 2


def test_it_is_safe_and_has_its_control(rows):
    found = rows(3, "as stored", "bits flipped")
    assert [(" OFF " in line, line.endswith("DIFFERENT")) for line in found] == [
        (False, False), (False, False), (True, False), (True, True),
    ]  # fmt: skip


def test_it_stays_out_of_the_way_of_engines_that_are_killed_too(rows):
    found = rows(4, "host ", "asked again", "The engine is killed", "Restarted")
    assert len(found) == 5 + 1 + 2
    assert re.findall(r"\d+", found[5].partition("Left of it")[2]) == ["0"] * 4


# -- and can fail


@pytest.fixture
def shown(setting):
    """Run the command in this process with other acts; return its exit status and its lines."""

    def run(*acts, arguments=("--quick",)):
        others = [demo.Act(f"act {i}", "about", act) for i, act in enumerate(acts)]
        done = CliRunner().invoke(demo.main, [*arguments, "--folder", str(setting.folder / "shown")], obj=others)
        return done.exit_code, done.output.splitlines()

    return run


def test_a_demo_leaves_the_process_its_handler_of_sigterm(shown):
    before = signal.getsignal(signal.SIGTERM)
    assert shown(lambda _: "all is well")[0] == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_report_page_comes_last_and_can_fail(shown, tmp_path):
    status, lines = shown(lambda _: "all is well", arguments=("--quick", "--report", str(tmp_path / "page.html")))
    assert status == 0, lines
    assert any("all bytes are right" in line and (tmp_path / "page.html").as_uri() in line for line in lines)
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!")


def test_a_report_page_that_cannot_be_written_is_a_failure(shown, tmp_path):
    status, lines = shown(
        lambda _: "all is well", arguments=("--quick", "--report", str(tmp_path / "no" / "page.html"))
    )
    assert status == 1
    assert lines[-1].startswith("Failed: the report.")


def test_an_act_that_fails_is_one_line_and_exit_status_1_and_the_others_go_on(shown):
    def fails(_setting):
        raise ActError("the sky fell")

    status, lines = shown(fails, lambda _setting: "all is well", fails)
    assert status == 1
    assert [line for line in lines if "FAILED" in line] == ["  FAILED: the sky fell"] * 2
    assert len([line for line in lines if "Holds: all is well" in line]) == 1
    assert lines[-1].startswith("Failed: act 1, act 3.")


def test_the_third_act_fails_where_the_check_is_off(shown):
    status, lines = shown(partial(it_is_safe, check_seals=False))
    assert status == 1
    assert "  FAILED: damaged values changed the tokens" in lines


def test_the_first_act_fails_where_known_documents_are_not_answered_faster(setting):
    with pytest.raises(ActError, match=r"times as fast, expected 10000$"):
        it_pays(replace(setting, least_gain=10_000.0))


def test_the_second_act_fails_where_nothing_is_shared(broken):
    with pytest.raises(ActError, match="document 1: 0 tokens came from the directory, expected 512"):
        it_is_shared(broken)


@pytest.mark.parametrize(("slow", "holds"), [(0.055, True), (0.080, False)])
def test_the_fourth_act_fails_where_steps_take_longer_with_tiers(slow, holds):
    without = [0.020] * 490 + [0.030] * 10
    pace = Pace(without, [0.020] * 490 + [slow] * 10)
    if holds:
        assert judge(pace, 2.0) == "99 of 100 steps took 55 ms at most, 30 ms without tiers"
    else:
        with pytest.raises(ActError, match="80 ms at most, 30 ms without tiers; expected 70 ms"):
            judge(pace, 2.0)


def test_a_folder_that_cannot_be_used_is_a_failed_act(command, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "act2").write_text("in the way")
    done = command("--quick", "--act", "2", "--folder", str(tmp_path / "full"))
    assert done.returncode == 1
    assert len(re.findall(r"^  FAILED: .*act2", done.stdout, re.MULTILINE)) == 1
    assert "Traceback" not in done.stderr


def test_an_engine_that_does_not_start_says_why(setting):
    config = setting.config({"type": "fs", "path": "relative", "capacity": "1GiB"}, documents=2)
    with pytest.raises(EngineError, match="path"):
        EngineProcess(setting.folder, "lost", setting.engine(config))


# -- what the acts look at


def test_flipped_bits_are_one_in_each_page_of_each_value(tmp_path):
    (tmp_path / "shard").mkdir()
    (tmp_path / ".usage").write_bytes(bytes(100))
    for name in ("one", "other"):
        (tmp_path / "shard" / name).write_bytes(bytes(3 * 4096))
    assert flip_bits(tmp_path) == 2
    assert (tmp_path / ".usage").read_bytes() == bytes(100)
    for name in ("one", "other"):
        content = (tmp_path / "shard" / name).read_bytes()
        assert [sum(map(int.bit_count, content[at : at + 4096])) for at in range(0, len(content), 4096)] == [1, 1, 1]


def test_whatever_is_left_of_an_engine_is_seen(tmp_path):
    code = (
        "import os, subprocess, sys; os.memfd_create('kvtiers-some-id');"
        "subprocess.Popen([sys.executable, '-c', 'input()', 'fs'], stdout=subprocess.DEVNULL);"
        "print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        try:
            parent.stdout.readline()
            assert wait_until(lambda: host_of(parent.pid, "fs") is not None, 60)
            assert holders("some-id") == [parent.pid]
            host = host_of(parent.pid, "fs")
            assert host in children(parent.pid)
            assert host in children(os.getpid())
            assert is_alive(host)
            assert not is_alive(Process(host.pid, host.started + 1, host.name)), "a later process of the same id"
            (here,) = [process for process in children(os.getpid()) if process.pid == parent.pid]
        finally:
            parent.kill()
            parent.stdin.close()
        assert wait_until(lambda: not is_alive(here), 60), "it has ended, though it was never waited for"
        parent.wait()
        assert wait_until(lambda: not is_alive(host), 60)
        assert holders("some-id") == []


def test_a_killed_demo_leaves_no_engine(setting):
    code = (
        "import sys, pathlib; sys.path.append(sys.argv[1]); from demo.setting import Setting;"
        "from demo.process import EngineProcess; setting = Setting.quick(pathlib.Path(sys.argv[2]));"
        "engine = EngineProcess(setting.folder, 'engine', setting.engine(setting.config(setting.fs(), documents=2)));"
        "print(flush=True); input()"
    )
    examples = str(demo.Path(demo.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", code, examples, str(setting.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        parent.stdout.readline()
        left = children(parent.pid)
        assert len(left) >= 2  # the engine and its tier's host
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not any(map(is_alive, left)), 60)


def test_a_demo_that_is_ended_leaves_no_file_and_no_engine(tmp_path):
    examples = demo.Path(demo.__file__).parents[1]
    surroundings = {**os.environ, "PYTHONPATH": str(examples), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "demo", "--quick", "--act", "1"], env=surroundings, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert any("Act 1" in line for line in parent.stdout)
        assert list(tmp_path.glob("kvtiers-demo-*"))
        parent.terminate()
        parent.communicate(timeout=500)
    assert parent.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
