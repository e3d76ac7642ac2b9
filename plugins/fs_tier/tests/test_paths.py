from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers_fs.directory import TEMP_PREFIX
from kvtiers_fs.paths import SHARDS, name_part, place_of, shard_number

parts = st.one_of(
    st.text(st.characters(codec="ascii", exclude_characters="/"), min_size=1, max_size=40),
    st.text("ab0.%@+_-", min_size=1, max_size=12),
    st.text("0123456789abcdef.", min_size=190, max_size=500),
)
names = st.lists(parts, min_size=1, max_size=6).map("/".join).filter(lambda name: len(name) <= 512)


def pieces_of(place):
    return [*place.folder.split("/"), place.leaf]


def name_of(place):
    """Put a name together again from its path alone, as a walk does."""
    name, pieces = "", ""
    for part in pieces_of(place):
        if shard_number(part) is not None and not pieces:
            continue
        pieces += part
        if not part.endswith("+"):
            name += f"{name_part(pieces)}/"
            pieces = ""
    return name.rstrip("/") if not name.startswith("/") else name


@given(names)
@settings(deadline=None)
def test_a_path_leads_back_to_its_name(name):
    assert name_of(place_of(name)) == name


@given(names)
@settings(deadline=None)
def test_no_name_leads_out_of_the_root_or_to_a_file_of_ours(name):
    place = place_of(name)
    path = PurePosixPath(place.folder, place.leaf)
    assert not path.is_absolute()
    for part in pieces_of(place):
        assert part
        assert not part.startswith(".")
        assert len(part.encode()) <= 255
        assert not part.startswith(TEMP_PREFIX)


@given(names, names)
@settings(deadline=None)
def test_two_names_never_share_a_file_and_a_file_is_never_another_names_folder(one, other):
    path, second = ("/".join(pieces_of(place_of(name))) for name in (one, other))
    if one == other:
        assert path == second
    else:
        assert path != second
        assert not second.startswith(f"{path}/")


@pytest.mark.parametrize("name", ["..", "../../etc/passwd", "a/../../b", "/etc/passwd", ".usage", ".kvtiers-fs", "a/."])
def test_names_made_to_escape_stay_below_the_root(name):
    if name.startswith("/"):
        with pytest.raises(ValueError, match="no empty parts"):
            place_of(name)
    else:
        assert not any(part.startswith(".") for part in pieces_of(place_of(name)))


@pytest.mark.parametrize(("name", "why"), [("a//b", "empty"), ("a/", "empty"), ("a" * 513, "at most 512")])
def test_what_is_no_name_is_refused(name, why):
    with pytest.raises(ValueError, match=why):
        place_of(name)


def test_usual_names_stand_on_disk_as_they_are():
    place = place_of("prod/llama-3.1-8b-0123456789abcdef01234567/" + "5f" * 36)
    assert place.folder.startswith("prod/llama-3.1-8b-0123456789abcdef01234567/@")
    assert place.leaf == "5f" * 36


def test_values_spread_evenly_over_the_shards():
    counts = [0] * SHARDS
    for number in range(256 * SHARDS):
        counts[place_of(f"ns/m/{number:032x}00000000").shard] += 1
    assert min(counts) > 128
    assert max(counts) < 512


@pytest.mark.parametrize("pieces", ["%2", "%zz", "A", "%41%", "a b", "%61", "a+", "+a", "%ff"])
def test_a_file_name_that_no_name_has_is_no_value(pieces):
    assert name_part(pieces) is None
