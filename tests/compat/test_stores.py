"""Stores of earlier releases, and engines of two releases on one store at the same time.

What a release wrote is read by those after it, or is a miss for them: never something else, never an error, and not
harmed. ``stores/`` holds what each form of a stored value looks like in each released format (``make_stores.py``):
plain, of a tenant, compressed, encrypted. A release after this one is played: a copy of core in which one format has
its next number.
"""

import importlib.util
import re
import shutil
import sys
import tarfile
from functools import cache
from pathlib import Path

import pytest
import redis

from kvtiers.encryption.seal import ENCRYPTED_SEAL_FORMAT
from kvtiers.layout.seal import seal_value
from kvtiers.layout.storage_name import parse_name

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))

from formats import FORMS, PLAYED, stem, stored_as  # noqa: E402
from releases import Players, at_once, command, filled, looked_for  # noqa: E402

STEMS = sorted(path.name.removesuffix(".tar.gz") for path in (HERE / "stores").glob("*.tar.gz"))
KINDS = ("files", "slab", "redis")


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


class Golden:
    """The stores of one form, laid out, and how this release and the next look at one of them."""

    def __init__(self, folder, redis_url, play, name):
        self.folder, self.play, self.form = folder, play, name.partition("-")[0]
        with tarfile.open(HERE / "stores" / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        self.files = {name: path.read_bytes() for name, path in self._places().items()}
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
            for key, stored in self.files.items():  # a store of names and values has nothing of its own beside them
                client.set(key, stored)
        of_tier, self.config, arguments = stored_as(self.form, folder)
        self.tiers = {kind: tier | of_tier for kind, tier in stores.tiers(folder, redis_url).items()}
        self.options = self.config | arguments

    def read(self, kind):
        """Return which values this release finds; every byte of those is compared."""
        return stores.read(self.tiers[kind], **self.options)

    def looked_for(self, kind):
        return looked_for(self.tiers[kind], **self.options)

    def filled(self, kind):
        return filled(self.tiers[kind], **self.options)

    def command(self, release, kind, *arguments):
        (printed,) = self.play(release, command(self.folder, self.tiers[kind], *arguments, **self.config))
        return printed

    def values(self):
        """Return what files hold of values, without the records of fingerprints."""
        return {name: stored for name, stored in self.files.items() if "/_" not in name}

    def names(self):
        """Return the storage names of the values that are in files now."""
        return {name for name in self._places() if "/_" not in name}

    def place(self, name):
        """Return the file that holds this value now."""
        return self._places()[name]

    def _places(self):
        root = self.folder / "files"
        paths = [path for path in (root / "golden").rglob("*") if path.is_file()]
        return {re.sub(r"/@[0-9a-f]{2}/", "/", str(path.relative_to(root))): path for path in paths}


@pytest.fixture(scope="module")
def play():
    """Return a function that lets the process of a release, or of this tree (None), do steps: one process of each."""
    players = Players()
    yield players.play
    players.close()


@pytest.fixture
def golden(tmp_path, redis_url, play):
    """Return a function that lays out the stores of this name."""
    return lambda name: Golden(tmp_path, redis_url, play, name)


@pytest.fixture(scope="session")
def next_release(tmp_path_factory):
    """Return a function that gives the folder of a copy of core in which this format has its next number."""

    @cache
    def played(which):
        folder, (module, constant, formats, number) = tmp_path_factory.mktemp(f"next-{which}"), PLAYED[which]
        copied = folder / "kvtiers"
        shutil.copytree(REPOSITORY / "core/src/kvtiers", copied, ignore=shutil.ignore_patterns("__pycache__"))
        text = (copied / module).read_text()
        assert f"\n{constant} = {formats}\n" in text
        (copied / module).write_text(
            text.replace(f"\n{constant} = {formats}\n", f"\n{constant} = {(*formats, number)}\n")
        )
        return folder

    return played


def test_each_form_of_this_release_has_its_stores():
    assert {stem(form) for form in FORMS} <= set(STEMS), "run make_stores.py when a format gets its number"
    assert {name.partition("-")[0] for name in STEMS} == FORMS.keys()


@pytest.mark.parametrize("form", FORMS)
def test_a_store_holds_what_its_name_says(golden, form):
    """So that no form is read back that was never written."""
    laid_out = golden(stem(form))
    values = laid_out.values()
    assert len(values) == stores.COUNT
    begin = bytes(stores.value(0)[:100])
    assert any(stored.startswith(begin) for stored in values.values()) == (form in ("plain", "tenant"))
    assert all(stored.startswith(b"kvtPACK\n") for stored in values.values()) == (form == "compressed")
    assert all(name.startswith("golden/t-blue/") for name in values) == (form == "tenant")
    assert all(re.search("/k[0-9a-f]{88}$", name) for name in values) == (form == "encrypted")
    if form != "compressed":  # whose seal is inside
        head = b"kvtSEAL\n" + FORMS[form][0].to_bytes(4, "little")
        assert {stored[-64:-52] for stored in values.values()} == {head}
    lengths = [laid_out.command(None, kind, "du")["total"]["bytes"] for kind in ("slab", "files")]
    assert lengths == [sum(map(len, values.values()))] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEMS)
def test_a_store_of_a_released_format_is_read_or_missed_and_every_command_works_on_it(golden, name, kind):
    laid_out = golden(name)
    is_read = name == stem(laid_out.form)
    found = laid_out.read(kind)
    assert all(found) if is_read else not any(found)
    assert len(laid_out.command(None, kind, "ls")["values"]) == stores.COUNT
    assert laid_out.command(None, kind, "du")["total"]["values"] == stores.COUNT
    assert laid_out.command(None, kind, "verify")["ok" if is_read else "older"]["values"] == stores.COUNT
    gone = laid_out.command(None, kind, "prune", "--older-format")["total"]["values"]
    assert gone == (0 if is_read else stores.COUNT)


@pytest.mark.parametrize(
    ("form", "raised", "kind"),
    [
        *(("plain", "seal", kind) for kind in KINDS),
        ("tenant", "seal", "files"),
        ("compressed", "seal", "files"),
        ("compressed", "compressed", "slab"),
        ("encrypted", "encrypted", "redis"),
    ],
)
def test_the_next_release_misses_what_this_one_wrote_and_prunes_it_and_this_one_prunes_nothing_newer(
    golden, play, next_release, form, raised, kind
):
    laid_out, next_release = golden(stem(form)), next_release(raised)
    assert not any(*play(next_release, laid_out.looked_for(kind)))
    assert all(laid_out.read(kind)), "the next release has harmed them by reading"
    assert laid_out.command(next_release, kind, "verify")["older"]["values"] == stores.COUNT
    dry = laid_out.command(next_release, kind, "prune", "--older-format", "--dry-run")
    assert dry["total"]["values"] == stores.COUNT
    assert laid_out.command(next_release, kind, "prune", "--older-format")["total"]["values"] == stores.COUNT
    assert laid_out.command(None, kind, "du")["total"]["values"] == 0
    assert all(play(next_release, laid_out.filled(kind), laid_out.looked_for(kind))[1])
    assert not any(laid_out.read(kind)), "this release reads what the next one wrote"
    assert laid_out.command(None, kind, "verify")["foreign"]["values"] == stores.COUNT
    assert laid_out.command(None, kind, "prune", "--older-format")["total"]["values"] == 0
    assert all(*play(next_release, laid_out.looked_for(kind)))


@pytest.mark.parametrize(
    ("form", "raised"), [("plain", "seal"), ("compressed", "compressed"), ("encrypted", "encrypted")]
)
def test_of_a_store_of_two_releases_each_prunes_only_what_is_older_than_itself_and_nothing_that_is_foreign(
    golden, play, next_release, form, raised
):
    laid_out, next_release = golden(stem(form)), next_release(raised)
    old = laid_out.names()
    play(next_release, filled(laid_out.tiers["files"], range(12, 24), **laid_out.options))
    newer = laid_out.names() - old
    foreign = set(sorted(old)[:3])
    for name in foreign:
        laid_out.place(name).write_bytes(foreign_value(form, name))
    assert laid_out.command(None, "files", "verify")["foreign"]["values"] == len(newer | foreign)
    assert laid_out.command(None, "files", "prune", "--older-format")["total"]["values"] == 0
    assert laid_out.names() == old | newer
    counted = laid_out.command(next_release, "files", "verify")
    counts = {verdict: found["values"] for verdict, found in counted.items() if isinstance(found, dict)}
    assert {verdict: count for verdict, count in counts.items() if count} == {"ok": 12, "older": 9, "foreign": 3}
    assert laid_out.command(next_release, "files", "prune", "--older-format")["total"]["values"] == 9
    assert laid_out.names() == newer | foreign


def foreign_value(form, name):
    """Return what no release stores under this name, although its number is less than the next one of the form.

    That is a plain seal under a keyed name, an encrypted one under a plain name, and a seal of another layout.
    """
    value = memoryview(bytearray(4096))
    seal_value(value, 4000, name, bytes(8) if form == "compressed" else parse_name(name).layout_id)
    if form == "plain":
        value[-56] = ENCRYPTED_SEAL_FORMAT
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_encrypted_is_read_by_a_next_release_that_has_another_plain_seal_and_the_way_back(
    golden, play, next_release, kind
):
    laid_out, next_release = golden(stem("encrypted")), next_release("seal")
    assert all(*play(next_release, laid_out.looked_for(kind)))
    assert laid_out.command(next_release, kind, "verify")["ok"]["values"] == stores.COUNT
    assert laid_out.command(next_release, kind, "prune", "--older-format")["total"]["values"] == 0
    play(next_release, filled(laid_out.tiers[kind], range(12, 24), **laid_out.options))
    assert all(stores.read(laid_out.tiers[kind], range(24), **laid_out.options))


@pytest.mark.parametrize("form", ["plain", "encrypted"])
def test_two_releases_over_one_directory_and_one_redis_at_once_give_no_wrong_byte_and_both_have_hits(
    tmp_path, redis_url, next_release, form
):
    """Two engines of this release and two of the next, which all want the same values, under the same names.

    The next one has another plain seal, and the same encrypted one: so each finds the other's encrypted values.
    """
    next_release = next_release("seal")
    _, config, arguments = stored_as(form, tmp_path)
    tiers = [tier for name, tier in stores.tiers(tmp_path, redis_url).items() if name != "slab"]
    shared = form == "encrypted"
    found = at_once([None, next_release] * 2, tiers, seconds=4, disjoint=shared, **config, **arguments)
    assert [one["wrong"] for one in found] == [0] * 4
    assert all(one["of_others" if shared else "loaded"] > 0 for one in found), found
