"""An upgrade from commits of this repository's past, over each type of store that they had, and the way back.

The older side is what was at that commit: wheels of its tree, built and unpacked, in processes of its own. What it
stored is found by this tree, what this tree stores is found by it, and what it cannot read is a miss, byte by byte.

The older side runs with this environment's packages: a new release of pydantic or obstore can turn these tests red
without a change of this tree. Without the history (an export, a shallow clone) they are skipped, unless
``KVTIERS_NEEDS_HISTORY`` is set, as the workflow does that clones all of it.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "differential")]

from kinds import KINDS, LACKS  # noqa: E402
from releases import Players, at_once, command, filled, looked_for  # noqa: E402

OLDEST = {
    "0a449936": ("fs", "redis", "s3"),
    "5e607949": ("slab", "gcs", "azure", "mooncake"),
}
"""The first that has a client, of 2026-11-25, and the first that has the other types of store, of the day after it."""
HAS_NO_MOONCAKE = sys.version_info >= (3, 14) and importlib.util.find_spec("mooncake") is None
MARKS = {"mooncake": pytest.mark.skipif(HAS_NO_MOONCAKE, reason="Mooncake has no client for this release of Python")}
CELLS = [pytest.param(commit, kind, marks=MARKS.get(kind, ())) for commit, kinds in OLDEST.items() for kind in kinds]
UNLISTED = {"mooncake"}
"""Stores without a listing: no command of ``kvtiers store`` works on them."""


class Slab(KINDS["fs"]):
    def tier(self):
        return super().tier() | {"path": str(self.folder / "slab"), "layout": "slab", "capacity": "16MiB"}


def git(*arguments, root=ROOT):
    """Run git on a clone that may be owned by another user, as in a container."""
    theirs = [name for name in os.environ if name.startswith("GIT_") and not name.startswith("GIT_TEST_")]
    return subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", root, *arguments], capture_output=True, check=False, timeout=60,
        env={name: value for name, value in os.environ.items() if name not in theirs},  # not a hook's repository
    )  # fmt: skip


def need(commit, root=ROOT):
    """Skip where a clone cannot have this commit; a whole one that lacks it is a failure."""
    if (root / ".git").exists():
        found = git("cat-file", "-e", f"{commit}^{{commit}}", root=root)
        if found.returncode == 0:
            return
        is_shallow = git("rev-parse", "--is-shallow-repository", root=root).stdout.strip() == b"true"
        why = "the clone is shallow" if is_shallow else f"and the clone is not shallow: {found.stderr.decode()}"
    else:
        is_shallow, why = True, "there is no .git"
    text = f"the history has no {commit}, {why}"
    if not is_shallow or os.environ.get("KVTIERS_NEEDS_HISTORY"):
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """Return a function that gives the folder of a commit's installed wheels."""
    installed = {}

    def older(commit):
        if commit not in installed:
            folder = tmp_path_factory.mktemp(commit)
            need(commit)
            tree = git("archive", commit, "core", "plugins", *(["libraries"] if commit == "5e607949" else []))
            assert tree.returncode == 0, tree.stderr
            subprocess.run(["tar", "x", "-C", folder], input=tree.stdout, check=True)
            names = [{"slab": "fs"}.get(kind, kind) for kind in OLDEST[commit]]
            parts = ["core", *(f"plugins/{name}_tier" for name in names)]
            parts += [str(path.relative_to(folder)) for path in folder.glob("libraries/*")]
            options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile"]
            options += ["--disable-pip-version-check", "--target", folder / "installed"]
            subprocess.run(
                [sys.executable, "-m", "pip", "install", *options, *(f"./{part}" for part in parts)],
                cwd=folder, check=True, timeout=300,
            )  # fmt: skip
            installed[commit] = folder / "installed"
        return installed[commit]

    return older


@pytest.fixture(scope="module")
def play():
    """Return a function that lets the process of a commit, or of this tree (None), do steps: one process of each."""
    players = Players()
    yield players.play
    players.close()


@pytest.fixture(scope="module")
def tier_of(tmp_path_factory):
    """Return a function that gives a tier of a kind, over an empty store; its server is started at the first use."""
    with contextlib.ExitStack() as stack:
        started = {}

        def tier_of(kind):
            if kind not in started:
                started[kind] = {**KINDS, "slab": Slab}[kind](tmp_path_factory.mktemp(kind))
                started[kind].start(stack)
            tier = started[kind].tier() | {"name": kind}
            # Some calls of a busy machine's server take longer than any type's default.
            return tier | ({} if "timeout" in LACKS.get(tier["type"], ()) else {"timeout": "30s"})

        yield tier_of


@pytest.mark.parametrize(("commit", "kind"), CELLS)
def test_an_upgrade_finds_what_the_older_one_stored_and_so_does_the_way_back(
    older, play, tier_of, tmp_path, commit, kind
):
    tier, release = tier_of(kind), older(commit)
    play(release, filled(tier, range(12)))
    found, _ = play(None, looked_for(tier, range(12)), filled(tier, range(12, 24)))
    assert all(found), "this tree misses what the older commit stored"
    assert all(*play(release, looked_for(tier, range(24)))), "the older commit misses what this tree stored"
    if kind not in UNLISTED:
        (verified,) = play(None, command(tmp_path, tier, "verify"))
        assert verified["ok"]["values"] == 24


@pytest.mark.parametrize(("commit", "kind"), CELLS)
def test_what_the_older_one_has_no_format_for_is_a_miss_and_harms_neither(older, play, tier_of, tmp_path, commit, kind):
    """Compressed values have the names of plain ones; encrypted values and those of tenants have others."""
    release, apart = older(commit), {"namespace": "apart", "length": 20_000}
    plain = tier_of(kind)
    compressed = plain | {"compression": "zstd"}
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    encryption = apart | {"encryption": {"key": {"file": str(key)}}}
    tenant = apart | {"tenants": {}, "tenant": "blue"}
    play(
        None,
        filled(compressed, range(12), **apart),
        filled(plain, range(12, 24), **encryption),
        filled(plain, range(24, 36), **tenant),
    )
    assert not any(*play(release, looked_for(plain, range(36), **apart)))
    (found,) = play(None, looked_for(compressed, range(12), **apart))
    assert all(found), "the older commit's look has harmed them"
    _, found = play(release, looked_for(plain, range(36), fills=True, **apart), looked_for(plain, range(36), **apart))
    assert all(found), "the older commit cannot store what it misses"
    encrypted, of_tenant, _ = play(
        None,
        looked_for(plain, range(12, 24), **encryption),
        looked_for(plain, range(24, 36), **tenant),
        looked_for(compressed, range(12), **apart),  # misses, since plain values are there now, and no wrong byte
    )
    assert all(encrypted)
    assert all(of_tenant)


@pytest.mark.parametrize("commit", OLDEST)
def test_a_roll_out_has_hits_on_both_sides_and_no_wrong_byte(older, tier_of, commit):
    """Two engines of the older commit and two of this tree, which all want the same values, over empty namespaces.

    Some of them only the older commit stores, and some only this tree: what an engine has stored itself is no proof.
    """
    tiers = [tier_of(kind) for kind in OLDEST[commit] if kind not in ("slab", "mooncake")]
    found = at_once([None, older(commit)] * 2, tiers, seconds=4, disjoint=True, namespace="roll-out")
    assert [one["wrong"] for one in found] == [0] * 4
    assert all(one["of_others"] > 0 for one in found), found


@pytest.fixture
def clone(tmp_path):
    """Return a function that makes a whole or a shallow clone, or an export without a history."""
    source = tmp_path / "source"
    source.mkdir()
    who = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    made = [git(*some, root=source) for some in (["init"], *[[*who, "commit", "--allow-empty", "-m", "c"]] * 2)]
    assert not any(each.returncode for each in made), made

    def clone(kind):
        if kind == "shallow":
            assert git("clone", "--depth=1", f"file://{source}", tmp_path / kind, root=tmp_path).returncode == 0
        elif kind == "export":
            (tmp_path / kind).mkdir()
        return source if kind == "whole" else tmp_path / kind

    return clone


@pytest.mark.parametrize("needed", ["", "1"])
@pytest.mark.parametrize(("kind", "why"), [("export", "no .git$"), ("shallow", "is shallow"), ("whole", "not shallow")])
def test_without_the_history_these_tests_are_skipped_with_the_reason_and_fail_where_it_has_to_be_there(
    clone, monkeypatch, kind, why, needed
):
    monkeypatch.setenv("KVTIERS_NEEDS_HISTORY", needed)
    raised = pytest.fail.Exception if needed or kind == "whole" else pytest.skip.Exception
    with pytest.raises(raised, match=why):
        need("0a449936", clone(kind))


def test_a_clone_of_another_user_has_its_history(clone, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    need("HEAD", clone("whole"))
