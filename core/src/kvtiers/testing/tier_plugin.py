"""The conformance tests of a tier plugin: its entry module and its options.

::

    class TestMyPlugin(TierPluginTests):
        @pytest.fixture
        def tier_options(self):
            return {"type": "my-tier", "url": "my://localhost"}
"""

import ast
import inspect
import json
import mmap
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, ClassVar, get_args

import pytest
from pydantic import BaseModel, ValidationError

from kvtiers.api import API_VERSION, ChunkStore, SecondaryTierManager, Secret, TierConfig, TierContext, TierPlugin
from kvtiers.api.config import dump_resolved, load_resolved
from kvtiers.plugins import installed_tiers, load_tier

__all__ = ["TierPluginTests"]

Options = dict[str, Any]

_CANARY = "kvtiers-canary-8f3a"
_VALUE_BYTES = 2 << 20
_SECRET_NAME = re.compile(r"(^|_)(password|passwd|passphrase|secret|token|credential|credentials|private_key)($|_key$)")

_NEW_MODULES = """
import json, sys
module, sys.path[:] = json.load(sys.stdin)
import kvtiers.api
before = set(sys.modules)
import importlib
importlib.import_module(module)
print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
"""


class TierPluginTests:
    """Subclass it and give the fixture ``tier_options``.

    ``tier_options`` returns the options of one tier, as they stand in a YAML file, ``type`` included; they must be
    enough to open the tier. The plugin must be installed (``pip install -e .`` will do). ``patience``: of which a test
    may take three times before it counts as hung.
    """

    patience: ClassVar[float] = 90.0

    @pytest.fixture
    def tier_options(self) -> Options:
        """Return the options of one tier of this type; the author's subclass overrides this."""
        raise pytest.UsageError(
            f"{type(self).__name__}: define a fixture 'tier_options' that returns the options of a tier, as in YAML"
        )

    @pytest.fixture
    def entry(self, tier_options: Options) -> EntryPoint:
        """Return the plugin's entry point."""
        found = [entry for entry in installed_tiers() if entry.name == tier_options["type"]]
        assert found, (
            f"no installed distribution has an entry point {tier_options['type']!r} in the group 'kvtiers.tiers'; "
            "declare it in pyproject.toml and run 'pip install -e .'"
        )
        return found[0]

    @pytest.fixture
    def module(self, entry: EntryPoint) -> ModuleType:
        """Return the entry module."""
        module = entry.load()
        assert isinstance(module, ModuleType), f"the entry point leads to {module!r}; expected a module with the hook"
        return module

    @pytest.fixture
    def plugin(self, module: ModuleType) -> TierPlugin:
        """Return what the hook returns, whether core would take it or not."""
        plugin: TierPlugin = module.kvtiers_tier()
        return plugin

    @pytest.fixture
    def valid_config(self, plugin: TierPlugin, tier_options: Options) -> TierConfig:
        """Return the options as the plugin has them."""
        try:
            return plugin.config.model_validate(tier_options)
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
        problems = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details)
        own = ", ".join(sorted(plugin.config.model_fields.keys() - TierConfig.model_fields.keys())) or "none"
        pytest.fail(
            f"{type(self).__name__}: 'tier_options' returns what {plugin.config.__name__} refuses: {problems}. "
            f"Its own options: {own}",
            pytrace=False,
        )

    def test_core_takes_the_plugin(self, tier_options: Options) -> None:
        assert isinstance(load_tier(tier_options["type"]), TierPlugin)

    def test_the_api_number_is_a_literal_and_the_current_one(self, module: ModuleType, plugin: TierPlugin) -> None:
        given = [
            keyword.value
            for call in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(call, ast.Call)
            for keyword in call.keywords
            if keyword.arg == "api_version"
        ]
        assert given, "the entry module states no api_version=... where it makes its TierPlugin"
        assert all(isinstance(value, ast.Constant) for value in given), (
            "api_version is computed or imported, so it would claim any contract; write the number itself"
        )
        assert plugin.api_version == API_VERSION, (
            f"the plugin is for tier API {plugin.api_version}, this kvtiers has tier API {API_VERSION}"
        )

    def test_the_entry_module_imports_no_client_library(self, entry: EntryPoint) -> None:
        task = json.dumps([entry.module, sys.path])
        command = [sys.executable, "-c", _NEW_MODULES]
        done = subprocess.run(  # noqa: S603 -- our own interpreter
            command, input=task, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, f"the entry module cannot be imported: {done.stderr[-2000:]}"
        before, new = json.loads(done.stdout)
        own = {entry.module.partition(".")[0], *(name.partition(".")[0] for name in before)} - {"kvtiers"}
        allowed = own | sys.stdlib_module_names
        foreign = [
            name
            for name in new
            if name.partition(".")[0] not in allowed and not (name + ".").startswith("kvtiers.api.")
        ]
        assert not foreign, (
            f"the entry module imports {', '.join(foreign[:8])}; the engine loads it for the options alone, so import "
            "what the store needs within open, and of kvtiers only kvtiers.api"
        )

    @pytest.mark.usefixtures("valid_config")
    def test_an_unknown_option_is_refused(self, plugin: TierPlugin, tier_options: Options) -> None:
        with pytest.raises(ValidationError) as refusal:
            plugin.config.model_validate({**tier_options, "no_such_option": 1})
        assert [error["type"] for error in refusal.value.errors()] == ["extra_forbidden"]

    def test_a_validated_config_never_changes(self, valid_config: TierConfig) -> None:
        option = "type"
        with pytest.raises(ValidationError):
            setattr(valid_config, option, "another")

    def test_every_option_says_what_it_means(self, plugin: TierPlugin) -> None:
        silent = [name for name, field in plugin.config.model_fields.items() if not field.description]
        assert not silent, f"'kvtiers tiers' shows what options mean; give {', '.join(silent)} a Field(description=...)"

    def test_secrets_are_not_printed(self, plugin: TierPlugin, tier_options: Options) -> None:
        for name in _secret_options(plugin.config):
            try:
                config = plugin.config.model_validate({**tier_options, name: _CANARY})
            except ValidationError:
                continue  # not a text, so no secret after all
            shown = [repr(config), str(config), repr(config.model_dump()), config.model_dump_json()]
            assert not any(_CANARY in text for text in shown), (
                f"the option {name!r} is printed with the config, so it ends up in logs; make it a kvtiers.api.Secret"
            )

    def test_the_options_reach_a_tier_host_unchanged(self, plugin: TierPlugin, valid_config: TierConfig) -> None:
        sent = json.dumps(dump_resolved(valid_config))
        assert load_resolved(plugin.config, json.loads(sent)) == valid_config

    def test_open_returns_what_the_kind_says(self, plugin: TierPlugin, valid_config: TierConfig) -> None:
        expected = {"store": ChunkStore, "manager": SecondaryTierManager}[plugin.kind]
        tier = plugin.open(valid_config, _context(valid_config))
        try:
            assert isinstance(tier, expected), (
                f"kind {plugin.kind!r} opens a {expected.__name__}, not a {type(tier).__name__}"
            )
        finally:
            tier.close()


def _secret_options(config: type[BaseModel]) -> list[str]:
    """Return the options that hold a secret, by their type or by what their name says."""
    return [
        name
        for name, field in config.model_fields.items()
        if Secret in {field.annotation, *get_args(field.annotation)} or _SECRET_NAME.search(name)
    ]


def _context(config: TierConfig) -> TierContext:
    return TierContext(
        tier_name=config.tier_name,
        value_bytes=_VALUE_BYTES,
        namespace="kvtiers-kit",
        read_only=False,
        region=memoryview(mmap.mmap(-1, 4 * _VALUE_BYTES)),
        row_stride=_VALUE_BYTES,
    )
