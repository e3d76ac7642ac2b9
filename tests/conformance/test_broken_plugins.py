"""A promise that a plugin breaks is named by the kit's test for it."""

import pytest

ENTRY_MODULE = """
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field

from kvtiers.api import API_VERSION, Duration, Secret, TierConfig, TierPlugin, hookimpl


class Config(TierConfig):
    password: Secret | None = Field(default=None, description="of the backend")


def open_tier(config, context):
    from kvtiers_example.memory_store import MemoryStore

    return MemoryStore(1 << 26)


@hookimpl
def kvtiers_tier():
    return TierPlugin(name="NAME", kind="store", config=Config, open=open_tier, api_version=1)
"""
OPTION = "    password: Secret"
OPTION_IN_PAGES = """
    length: Annotated[int, BeforeValidator(lambda text: int(text.removesuffix(" pages")))] = Field(
        default="2 pages", validate_default=True, description="of the backend")
"""
DEADLINE = 'TierConfig.model_fields["deadline"].description'
NEEDS_THE_HOOK = {
    "test_core_takes_the_plugin",
    "test_the_api_number_is_a_literal_and_the_current_one",
    "test_an_unknown_option_is_refused",
    "test_a_validated_config_never_changes",
    "test_every_option_says_what_it_means",
    "test_secrets_are_not_printed",
    "test_the_options_reach_a_tier_host_unchanged",
    "test_open_returns_what_the_kind_says",
}

PLUGINS = {  # name: (text in the entry module, what stands there instead, the tests that must catch it)
    "Healthy": ("", "", set()),
    "ImportsAClient": ("import Annotated", "import Annotated\nimport xxhash", {
        "test_the_entry_module_imports_no_client_library"}),
    "ImportsCoreItself": ("import Annotated", "import Annotated\nimport kvtiers.metrics", {
        "test_the_entry_module_imports_no_client_library"}),
    "ClaimsAnyContract": ("api_version=1", "api_version=API_VERSION", {
        "test_the_api_number_is_a_literal_and_the_current_one"}),
    "IsOfAnotherContract": ("api_version=1", "api_version=999", {
        "test_the_api_number_is_a_literal_and_the_current_one", "test_core_takes_the_plugin"}),
    "TakesAnyOption": (OPTION, f'    model_config = ConfigDict(extra="allow")\n{OPTION}', {
        "test_an_unknown_option_is_refused"}),
    "IgnoresOptions": (OPTION, f'    model_config = ConfigDict(extra="ignore")\n{OPTION}', {
        "test_an_unknown_option_is_refused"}),
    "ChangesItsConfig": (OPTION, f"    model_config = ConfigDict(frozen=False)\n{OPTION}", {
        "test_a_validated_config_never_changes"}),
    "HasItsOwnNice": (OPTION, f'    nice: int = Field(default=5, description="of the server")\n{OPTION}', {
        "test_core_takes_the_plugin"}),
    "ChangesADefault": (OPTION, f"    deadline: Duration = Field(9.0, description={DEADLINE})\n{OPTION}", set()),
    "DescribesNothing": (OPTION, f"    depth: int = 1\n{OPTION}", {
        "test_every_option_says_what_it_means"}),
    "PrintsAPassword": ("password: Secret | None = Field(default=None", 'password: str = Field(default=""', {
        "test_secrets_are_not_printed"}),
    "PrintsAToken": (OPTION, f'    auth_token: str = Field(default="", description="of the API")\n{OPTION}', {
        "test_secrets_are_not_printed"}),
    "ReadsOptionsOnce": (OPTION, f"{OPTION_IN_PAGES}\n{OPTION}", {
        "test_the_options_reach_a_tier_host_unchanged"}),
    "OpensAnotherKind": ('kind="store"', 'kind="manager"', {
        "test_open_returns_what_the_kind_says"}),
    "HasAnotherName": ('name="HasAnotherName"', 'name="has-another-name"', {
        "test_core_takes_the_plugin"}),
    "MisspellsTheHook": ("def kvtiers_tier", "def kvtiers_teir", NEEDS_THE_HOOK),
    "CannotBeImported": ("import Annotated", "import NoSuchThing", {
        *NEEDS_THE_HOOK, "test_the_entry_module_imports_no_client_library"}),
}  # fmt: skip

TEST_CLASS = """
class TestNAME(TierPluginTests):
    @pytest.fixture
    def tier_options(self):
        return {"type": "NAME"}
"""

MISTAKEN_OPTIONS = """
class TestMistakenOptions(TierPluginTests):
    @pytest.fixture
    def tier_options(self):
        return {"type": "Healthy", "pasword": "secret"}
"""


@pytest.fixture(scope="module")
def report(run_kit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    package, info = folder / "broken_plugins", folder / "broken_plugins-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    for name, (text, instead, _) in PLUGINS.items():
        source = ENTRY_MODULE.replace("NAME", name)
        assert text in source
        (package / f"{name.lower()}.py").write_text(source.replace(text, instead) if text else source)
    entries = "\n".join(f"{name} = broken_plugins.{name.lower()}" for name in PLUGINS)
    (info / "entry_points.txt").write_text(f"[kvtiers.tiers]\n{entries}\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugins\nVersion: 1.0\n")
    file = folder / "test_plugins.py"
    classes = "".join(TEST_CLASS.replace("NAME", name) for name in [*PLUGINS, "NotInstalled"])
    file.write_text(f"import pytest\nfrom kvtiers.testing import TierPluginTests\n{classes}{MISTAKEN_OPTIONS}")
    return run_kit(file, path=[folder])


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_broken_plugin_is_caught_by_the_test_that_names_the_promise(report, assert_caught, plugin):
    assert_caught(report, plugin, PLUGINS[plugin][2])


def test_every_test_of_the_kit_catches_some_plugin(report):
    every = {test for name in PLUGINS for tests in report.tests[f"Test{name}"].values() for test in tests}
    assert every == set().union(*(must for _, _, must in PLUGINS.values()))


def test_a_misspelled_hook_is_named(report):
    message = report.messages["TestMisspellsTheHook", "test_core_takes_the_plugin"]
    assert "unknown hook 'kvtiers_teir'. Did you mean 'kvtiers_tier'?" in message


def test_a_plugin_that_is_not_installed_is_named_as_missing(report):
    assert not report.tests["TestNotInstalled"]["passed"]
    message = report.messages["TestNotInstalled", "test_an_unknown_option_is_refused"]
    assert "no installed distribution has an entry point 'NotInstalled'" in message
    assert "pip install -e ." in message


@pytest.mark.parametrize(
    "test",
    [
        "test_an_unknown_option_is_refused",
        "test_a_validated_config_never_changes",
        "test_the_options_reach_a_tier_host_unchanged",
        "test_open_returns_what_the_kind_says",
    ],
)
def test_options_that_the_plugin_refuses_are_the_tests_mistake_in_one_line(report, test):
    """As after the options were changed, and the tests were not."""
    message = report.messages["TestMistakenOptions", test]
    assert "TestMistakenOptions: 'tier_options' returns what Config refuses: pasword: Extra inputs" in message
    assert "Its own options: password" in message
    assert "Traceback" not in message
    assert "secret" not in message
