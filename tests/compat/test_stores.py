"""Stores of earlier releases, and engines of two releases on one store at the same time.

What a release wrote is read by those after it, or is a miss for them: never something else, never an error, and not
harmed. ``stores/`` holds what each released format looks like (``make_stores.py``). The release after this one is
played: a copy of core with another format number.
"""

import importlib.util
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import redis

from kvtiers.layout.seal import SEAL_FORMAT

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))

from releases import at_once, command, filled, looked_for, play  # noqa: E402

FORMATS = sorted(int(path.name.partition(".")[0]) for path in (HERE / "stores").glob("*.tar.gz"))


def module_of(path):
    spec = importlib.util.spec_from_file_location(f"compat_{path.stem}_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stores = module_of(HERE / "make_stores.py")


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    server = module_of(REPOSITORY / "plugins/redis_tier/tests/servers.py").Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def golden(tmp_path, redis_url):
    """Return a function that lays out the stores of a format, and returns their tiers by name."""

    def golden(number):
        with tarfile.open(HERE / "stores" / f"{number}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        tiers = stores.tiers(tmp_path, redis_url)
        client = redis.Redis.from_url(redis_url)
        client.flushall()
        for path in (tmp_path / "files/golden").rglob("*"):
            if path.is_file():  # a store of names and values has nothing of its own: it holds what files hold
                client.set(re.sub(r"/@[0-9a-f]{2}/", "/", str(path.relative_to(tmp_path / "files"))), path.read_bytes())
        client.close()
        return tiers

    return golden


@pytest.fixture(scope="session")
def next_release(tmp_path_factory):
    """Return the folder of a copy of core whose seals have the next format number."""
    folder = tmp_path_factory.mktemp("next")
    shutil.copytree(REPOSITORY / "core/src/kvtiers", folder / "kvtiers", ignore=shutil.ignore_patterns("__pycache__"))
    seal = folder / "kvtiers/layout/seal.py"
    text = seal.read_text()
    assert f"\nSEAL_FORMAT = {SEAL_FORMAT}\n" in text
    seal.write_text(text.replace(f"\nSEAL_FORMAT = {SEAL_FORMAT}\n", f"\nSEAL_FORMAT = {SEAL_FORMAT + 1}\n"))
    return folder


def test_each_released_format_has_its_stores():
    assert list(range(1, SEAL_FORMAT + 1)) == FORMATS, "run make_stores.py when a format gets its number"


@pytest.mark.parametrize("kind", ["files", "slab", "redis"])
@pytest.mark.parametrize("number", FORMATS)
def test_a_store_of_a_released_format_is_read_or_missed_and_every_command_works_on_it(golden, tmp_path, number, kind):
    tier = golden(number)[kind]
    found = stores.read(tier)
    assert all(found) if number == SEAL_FORMAT else not any(found)
    verdict = "ok" if number == SEAL_FORMAT else "older"
    assert len(command(None, tmp_path, tier, "ls")["values"]) == stores.COUNT
    assert command(None, tmp_path, tier, "du")["total"]["values"] == stores.COUNT
    assert command(None, tmp_path, tier, "verify")[verdict]["values"] == stores.COUNT
    gone = command(None, tmp_path, tier, "prune", "--older-format")["total"]["values"]
    assert gone == (0 if number == SEAL_FORMAT else stores.COUNT)


@pytest.mark.parametrize("kind", ["files", "slab", "redis"])
def test_the_next_release_misses_what_this_one_wrote_and_prunes_it_and_this_one_prunes_nothing_newer(
    golden, tmp_path, next_release, kind
):
    tier = golden(SEAL_FORMAT)[kind]
    assert not any(*play(next_release, looked_for(tier)))
    assert all(stores.read(tier)), "the next release has harmed them by reading"
    assert command(next_release, tmp_path, tier, "verify")["older"]["values"] == stores.COUNT
    assert (
        command(next_release, tmp_path, tier, "prune", "--older-format", "--dry-run")["total"]["values"] == stores.COUNT
    )
    assert command(next_release, tmp_path, tier, "prune", "--older-format")["total"]["values"] == stores.COUNT
    assert command(None, tmp_path, tier, "du")["total"]["values"] == 0
    assert all(play(next_release, filled(tier), looked_for(tier))[1])
    assert not any(stores.read(tier)), "this release reads what the next one wrote"
    assert command(None, tmp_path, tier, "verify")["foreign"]["values"] == stores.COUNT
    assert command(None, tmp_path, tier, "prune", "--older-format")["total"]["values"] == 0
    assert all(*play(next_release, looked_for(tier)))


def test_two_releases_over_one_directory_and_one_redis_at_once_give_no_wrong_byte_and_both_have_hits(
    tmp_path, redis_url, next_release
):
    """Two engines of this release and two of the next, which all want the same values, under the same names."""
    tiers = [tier for name, tier in stores.tiers(tmp_path, redis_url).items() if name != "slab"]
    found = at_once([None, next_release] * 2, tiers, seconds=4)
    assert [one["wrong"] for one in found] == [0] * 4
    assert all(one["loaded"] > 0 for one in found), found
