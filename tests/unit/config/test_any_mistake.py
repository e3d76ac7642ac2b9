"""Whatever is in the file: a valid config, or lines that begin with the file's name. Never another exception."""

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers.config import load_config

fuzz = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

MAPPINGS_OF_THE_USER = {"labels"}  # any key is right in there


def lines_of(content: str | bytes, path: Path) -> list[str]:
    """Load this file; return its lines, or nothing if it is valid."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        load_config(path)
    except ConfigError as error:
        lines = error.problems
    else:
        return []
    assert lines
    for line in lines:
        assert line.startswith(f"{path}: ")
        assert len(line.splitlines()) == 1
        assert len(line) <= 650
    return lines


def places(node, path=()):
    """Yield the path of every value in a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(document, path, change):
    document = copy.deepcopy(document)
    parent = document
    for part in path[:-1]:
        parent = parent[part]
    change(parent, path[-1])
    return yaml.safe_dump(document, sort_keys=False)


@pytest.fixture
def document(full):
    return yaml.safe_load(full)


@pytest.fixture
def keys(document) -> list[tuple]:
    return [p for p in places(document) if isinstance(p[-1], str) and (len(p) < 2 or p[-2] not in MAPPINGS_OF_THE_USER)]


def test_a_typo_in_any_key_is_found_and_the_key_is_suggested(tiers_yaml, shelf, document, keys):
    def misspell(parent, key):
        items = list(parent.items())
        parent.clear()
        parent.update({(f"{k[:-1]}qx" if k == key else k): v for k, v in items})

    assert len(keys) > 40
    for path in keys:
        lines = lines_of(changed(document, path, misspell), tiers_yaml)
        wrong = f"{path[-1][:-1]}qx"
        assert any(f"unknown option {wrong!r}" in line for line in lines), path
        suggested = [line for line in lines if f"Did you mean {path[-1]!r}?" in line]
        assert len(suggested) == 1 or len(path[-1]) < 4, (path, lines)
        assert len(lines) == 1 or path[-1] in {"name", "primary"}, (path, lines)


def test_a_value_of_the_wrong_kind_is_refused_anywhere(tiers_yaml, shelf, document, keys):
    for path in keys:
        for value in ([[7]], {"zz": {"q": 1}}):
            lines = lines_of(changed(document, path, lambda p, k, v=value: p.__setitem__(k, v)), tiers_yaml)
            assert lines, (path, value)
            assert str(path[-1]) in "".join(lines), (path, lines)


@pytest.mark.parametrize("unit", ["parsecs", "%%", "s s", "-1s", "1,5GiB"])
def test_a_wrong_unit_is_refused_anywhere(tiers_yaml, shelf, document, keys, unit):
    with_units = [p for p in keys if p[-1] in {
        "capacity", "start_deadline", "ttl", "fill", "window", "bytes_per_second", "deadline", "lookup_wait",
        "load_wait", "store_reserve", "all_tiers", "one_tier", "protected", "protect_for", "clean_reserve",
        "max_bytes",
    }]  # fmt: skip
    assert len(with_units) >= 15
    for path in with_units:
        lines = lines_of(changed(document, path, lambda p, k: p.__setitem__(k, f"7 {unit}")), tiers_yaml)
        assert len(lines) == 1, (path, lines)
        assert path[-1] in lines[0], (path, lines)


def test_a_missing_key_is_named_or_has_a_default(tiers_yaml, shelf, document, keys):
    required = {("version",), ("primary",), ("primary", "capacity"), ("model", "name"), ("record", "path"),
                *[("secondary", n, key) for n in (0, 1) for key in ("type", "path")]}  # fmt: skip
    for path in keys:
        lines = lines_of(changed(document, path, lambda p, k: p.pop(k)), tiers_yaml)
        if path in required:
            assert len(lines) == 1, (path, lines)
            assert f"{path[-1]!r} is missing" in lines[0]
        elif path != ("secondary", 1, "name"):
            assert lines == [], path


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates() | st.binary(max_size=9)
    | st.sampled_from(["1GiB", "5s", "10%", "auto", "shelf", "${HOME}", "${", "${}", "${NO_SUCH_VARIABLE}", "1e9"])
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3), max_leaves=6
)


@fuzz
@given(data=st.data(), value=values)
def test_any_value_anywhere_is_taken_or_explained(tiers_yaml, shelf, document, data, value):
    path = data.draw(st.sampled_from(list(places(document))))
    lines_of(changed(document, path, lambda p, k: p.__setitem__(k, value)), tiers_yaml)


@fuzz
@given(data=st.data(), key=scalars, value=values)
def test_any_further_key_anywhere_is_refused(tiers_yaml, shelf, document, data, key, value):
    mappings = [
        (),
        ("primary",),
        ("model",),
        ("secondary", 0),
        ("secondary", 1),
        ("budgets",),
        ("secondary", 0, "breaker"),
    ]
    path = data.draw(st.sampled_from(mappings))
    parent = document
    for part in path:
        parent = parent[part]
    lines = lines_of(changed(document, (*path, key), lambda p, k: p.setdefault(k, value)), tiers_yaml)
    assert lines or key in parent


@fuzz
@given(data=st.data())
def test_a_file_with_lines_missing_or_twice_is_taken_or_explained(tiers_yaml, shelf, full, data):
    lines = full.splitlines()
    counts = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 0, 2]), min_size=len(lines), max_size=len(lines)))
    lines_of("\n".join(line for line, n in zip(lines, counts, strict=True) for _ in range(n)), tiers_yaml)


@fuzz
@given(
    data=st.data(),
    text=st.text(max_size=8) | st.sampled_from([":", "- ", "\t", "&a ", "*a", "!!int ", "? ", "{", "]", "'"]),
)
def test_a_file_with_text_anywhere_in_it_is_taken_or_explained(tiers_yaml, shelf, full, data, text):
    start = data.draw(st.integers(0, len(full)))
    end = data.draw(st.integers(start, min(len(full), start + 10)))
    lines_of((full[:start] + text + full[end:]).encode("utf-8", "surrogatepass"), tiers_yaml)


@fuzz
@given(text=st.text())
def test_any_text_is_taken_or_explained(tiers_yaml, shelf, text):
    assert lines_of(text.encode("utf-8", "surrogatepass"), tiers_yaml)


@fuzz
@given(content=st.binary())
def test_any_bytes_are_explained(tiers_yaml, shelf, content):
    assert lines_of(content, tiers_yaml)


@fuzz
@given(source=st.dictionaries(scalars, values, max_size=4))
def test_any_mapping_is_taken_or_explained(source):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert all(line.startswith("config: ") and len(line.splitlines()) == 1 for line in caught.value.problems)
