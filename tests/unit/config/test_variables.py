"""``${NAME}`` in any text, and secrets that never print."""

from kvtiers.api import Secret
from kvtiers.config import load_config


def test_variables_are_read_from_the_environment_in_any_text(tiers_yaml, shelf, monkeypatch):
    monkeypatch.setenv("KVTIERS_TEST_SIZE", "3")
    monkeypatch.setenv("KVTIERS_TEST_TIER", "shelf")
    tiers_yaml.write_text(
        "version: 1\nprimary: {capacity: '${KVTIERS_TEST_SIZE}GiB'}\nsecondary:\n"
        "- type: ${KVTIERS_TEST_TIER}\n  path: /${KVTIERS_TEST_SIZE}/${KVTIERS_TEST_SIZE}\n"
        "  threads: ${KVTIERS_TEST_SIZE}\n  nodes: [a, '${KVTIERS_TEST_SIZE}']\n  labels: {a: '${KVTIERS_TEST_SIZE}'}\n"
    )
    config = load_config(tiers_yaml)
    (tier,) = config.secondary
    assert config.primary.capacity == 3 * 2**30
    assert (tier.type, tier.path, tier.threads, tier.nodes, tier.labels) == ("shelf", "/3/3", 3, ["a", "3"], {"a": "3"})


def test_what_a_variable_stands_for_is_not_in_the_line(wrong, with_tier, monkeypatch):
    monkeypatch.setenv("KVTIERS_TEST_VALUE", "hunter2")
    lines = wrong(with_tier("ttl: ${KVTIERS_TEST_VALUE}\nthreads: ${KVTIERS_TEST_VALUE}\nio: ${KVTIERS_TEST_VALUE}"))
    assert len(lines) == 3
    assert all("'${KVTIERS_TEST_VALUE}'" in line and "hunter2" not in line for line in lines)


def test_a_secret_never_prints_and_records_where_it_is_from(tiers_yaml, shelf, with_tier, monkeypatch, tmp_path):
    monkeypatch.setenv("KVTIERS_TEST_SECRET", "hunter2")
    (tmp_path / "key").write_text("hunter3\n")
    tiers_yaml.write_text(with_tier(f"password: ${{KVTIERS_TEST_SECRET}}\nkeys: [hunter4, {{file: '{tmp_path}/key'}}]"))
    (tier,) = load_config(tiers_yaml).secondary
    assert tier.password.reveal() == "hunter2"
    assert [key.reveal() for key in tier.keys] == ["hunter4", "hunter3"]
    assert tier.password == Secret("hunter2", source="${KVTIERS_TEST_SECRET}")
    for text in (repr(tier), str(tier), tier.model_dump_json(), str(tier.model_dump())):
        assert "hunter" not in text
    assert "Secret(from ${KVTIERS_TEST_SECRET})" in repr(tier)


def test_a_secret_is_not_in_the_line_about_it(wrong, with_tier):
    for options in (
        "password: [hunter2]",
        "password: {fiel: hunter2}",
        "pasword: hunter2",
        "keys: hunter2",
        "password: 'hunter2${'",
    ):
        assert "hunter" not in "".join(wrong(with_tier(options)))


def test_line_breaks_behind_a_variable_are_left_out_as_those_at_the_end_of_a_secrets_file(
    tiers_yaml, shelf, with_tier, monkeypatch, tmp_path
):
    (tmp_path / "key").write_bytes(b" two\nlines \r\n")
    monkeypatch.setenv("KVTIERS_TEST_SECRET", " two\nlines \r\n")
    monkeypatch.setenv("KVTIERS_TEST_RACK", "a1\n")
    tiers_yaml.write_text(
        with_tier(
            f"password: ${{KVTIERS_TEST_SECRET}}\nkeys: [{{file: '{tmp_path}/key'}}]\n"
            "labels: {rack: '${KVTIERS_TEST_RACK}-${KVTIERS_TEST_RACK}'}"
        )
    )
    (tier,) = load_config(tiers_yaml).secondary
    assert tier.password.reveal() == tier.keys[0].reveal() == " two\nlines "
    assert tier.labels == {"rack": "a1-a1"}
