"""``kvtiers check`` tries all that a tier declares, and no way to fail looks like success."""

# ruff: noqa: E501 -- a row of these tables is a mistake and its line, side by side

import json
import re
import time
from pathlib import Path

import pytest

ABILITIES = """
batch_values = 2
def read_many_into(self, names, dsts): return [self.scatter(n, views) for n, views in zip(names, dsts)]
def scatter(self, name, views):
    value, at = self.values.get(name, b""), 0
    if len(value) > sum(map(len, views)): return 0
    for view in views:
        view[: len(value) - at] = value[at : at + len(view)]
        at += len(view)
    return len(value)
def write_many(self, names, srcs): return [self.write(n, b"".join(views)) for n, views in zip(names, srcs)]
def reads_in_pieces(self, nbytes): return True
def read_pieces(self, name, nbytes):
    value = self.values.get(name, b"")
    return [value[:5000], value[5000:]] if len(value) == nbytes else None
def list(self, prefix): return [StoreEntry(n, len(v)) for n, v in self.values.items() if n.startswith(prefix)]
def stats(self): return {"held": len(self.values)}
def diagnose(self, value_bytes): return [Finding("ok", "all well")]
"""


def errors(result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.split()[:1] == ["error"]]


def test_every_ability_is_tried_and_leaves_nothing(run, config, store, tmp_path):
    body = f"""
{ABILITIES}
def close(self): Path("{tmp_path}/left").write_text(str(list(self.values)))
"""
    result = run("check", config(f"{{type: {store(body)}}}"))
    assert result.exit_code == 0, result.output
    for said in (
        "wrote, read back, compared and deleted 2MiB",
        "several values, each in several views: wrote, read back and compared two",
        "values in pieces: read one and compared it",
        "listing: found the probe value",
        "figures of its own: 1",
        "all well",
    ):
        assert said in result.stdout
    assert (tmp_path / "left").read_text() == "[]"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", "Mine.read_into answered None for a value; expected its length in bytes, 0 to 4096"),
        ("4097", "answered 4097"),
        ("True", "answered True"),
        ("95", "cannot be read back: absent, or of another length (read_into() gave 95 bytes, expected 4096)"),
    ],
)
def test_wrong_lengths_are_one_error(run, config, store, answer, said):
    body = f"def read_into(self, name, dst): return {answer}"
    result = run("check", config(f"{{type: {store(body)}}}"), "--value-bytes", "4096")
    assert result.exit_code == 1, result.output
    (line,) = errors(result)
    assert said in line


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def write(self, name, src):\n    import os; os._exit(0)", "its process ended by itself with exit status 0 while writing the probe value"),
        ("def close(self):\n    import os; os._exit(3)", "its process ended by itself with exit status 3 while being closed"),
        ("def exists(self, names):\n    import os; os.kill(os.getpid(), 9)", "its process was killed by signal 9 (SIGKILL) while saying whether"),
        ("def read_into(self, name, dst):\n    import ctypes; ctypes.string_at(0)", "was killed by signal 11 (SIGSEGV) while reading the probe value back (it printed: Fatal Python error: Segmentation fault"),
        ("def read_into(self, name, dst): raise SystemExit(0)", "failed while reading the probe value back: 0 (SystemExit)"),
        ("def delete(self, names): raise BaseException('odd')", "failed while deleting the probe value: odd (BaseException)"),
        ("def write(self, name, src): raise KeyboardInterrupt", "failed while writing the probe value: KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_a_tier_that_ends_crashes_or_raises_anything_is_one_error(run, config, store, body, said):
    result = run("check", config(f"{{type: {store(body)}}}"))
    assert result.exit_code == 1, result.output
    (line,) = errors(result)
    assert said in line
    assert ". Fix: " in line


WRITES = "\n    super().write(name, src)"


@pytest.mark.parametrize(
    "how",
    [
        "os.fork()",
        "pid = os.fork()\n    if not pid:\n        time.sleep(600)",
        "pid = os.fork()\n    if not pid:\n        raise SystemExit",
        "subprocess.Popen(['sleep', '600'], close_fds=False)",
    ],
)
def test_a_child_process_that_a_call_leaves_is_named_and_ended_and_nothing_is_said_twice(run, config, store, how):
    body = f"def write(self, name, src):\n    import os, subprocess, time\n    {how}{WRITES}"
    result = run("check", config(f"{{type: {store(body)}}}"))
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if "child process" in line]
    found = re.search(r"Mine.write left a child process \((\d+)\), which close did not end", line)
    assert found
    assert result.stdout.count("wrote, read back, compared and deleted") == 1
    until = time.monotonic() + 30
    while Path(f"/proc/{found[1]}/exe").exists():  # none of a zombie's
        assert time.monotonic() < until, "the child outlives the check"
        time.sleep(0.01)


def test_threads_that_a_store_leaves_are_counted(run, config, store):
    body = (
        "def write(self, name, src):\n    import threading, time\n"
        f"    threading.Thread(target=time.sleep, args=(60,), name='mine', daemon=True).start(){WRITES}"
    )
    result = run("check", config(f"{{type: {store(body)}}}"))
    assert result.exit_code == 0, result.output
    assert "after close, Mine still runs 1 threads: mine" in result.stdout


@pytest.mark.parametrize(
    ("body", "fix"),
    [
        ("def read_into(self, name, dst): raise SystemExit(0)", "this is a bug of the tier's plugin"),
        ("def read_into(self, name, dst): raise ValueError('odd')", "if it is not what the backend said, this is a bug of"),
        ("def read_into(self, name, dst): raise OSError('odd')", "check the tier's options, and that its backend runs"),
        ("transient_errors = (LookupError,)\ndef read_into(self, name, dst): raise KeyError('odd')", "check the tier's opt"),
        ("def read_many_into(self, names, dsts): return []", "this is a bug of the tier's plugin"),
    ],
)  # fmt: skip
def test_what_a_store_may_not_raise_is_its_plugin_s_bug_and_what_it_may_is_its_backend_s(run, config, store, body, fix):
    result = run("check", config(f"{{type: {store(ABILITIES + body)}}}"))
    (line,) = errors(result)
    assert f". Fix: {fix}" in line


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def diagnose(self, n): return None", "returned None, expected a list of findings"),
        ("def diagnose(self, n): return ['all well']", "returned 'all well' in its list, expected a Finding"),
        ("def diagnose(self, n): return [Finding('fine', 'all well')]", "a finding of level 'fine', expected ok, warning or error"),
        ("def diagnose(self, n): return [Finding('ok', 3)]", "in its list, expected a Finding"),
        ("def write_many(self, names, srcs): return None", "Mine.write_many returned None for 2 names"),
        ("def write_many(self, names, srcs): return [None, None]", "read_many_into() gave [0, 0], expected [2097152, 2097152]"),
        ("def write_many(self, names, srcs): return [True, True]", "Mine.write_many answered True for a value; expected None"),
        ("def write_many(self, names, srcs): raise OSError('no pipeline')", "failed while writing two probe values, each in 1 views: no pipeline (OSError)"),
        ("def write_many(self, names, srcs): raise NotKept('0 bytes left')", "the store is full: 0 bytes left"),
        ("def read_many_into(self, names, dsts): return [len(views[0]) for views in dsts]", "the value read back is not the value written"),
        ("def read_many_into(self, names, dsts): return [self.scatter(n, d) for n, d in zip(names, dsts)][:1]", "Mine.read_many_into gave 1 answers to 2 names"),
        ("def read_pieces(self, name, nbytes): return [self.values[name][:-1]]", "the pieces of read_pieces() are not the written bytes"),
        ("def read_pieces(self, name, nbytes): return [self.values.get(name, bytes(nbytes))]", "read_pieces() gave pieces of a value that is not there"),
        ("def list(self, prefix): return []", "list() of the probe value's own name gave [], expected it once"),
        ("def list(self, prefix): return list(self.values)", "expected a StoreEntry"),
        ("def stats(self): return [1]", "stats() returned [1], expected figures by name"),
        ("def stats(self): return {'rate': float('nan')}", "stats() has nan for 'rate', expected a number"),
        ("kept = None\ndef write(self, name, src):\n    super().write(name, src)\n    self.kept = src", "Mine.write kept the buffer that it was given"),
        ("kept = None\ndef write_many(self, names, srcs):\n    self.kept = srcs[0][-1]\n    return [self.write(n, b''.join(views)) for n, views in zip(names, srcs)]", "Mine.write_many kept the buffer that it was given"),
        ("def read_many_into(self, names, dsts): return [self.read_into(n, views[0]) or sum(map(len, views)) * (n in self.values) for n, views in zip(names, dsts)]", "the value read back is not the value written"),
        ("def write_many(self, names, srcs): return [self.write(n, views[0]) for n, views in zip(names, srcs)]", "read_many_into() gave [2097088, 2097088], expected [2097152, 2097152]"),
        ("batch_values = 1\ndef write_many(self, names, srcs):\n    [name], [views] = names, srcs\n    return [self.write(name, b''.join(views)[::-1])]", "the value read back is not the value written"),
        ("def diagnoze(self, n): return []", "'diagnoze', which is no part of the contract and is never used. Did you mean"),
    ],
)  # fmt: skip
def test_what_an_ability_gets_wrong_is_one_line(run, config, store, body, said):
    abilities = ABILITIES.replace("def diagnose", "def _diagnose") if "diagnoze" in body else ABILITIES
    result = run("check", config(f"{{type: {store(abilities + body)}}}"))
    assert result.exit_code == 1, result.output
    (line,) = errors(result)
    assert said in line
    assert ". Fix: " in line


def test_quotas_over_a_store_that_cannot_list_are_one_error(run, config, store):
    result = run("check", config(f"{{type: {store()}, quotas: {{blue: 1GiB}}}}", more="tenants: {}\n"))
    assert result.exit_code == 1, result.output
    (line,) = errors(result)
    assert "its store, Mine, cannot list what it holds, so no tenant's quota can be kept in it" in line


def test_half_an_ability_is_an_error(run, config, store):
    result = run("check", config(f"{{type: {store('def write_many(self, names, srcs): return []')}}}"))
    assert result.exit_code == 1
    assert "Mine has write_many but not batch_values, read_many_into: SupportsBatch is all of them" in errors(result)[0]


def test_what_a_tier_prints_is_not_in_the_report(run, config, store):
    name = store("def exists(self, names):\n    print('{', flush=True)\n    return super().exists(names)")
    result = run("check", config(f"{{type: {name}}}"), "--json")
    assert json.loads(result.stdout)["ok"] is True
    assert result.stderr == ""


@pytest.mark.parametrize("read_only", ["", ", read_only: true"])
@pytest.mark.parametrize(
    ("quotas", "level", "said"),
    [
        ("", "warning", "its values cannot be listed, so 'kvtiers store' cannot be used with it: no lister; start it"),
        (", quotas: {blue: 1GiB}", "error", "its quotas cannot be kept, since its values cannot be listed: no lister"),
    ],
)
def test_a_store_that_says_why_it_cannot_list_now_is_an_error_with_quotas_alone(
    run, config, store, read_only, quotas, level, said
):
    body = """
def list(self, prefix):
    from kvtiers.api import TierUnavailable
    raise TierUnavailable("no lister; start it")
"""
    result = run("check", config(f"{{type: {store(body)}{quotas}{read_only}}}", more="tenants: {}\n"))
    assert result.exit_code == (1 if quotas else 0), result.output
    [line] = [line for line in result.stdout.splitlines() if line.split()[:1] == [level] and "listed" in line]
    assert said in line


@pytest.mark.slow
def test_a_listing_that_takes_long_is_left_and_no_error(run, config, store, tmp_path):
    body = f"""
def list(self, prefix):
    import threading; threading.Event().wait()
def close(self): Path("{tmp_path}/closed").touch()
"""
    result = run("check", config(f"{{type: {store(body)}}}"))
    assert result.exit_code == 0, result.output
    assert "listing was not finished within 5s: the store holds many values" in result.stdout
    assert not (tmp_path / "closed").exists(), "nothing is closed beside a call that still runs"


def test_a_text_that_ends_with_a_period_is_followed_by_one_alone(run, config, store):
    name = store("def diagnose(self, n): return [Finding('warning', 'It has no TLS.', 'use it')]")
    assert "It has no TLS. Fix: use it" in run("check", config(f"{{type: {name}}}")).stdout
