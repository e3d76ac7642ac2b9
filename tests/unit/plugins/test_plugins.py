"""Tier plugins and other entry points: found, loaded one at a time, and refused with one clear line."""

import sys
import uuid

import pytest
from click.testing import CliRunner

from kvtiers import plugins
from kvtiers.api import TierConfig, TierPluginError
from kvtiers.cli.main import cli

GOOD = """
from kvtiers.api import TierConfig, TierPlugin, hookimpl

@hookimpl
def kvtiers_tier():
    return TierPlugin(name="good", kind="store", config=TierConfig, open=print, api_version=1)
"""


def refusal(type_name: str) -> str:
    with pytest.raises(TierPluginError) as caught:
        plugins.load_tier(type_name)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_a_tier_is_loaded_by_its_entry_points_name(distributions):
    distributions.install_tier("good", GOOD)
    plugin = plugins.load_tier("good")
    assert (plugin.name, plugin.kind, plugin.config, plugin.open) == ("good", "store", TierConfig, print)


def test_listing_the_installed_tiers_imports_none_of_them(distributions):
    module = distributions.install_tier("good", "raise AssertionError('imported')", version="1.5")
    entry = next(entry for entry in plugins.installed_tiers() if entry.name == "good")
    assert plugins.distribution_of(entry) == "kvtiers-good 1.5"
    assert module not in sys.modules


def test_loading_one_tier_imports_no_other(distributions):
    other = distributions.install_tier("other", GOOD)
    distributions.install_tier("good", GOOD)
    plugins.load_tier("good")
    assert other not in sys.modules


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def :", "SyntaxError: "),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_an_import_that_fails_names_the_distribution_and_the_exception(distributions, source, said):
    distributions.install_tier("bad", source, name="kvtiers-bad", version="2.0")
    text = refusal("bad")
    assert text.startswith("tier type 'bad' (kvtiers-bad 2.0) cannot be imported from 'kvtiers_test_module_")
    assert said in text


def test_an_entry_point_to_a_missing_attribute_is_one_line(distributions):
    distributions.install("kvtiers-bad", "[kvtiers.tiers]\nbad = MODULE:nothing\n", source="")
    assert "cannot be imported from" in refusal("bad")


def test_a_broken_plugin_does_not_stop_another(distributions):
    distributions.install_tier("bad", "import no_such_library")
    distributions.install_tier("good", GOOD)
    refusal("bad")
    assert plugins.load_tier("good").name == "good"


@pytest.mark.parametrize(
    "entry_points", ["[kvtiers.tiers]\nnot a pair\n", "no section = x\n", "[kvtiers.tiers]\n = \n"]
)
def test_a_malformed_distribution_does_not_stop_another(distributions, entry_points):
    distributions.install("a-malformed", entry_points)
    distributions.install_tier("good", GOOD)
    assert plugins.load_tier("good").name == "good"


def test_the_distributions_are_read_once_and_again_when_one_was_installed(distributions, caplog):
    distributions.install("a-malformed", "[kvtiers.tiers]\nnot a pair\n")
    distributions.install_tier("good", GOOD)
    assert plugins.installed_tiers() == plugins.installed_tiers()
    (_,) = [line for line in caplog.messages if "cannot be read" in line]
    distributions.install_tier("later", GOOD.replace('"good"', '"later"'))
    assert plugins.load_tier("later").name == "later"


def test_a_tier_is_found_that_was_being_installed_when_the_distributions_were_read(distributions):
    distributions.install_tier("good", GOOD)
    (declared,) = distributions.folder.glob("*/entry_points.txt")
    text = declared.read_text(encoding="utf-8")
    declared.unlink()
    assert "good" not in {entry.name for entry in plugins.installed_tiers()}
    declared.write_text(text, encoding="utf-8")  # the folder itself, which says when it was changed, is as it was
    assert plugins.load_tier("good").name == "good"


def test_a_misspelled_hook_is_named_with_the_right_one(distributions):
    distributions.install_tier("bad", GOOD.replace("def kvtiers_tier", "def kvtiers_teir"))
    assert (
        refusal("bad") == "tier type 'bad' (kvtiers-bad 1.0): unknown hook 'kvtiers_teir'. Did you mean 'kvtiers_tier'?"
    )


def test_a_hook_with_arguments_that_do_not_exist_is_refused(distributions):
    distributions.install_tier("bad", GOOD.replace("kvtiers_tier()", "kvtiers_tier(settings)"))
    assert "settings" in refusal("bad")


def test_a_module_without_a_hook_is_refused(distributions):
    distributions.install_tier("bad", GOOD.replace("@hookimpl", ""))
    assert "no hook 'kvtiers_tier' in" in refusal("bad")


def test_a_hook_that_raises_is_one_line(distributions):
    distributions.install_tier("bad", GOOD.replace("api_version=1", ""))
    text = refusal("bad")
    assert "its hook 'kvtiers_tier' failed: TypeError: " in text
    assert "api_version" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("TierPlugin(name", "dict(name"), "to return a TierPlugin, got {'name': 'good'"),
        (("return", "TierPlugin and"), "to return a TierPlugin, got None"),
        (('name="good"', 'name="better"'), "its TierPlugin is named 'better', expected 'good'"),
        (('kind="store"', 'kind="shop"'), "its kind is 'shop', expected 'store' or 'manager'"),
        (('kind="store"', 'kind=["store"]'), "its kind is ['store'], expected 'store' or 'manager'"),
        (
            ("config=TierConfig", "config=dict"),
            "expected its config to be a subclass of TierConfig, got <class 'dict'>",
        ),
        (("config=TierConfig", "config=7"), "expected its config to be a subclass of TierConfig, got 7"),
        (("open=print", "open=None"), "expected its open to be a function, got None"),
        (("api_version=1", "api_version='1'"), "its api_version is '1', expected the literal number 1"),
        (("api_version=1", "api_version=True"), "its api_version is True, expected the literal number 1"),
    ],
)
def test_a_wrong_answer_of_the_hook_is_refused(distributions, change, said):
    distributions.install_tier("good", GOOD.replace(*change))
    text = refusal("good")
    assert text.startswith("tier type 'good' (kvtiers-good 1.0): ")
    assert said in text


@pytest.mark.parametrize(("number", "install"), [(2, "kvtiers"), (0, "kvtiers-good")])
def test_another_api_number_names_both_and_what_to_install(distributions, number, install):
    distributions.install_tier("good", GOOD.replace("api_version=1", f"api_version={number}, "))
    assert refusal("good") == (
        f"tier type 'good' (kvtiers-good 1.0): it was written for tier API {number}, this kvtiers has tier API 1; "
        f"install a {install} for tier API {max(number, 1)} (pip install --upgrade {install})"
    )


def test_a_plugin_for_an_old_number_that_core_still_has_is_loaded_with_one_warning(distributions, monkeypatch, caplog):
    monkeypatch.setattr(plugins, "API_VERSION", 2)
    monkeypatch.setattr(plugins, "OLD_API_VERSIONS", frozenset({1}))
    distributions.install_tier("good", GOOD, name="kvtiers-good", version=uuid.uuid4().hex)
    assert [plugins.load_tier("good").api_version for _ in range(3)] == [1, 1, 1]
    (line,) = [record for record in caplog.records if record.name == "kvtiers.plugins"]
    assert line.levelname == "WARNING"
    for said in (
        "was written for tier API 1",
        "kvtiers has tier API 2",
        "pip install --upgrade kvtiers-good",
        "works as",
    ):
        assert said in line.getMessage()


def test_a_plugin_for_an_older_number_than_those_is_refused(distributions, monkeypatch):
    monkeypatch.setattr(plugins, "API_VERSION", 3)
    monkeypatch.setattr(plugins, "OLD_API_VERSIONS", frozenset({2}))
    distributions.install_tier("good", GOOD)
    assert "was written for tier API 1, this kvtiers has tier API 3" in refusal("good")


def test_an_unknown_type_is_refused_with_the_closest_and_all_that_are_installed(distributions):
    distributions.install_tier("good", GOOD)
    distributions.install_tier("zebra", GOOD)
    text = refusal("goood")
    assert text.startswith("unknown tier type 'goood'. Did you mean 'good'? Installed tier types: ")
    assert text.endswith("zebra.")


def test_a_type_of_a_distribution_that_belongs_to_this_one_says_what_to_install(monkeypatch):
    monkeypatch.setattr(plugins, "_installed", lambda _: [])
    assert refusal("redis") == (
        "tier type 'redis' comes with kvtiers-redis, which is not installed: "
        "pip install --find-links wheels kvtiers-redis"
    )
    assert refusal("rediss") == "unknown tier type 'rediss'. Did you mean 'redis'? No tier type is installed."


def test_an_unknown_type_that_resembles_nothing_gets_no_suggestion(distributions):
    distributions.install_tier("good", GOOD)
    assert "Did you mean" not in refusal("qqqqqqqqqqqqqqq")


def test_two_distributions_that_claim_one_name_are_both_named(distributions):
    distributions.install_tier("good", GOOD, name="kvtiers-good")
    distributions.install_tier("good", GOOD, name="other-good", version="3.1")
    distributions.install_tier("fine", GOOD.replace('"good"', '"fine"'))
    assert refusal("good") == (
        "tier type 'good' is claimed by kvtiers-good 1.0 and other-good 3.1; uninstall all but one of them"
    )
    assert plugins.load_tier("fine").name == "fine"


def test_one_distribution_found_twice_on_the_path_claims_its_name_once(distributions, monkeypatch):
    distributions.install_tier("good", GOOD)
    monkeypatch.syspath_prepend(f"{distributions.folder}/../{distributions.folder.name}")
    assert plugins.load_tier("good").name == "good"


def test_a_class_is_loaded_from_its_entry_point(distributions):
    group = plugins.EVICTION_GROUP
    distributions.install(
        "policies", f"[{group}]\nfifo = MODULE:Fifo\nbad = MODULE:number\n", source="class Fifo: 'x'\nnumber = 3"
    )
    assert plugins.load_class(group, "fifo", "eviction policy").__name__ == "Fifo"
    assert {"fifo", "bad"} <= set(plugins.installed_names(group))


def test_a_class_that_cannot_be_loaded_is_one_line(distributions):
    group = plugins.EVICTION_GROUP
    distributions.install("policies", f"[{group}]\nfifo = MODULE:Fifo\nnumber = MODULE:number\n", source="number = 3")
    for name, said in [
        ("number", "eviction policy 'number' (policies 1.0): expected the entry point 'kvtiers_test_module_"),
        ("fifo", "eviction policy 'fifo' (policies 1.0) cannot be imported"),
        ("fif", "unknown eviction policy 'fif'. Did you mean 'fifo'? Installed eviction policies: "),
    ]:
        with pytest.raises(TierPluginError) as caught:
            plugins.load_class(group, name, "eviction policy")
        assert str(caught.value).startswith(said)


def test_nothing_installed_says_so():
    with pytest.raises(TierPluginError, match=r"unknown gadget 'x'\. No gadget is installed\."):
        plugins.load_class("kvtiers.no_such_group", "x", "gadget")


COMMAND = """
from kvtiers.api.command import CommandPlugin
GREET = CommandPlugin(name="greet", help="Greet.", target="MODULE:greet", api_version={version})
import click
@click.command()
def greet():
    click.echo("hello")
"""


def install_command(distributions, version: int, name: str = "greet") -> None:
    module = distributions.install("kvtiers-greet", f"[kvtiers.commands]\n{name} = MODULE:GREET\n", source="")
    source = COMMAND.format(version=version).replace("MODULE", module)
    (distributions.folder / f"{module}.py").write_text(source, encoding="utf-8")


def test_a_companions_command_is_listed_and_runs(distributions):
    install_command(distributions, 1)
    assert "greet" in CliRunner().invoke(cli, ["--help"]).output
    assert CliRunner().invoke(cli, ["greet"]).output == "hello\n"


def test_a_command_for_another_api_is_one_line_and_the_others_stay(distributions):
    install_command(distributions, 2)
    with pytest.raises(TierPluginError, match=r"command API 2, this kvtiers has command API 1; install a kvtiers for"):
        plugins.load_command("greet")
    listed = CliRunner().invoke(cli, ["--help"])
    assert listed.exit_code == 0
    assert "(unusable: command 'greet' (kvtiers-greet 1.0): it was" in " ".join(listed.output.split())
    refused = CliRunner().invoke(cli, ["greet"])
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)


def test_an_entry_point_that_is_no_command_is_one_line(distributions):
    distributions.install("kvtiers-odd", "[kvtiers.commands]\nodd = MODULE:ODD\n", source="ODD = 5\n")
    with pytest.raises(TierPluginError, match=r"to be a CommandPlugin, got 5"):
        plugins.load_command("odd")


def test_a_command_that_is_named_otherwise_is_one_line(distributions):
    install_command(distributions, 1, name="welcome")
    with pytest.raises(TierPluginError, match=r"named 'greet', expected 'welcome'"):
        plugins.load_command("welcome")


def test_a_companion_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("kvtiers.cli.main.installed_names", lambda _group: [])
    refused = CliRunner().invoke(cli, ["replay", "--help"])
    assert refused.exit_code == 2
    assert refused.stderr == (
        "error: the command 'replay' comes with kvtiers-replay, which is not installed: "
        "pip install --find-links wheels 'kvtiers[replay]'\n"
    )
