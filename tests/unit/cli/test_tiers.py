"""``kvtiers tiers``: what is installed, in tables, as JSON and as a schema for editors."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONS = """
path: str = Field(description="where the values lie")
capacity: Size = Field(default=5 * 2**30, description="most bytes of values")
ttl: Duration | None = Field(default=None, description="how long a value stays")
fill: Share = 0.25
password: Secret | None = None
nodes: list[str] = ["a", "b"]
threads: int = Field(default=16, description=TierConfig.model_fields["threads"].description)
"""


@pytest.fixture
def shelf(distributions):
    distributions.tier("shelf", options=OPTIONS)


@pytest.fixture
def broken(distributions):
    distributions.install_tier("broken", "import no_such_library", version="2.5")


def rows(text: str) -> dict[str, list[str]]:
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


def test_each_option_has_its_type_its_default_and_its_meaning(run, shelf):
    result = run("tiers")
    assert result.exit_code == 0, result.output
    assert "shelf: a store from kvtiers-shelf 1.0, API 1" in result.stdout
    block = result.stdout.partition("shelf: ")[2].partition("\n\n")[0]
    assert rows(block)["path"] == ["text", "required", "where the values lie"]
    assert rows(block)["capacity"] == ["size", "5GiB", "most bytes of values"]
    assert rows(block)["ttl"] == ["duration", "none", "how long a value stays"]
    assert rows(block)["fill"] == ["share", "25%"]
    assert rows(block)["password"] == ["secret", "none"]
    assert rows(block)["nodes"] == ["list of text", "a, b"]


def test_options_of_every_tier_are_printed_once_and_changed_defaults_by_the_tier(run, shelf):
    common = rows(run("tiers").stdout.partition("options of every tier:")[2])
    own = rows(run("tiers").stdout.partition("shelf: ")[2].partition("\n\n")[0])
    assert common["deadline"] == ["duration", "30s", "longest time of a transfer until it counts as failed"]
    assert common["io"][0] == "process | thread"
    assert common["breaker.error_rate"][:2] == ["share", "50%"]
    assert common["rate_limit.bytes_per_second"][:2] == ["size", "none"]
    assert common["threads"][:2] == ["integer", "4"]
    assert own["threads"][:2] == ["integer", "16"]
    assert "deadline" not in own


def test_a_broken_plugin_is_one_line_among_the_others_and_status_1(run, shelf, broken):
    result = run("tiers")
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if "broken" in line]
    assert line.startswith("error: tier type 'broken' (kvtiers-broken 2.5) cannot be imported")
    assert "No module named 'no_such_library'" in line
    assert "shelf: a store" in result.stdout


def test_two_that_claim_one_name_are_reported(run, shelf, distributions):
    distributions.install_tier("shelf", "", name="other-shelf")
    result = run("tiers")
    assert result.exit_code == 1
    assert "is claimed by kvtiers-shelf 1.0 and other-shelf 1.0" in result.stdout


def test_json_has_everything_the_tables_have(run, shelf, broken):
    result = run("tiers", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["api_version"] == 1
    tier = next(tier for tier in document["tiers"] if tier["name"] == "shelf")
    assert {key: tier[key] for key in ("kind", "distribution", "version", "api_version")} == {
        "kind": "store", "distribution": "kvtiers-shelf", "version": "1.0", "api_version": 1,
    }  # fmt: skip
    options = {option["name"]: option for option in tier["options"]}
    assert options["capacity"] == {
        "name": "capacity", "type": "size", "required": False, "default": "5GiB",
        "description": "most bytes of values", "live": False, "common": False,
    }  # fmt: skip
    assert options["deadline"]["common"]
    assert options["path"]["required"]
    (wrong,) = document["broken"]
    assert (wrong["name"], wrong["distribution"], wrong["version"]) == ("broken", "kvtiers-broken", "2.5")
    assert "no_such_library" in wrong["error"]


def test_json_and_schema_exclude_each_other(run):
    assert run("tiers", "--json", "--json-schema").exit_code == 2


@pytest.fixture
def schema(run, shelf, distributions):
    distributions.tier("other", options="endpoint: str")
    result = run("tiers", "--json-schema")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_schema_is_a_union_of_the_installed_tiers_discriminated_by_type(schema):
    items = schema["properties"]["secondary"]["items"]
    mapping = items["discriminator"]["mapping"]
    assert items["discriminator"]["propertyName"] == "type"
    assert [{"$ref": reference} for reference in mapping.values()] == items["oneOf"]
    assert {"shelf", "other"} <= set(mapping)
    for name, reference in mapping.items():
        definition = schema["$defs"][reference.rpartition("/")[2]]
        assert definition["properties"]["type"]["const"] == name
        assert "type" in definition["required"]
        assert definition["additionalProperties"] is False
    assert schema["$defs"]["tier-other"]["required"] == ["endpoint", "type"]


def test_the_schema_describes_the_whole_file(schema):
    assert set(schema["properties"]) == {
        "version", "namespace", "model", "primary", "secondary", "lookup_wait", "load_wait", "start_wait", "budgets",
        "clean_reserve", "record", "tracing", "events", "what_if", "tenants", "encryption",
    }  # fmt: skip
    assert schema["required"] == ["version", "primary"]
    assert schema["additionalProperties"] is False


def references(node):
    if isinstance(node, dict):
        yield from ([node["$ref"]] if "$ref" in node else [])
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_reference_in_the_schema_leads_somewhere(schema):
    found = set(references(schema))
    assert found
    assert {reference.removeprefix("#/$defs/") for reference in found} <= set(schema["$defs"])


def test_the_schema_takes_what_people_write_and_shows_defaults_as_they_would(schema):
    properties = schema["$defs"]["tier-shelf"]["properties"]
    size, share, duration = properties["capacity"], properties["fill"], properties["deadline"]
    assert (size["default"], share["default"], duration["default"]) == ("5GiB", "25%", "30s")
    assert "default" not in properties["ttl"]
    for option, right, wrong in [
        (size, ["5GiB", "500 MB", "4096", "1.5TiB", "${SIZE}", "${N}GiB"], ["5GX", "lots", "-1"]),
        (share, ["10%", "0.5", "${SHARE}"], ["10 GiB", "much"]),
        (duration, ["250ms", "24h", "0", "1.5 s", "10us", "2d", "${T}"], ["5", "250", "5 parsecs"]),
    ]:
        assert all(re.search(option["pattern"], text) for text in [*right, *option["examples"], option["default"]])
        assert not any(re.search(option["pattern"], text) for text in wrong)


def test_a_secret_shows_no_default_in_the_schema(schema):
    assert "default" not in schema["$defs"]["tier-shelf"]["properties"]["password"]


def test_a_broken_plugin_is_reported_beside_the_schema(run, shelf, broken):
    result = run("tiers", "--json-schema")
    assert result.exit_code == 1
    assert "tier-shelf" in json.loads(result.stdout)["$defs"]
    assert "error: tier type 'broken'" in result.stderr


def test_on_a_terminal_the_table_is_drawn_for_its_width(distributions, shelf, tmp_path):
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(distributions.folder), "COLUMNS": "70", "TERM": "xterm"}
    command = [Path(sys.executable).with_name("kvtiers"), "tiers"]
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=environment, cwd=tmp_path) as process:
        os.close(follower)
        text = ""
        try:
            while data := os.read(leader, 1 << 16):
                text += data.decode()
        except OSError:  # what Linux says when the other end is closed
            pass
        os.close(leader)
    assert process.returncode == 0
    assert "\x1b[" in text
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 70
    assert any("most bytes of values" in line for line in lines)
