"""``kvtiers check``: every tier is tried, and what it gets wrong is a line with a fix."""

# ruff: noqa: E501 -- a row of these tables is a mistake and its line, side by side

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROBED = "wrote, read back, compared and deleted 2MiB"


def errors(result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.split()[:1] == ["error"]]


def test_a_config_and_tiers_that_are_right_are_ok(run, config, store):
    result = run("check", config(f"{{type: {store()}}}", f"{{type: {store()}, name: other}}"))
    assert result.exit_code == 0, result.output
    assert errors(result) == []
    assert result.stdout.count(PROBED) == 2
    assert "valid: primary of 1MiB, secondary tiers: dict" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("tiers.yaml: no errors, ")


def test_the_example_tiers_pass(run, config):
    result = run("check", config("{type: memory, capacity: 64MiB}", "{type: memory-async, max_blocks: 4}"))
    assert result.exit_code == 0, result.output
    assert PROBED in result.stdout
    assert "stored, loaded and compared 2MiB" in result.stdout


def test_a_tier_without_room_for_a_value_is_an_error(run, config):
    result = run("check", config("{type: memory, capacity: 1MiB}", "{type: memory-async, max_blocks: 4}"))
    assert result.exit_code == 1
    (line,) = errors(result)
    assert "tier memory" in line
    assert "capacity" in line
    assert "stored, loaded and compared" in result.stdout


def test_the_probe_value_has_the_given_size_and_is_gone_afterwards(run, config, store, tmp_path):
    name = store(
        body=f"""
def write(self, name, src):
    Path("{tmp_path}/log").write_text(f"write {{name}} {{len(src)}} {{src.readonly}}")
    super().write(name, src)
def close(self):
    Path("{tmp_path}/left").write_text(str(list(self.values)))
""",
    )
    assert run("check", config(f"{{type: {name}}}"), "--value-bytes", "64KiB").exit_code == 0
    written = (tmp_path / "log").read_text()
    assert written.startswith("write _check/")
    assert written.endswith(" 65536 True")
    assert (tmp_path / "left").read_text() == "[]"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def read_into(self, name, dst): return len(dst)", "the value read back is not the value written"),
        ("def read_into(self, name, dst): return 0", "the value just written cannot be read back: absent, or of another length. Fix: see whether something else writes"),
        ("def read_into(self, name, dst): pass", "Mine.read_into answered None for a value; expected its length"),
        ("def exists(self, names): return [True for _ in names]", "gave [True, True], expected [True, False]"),
        ("def exists(self, names): return [False for _ in names]", "gave [False, False], expected [True, False]"),
        ("def exists(self, names): return []", "gave [], expected [True, False]"),
        ("def delete(self, names): pass", "exists() of the deleted probe value gave [True], expected [False]"),
        ("def write(self, name, src): raise NotKept('0 bytes left')", "the store is full: 0 bytes left"),
        ("def write(self, name, src): raise NotKept('the disk is read-only', full=False)", "takes no values: the disk is read-"),
        ("def write(self, name, src): raise OSError('disk on fire')", "failed while writing the probe value: disk on fire (OSError)"),
        ("def read_into(self, name, dst): raise ValueError('a\\nb')", "failed while reading the probe value back: a b (ValueError)"),
        ("def close(self): raise OSError('stuck')", "failed while being closed: stuck (OSError)"),
        ("def diagnose(self, value_bytes): raise OSError('no answer')", "failed while diagnosing its backend: no answer (OSError)"),
        ("def diagnose(self, n): return [Finding('error', f'{n} is too much', 'use less')]", "2097152 is too much. Fix: use less"),
    ],
)  # fmt: skip
def test_what_a_store_gets_wrong_is_one_line(run, config, store, body, said):
    result = run("check", config(f"{{type: {store(body)}}}"))
    assert result.exit_code == 1
    (line,) = errors(result)
    assert said in line
    assert ". Fix: " in line


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        ("raise ConnectionRefusedError('no server there')", "failed while being opened: no server there (ConnectionRefusedError)"),
        ("raise ConfigError(['this', 'that'])", "this. Fix: correct the tier's options"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("return object()", "open() returned a object, expected a ChunkStore"),
    ],
)  # fmt: skip
def test_a_tier_that_cannot_be_opened_is_an_error_and_the_others_are_still_tried(run, config, store, opened, said):
    result = run("check", config(f"{{type: {store(opened=opened)}}}", f"{{type: {store()}}}"))
    assert result.exit_code == 1
    assert said in errors(result)[0]
    assert PROBED in result.stdout


def test_a_store_that_finds_its_backend_well_says_so_and_a_warning_is_no_failure(run, config, store):
    name = store("def diagnose(self, n): return [Finding('ok', 'backend 7.2'), Finding('warning', 'no TLS', 'use it')]")
    result = run("check", config(f"{{type: {name}}}"))
    assert result.exit_code == 0
    assert "backend 7.2" in result.stdout
    assert "no TLS. Fix: use it" in result.stdout


def test_strictly_a_warning_is_a_failure(run, config, store):
    name = store("def diagnose(self, n): return [Finding('warning', 'no TLS', 'use it')]")
    assert run("check", "--strict", config(f"{{type: {name}}}")).exit_code == 1
    result = run("check", "--strict", "--json", config(f"{{type: {name}}}"))
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


def test_a_probe_value_is_deleted_also_when_it_came_back_wrong(run, config, store, tmp_path):
    name = store(
        f"""
def read_into(self, name, dst): return len(dst)
def close(self): Path("{tmp_path}/left").write_text(str(list(self.values)))
"""
    )
    assert run("check", config(f"{{type: {name}}}")).exit_code == 1
    assert (tmp_path / "left").read_text() == "[]"


READ_ONLY = """
def write(self, name, src): raise AssertionError("written")
def delete(self, names): raise AssertionError("deleted")
"""
LISTING = """
def list(self, prefix): return (StoreEntry(n, len(v)) for n, v in self.values.items() if n.startswith(prefix))
"""


@pytest.mark.parametrize(
    ("body", "values", "said"),
    [
        ("", "", "it cannot list its values, so none was read"),
        (LISTING, "", "warning .* it has no value under 'prod/'. Fix: "),
        (LISTING, "('other/a', b'x')", "warning .* it has no value under 'prod/'. Fix: "),
        (LISTING, "('prod/a', b'x' * 4096), ('prod/b', b'y')", "ok .* 2 values listed, one of 4KiB read in "),
        (LISTING, "('prod/a', b'x' * 8388608)", "warning .* 1 values listed, none read. Fix: pass --value-bytes 8388608"),
        (LISTING + "\ndef read_into(self, name, dst): return 0", "('prod/a', b'x')", "the first one gone before"),
    ],
)  # fmt: skip
def test_a_read_only_store_is_only_listed_and_read(run, config, store, body, values, said):
    name = store(READ_ONLY + body, opened=f"return Mine({values})")
    result = run("check", config(f"{{type: {name}, read_only: true}}", more="namespace: prod\n"))
    assert result.exit_code == 0, result.output
    assert re.search(said, result.stdout)


BATCH = """
batch_values = 2
def read_many_into(self, names, dsts): return [self.read_into(n, d) for n, [d] in zip(names, dsts)]
def write_many(self, names, srcs): raise AssertionError("written")
"""
PIECES = """
def reads_in_pieces(self, nbytes): return True
def read_pieces(self, name, nbytes):
    value = self.values.get(name)
    return None if value is None else [value[:1], value[1:]]
"""


@pytest.mark.parametrize("values", ["", "('prod/a', b'x' * 4096)"], ids=["empty", "a value"])
def test_every_ability_of_a_read_only_store_is_tried_and_nothing_is_written(run, config, store, values):
    name = store(READ_ONLY + LISTING + BATCH + PIECES, opened=f"return Mine({values})")
    result = run("check", config(f"{{type: {name}, read_only: true}}", more="namespace: prod\n"))
    assert result.exit_code == 0, result.output
    read = "read one and compared it"
    assert f"several values: {read if values else 'read none, as there are'}" in result.stdout
    assert f"values in pieces: {read if values else 'gives none of an absent value'}" in result.stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (BATCH + "\ndef read_many_into(self, names, dsts): return [4096, 4096]", "a value that was asked for is not there"),
        (BATCH + "\ndef read_many_into(self, names, dsts): raise OSError('no pipe')", "no pipe"),
        (BATCH + "\ndef read_many_into(self, names, dsts): [d], _ = dsts; d[:] = bytes(len(d)); return [len(d), 0]",
         "read_many_into() and read_into() of one value give different bytes"),
        (BATCH + "\nkept = []\ndef read_many_into(self, names, dsts): self.kept += dsts[0]; return [0, 0]", "kept the buffer"),
        (PIECES + "\ndef read_pieces(self, name, nbytes): return [b'x']", "gave pieces of a value that is not there"),
        (PIECES + "\ndef read_pieces(self, name, nbytes): return [b'y'] if name in self.values else None", "not the bytes of"),
        ("def list(self, prefix): return iter(['prod/a'])", "expected a StoreEntry"),
        ("def list(self, prefix): return (StoreEntry(n, len(v)) for n, v in [*self.values.items(), ('x', b'x')])", "yielded 'x'"),
        ("def exists(self, names): return [True] * len(names)", "exists() of a value that is not there"),
    ],
    ids=["batch of all", "batch raises", "batch of other bytes", "batch keeps", "pieces of none", "other pieces",
         "list of texts", "list of others", "exists"],
)  # fmt: skip
def test_an_ability_of_a_read_only_store_that_fails_is_an_error(run, config, store, body, said):
    name = store(READ_ONLY + LISTING + body, opened="return Mine(('prod/a', b'x' * 4096))")
    result = run("check", config(f"{{type: {name}, read_only: true}}", more="namespace: prod\n"))
    assert result.exit_code == 1, result.output
    assert said in errors(result)[0]


def test_a_read_only_store_that_fails_is_an_error(run, config, store):
    name = store(READ_ONLY + "def list(self, prefix): raise PermissionError('listing forbidden')")
    result = run("check", config(f"{{type: {name}, read_only: true}}"))
    assert result.exit_code == 1
    assert "failed while listing its values: listing forbidden (PermissionError)" in errors(result)[0]


def test_offline_opens_nothing_and_looks_at_no_machine(run, config, store):
    result = run("check", config(f"{{type: {store(opened='raise AssertionError')}}}", capacity="900PiB"), "--offline")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize("offline", [("--offline",), ()])
def test_a_capacity_whose_unit_was_forgotten_is_an_error(run, config, store, offline):
    tier = store(opened="raise AssertionError", options="capacity: Size = 2**30")
    result = run("check", config(f"{{type: {tier}, capacity: 500}}", capacity="64"), *offline)
    assert result.exit_code == 1
    found = [line for line in errors(result) if "did you mean" in line.lower()]
    assert "primary.capacity: 64B holds no chunk of any model. Did you mean 64GiB? Fix: " in found[0]
    assert "capacity: 500B holds no chunk of any model. Did you mean 500GiB?" in found[1]
    assert "write the unit" in found[0]


_STRANGER = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
# So that it can read the interpreter, whoever owns that.
_STRANGER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, and setpriv")
def test_a_user_id_without_a_name_a_home_and_a_temporary_folder_is_enough(tmp_path, config):
    tmp_path.chmod(0o755)
    nobody = {**os.environ, "TMPDIR": "/nonexistent"}
    for name in ("HOME", "USER", "LOGNAME"):
        nobody.pop(name, None)

    def check(file):
        command = [*_STRANGER, sys.executable, "-P", "-c", "from kvtiers.cli.main import main; main()", "check", file]
        return subprocess.run(command, cwd=tmp_path, env=nobody, check=False, capture_output=True, text=True)

    done = check(config("{type: memory, capacity: 64MiB, threads: 1}"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrote, read back, compared and deleted" in done.stdout
    done = check(config("{type: fs, path: ~/kv, capacity: 64MiB}"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "('~' is no folder here: the user has no home, and HOME is not set)" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_capacity_that_the_machine_has_not_is_an_error(run, config):
    result = run("check", config(capacity="900PiB"))
    assert result.exit_code == 1
    assert "900PiB of memory are wanted" in errors(result)[0]


def test_json_has_every_finding(run, config, store):
    name = store("def read_into(self, name, dst): return 0")
    result = run("check", config(f"{{type: {name}}}"), "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"], report["config"]) == (1, False, "tiers.yaml")
    assert {finding["about"] for finding in report["findings"]} == {"config", "machine", f"tier {name}"}
    (wrong,) = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert wrong["text"] == "the value just written cannot be read back: absent, or of another length"
    assert wrong["fix"]


def test_a_wrong_config_is_lines_with_status_2(run, config):
    result = run("check", config("{type: shlef}", "{typ: a}"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line.partition("]")[0] for line in result.stderr.splitlines()] == [
        "error: tiers.yaml: secondary[0", "error: tiers.yaml: secondary[1",
    ]  # fmt: skip


def test_a_wrong_config_is_json_where_json_is_asked_for(run, config):
    result = run("check", config("{typ: a}"), "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"]) == (2, False)
    assert report["findings"][0]["text"] == "tiers.yaml: secondary[0]: unknown option 'typ'. Did you mean 'type'?"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--value-bytes", "5", "a multiple of 4096, got '5'"),
        ("--value-bytes", "0", "expected more than 0"),
        ("--value-bytes", "2XB", "unknown unit 'XB'"),
        ("--timeout", "5", "no unit in '5'"),
        ("--timeout", "0s", "expected more than 0, got '0s'"),
    ],
)
def test_a_wrong_option_is_refused(run, config, option, value, said):
    result = run("check", config(), option, value)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.slow
def test_a_backend_that_hangs_is_a_line_and_the_command_ends(distributions, config, store, process):
    # A thread that is no daemon keeps a normal exit waiting for ever, so this needs a process of its own.
    hangs = store(
        opened="import threading; t = threading.Thread(target=threading.Event().wait, daemon=False); t.start(); t.join()"
    )
    file = config(f"{{type: {hangs}}}", f"{{type: {store()}}}")
    # The shortest time in which this machine starts both tiers' processes: all of it is waited out.
    for seconds in (5, 20, 80):
        done = process("check", file, "--timeout", f"{seconds}s", PYTHONPATH=str(distributions.folder))
        if PROBED in done.stdout:
            break
    assert done.returncode == 1
    (line,) = errors(done)
    assert f"tier {hangs}" in line
    assert f"no answer within {seconds}s while being opened. Fix: " in line
    assert PROBED in done.stdout
    assert done.stderr == ""


def test_the_endpoints_of_kv_events_are_tried_and_what_is_missing_is_said(run, config, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        file = Path(config())

        def check(events):
            file.write_text(f"version: 1\nprimary: {{capacity: 1MiB}}\nevents: {events}\n", encoding="utf-8")
            lines = [line for line in run("check", str(file)).stdout.splitlines() if " events " in line]
            assert len(lines) == 1
            return lines[0].strip()

        assert check(f"{{endpoint: '{endpoint}', bind: true}}").startswith("warning")
        assert "it is in use" in check(f"{{endpoint: '{endpoint}', bind: true}}")
        assert check("{endpoint: 'tcp://127.0.0.1:0', bind: true}").startswith("ok")
    monkeypatch.setattr("kvtiers.kv_events.open.find_spec", lambda name: None)
    assert check("{}").startswith("error")
    assert "pip install 'kvtiers[events]'" in check("{}")
