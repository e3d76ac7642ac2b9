"""Tables of all options, from the config models themselves, for the documentation's reference.

``python tools/option_tables.py`` prints the page; the documentation's build calls ``options_page``. A tier type appears
when its plugin is installed.
"""

import inspect
from collections.abc import Iterable

from kvtiers.api import TierConfig
from kvtiers.config.models import OffloadConfig
from kvtiers.config.options import Option, models_in, options_of
from kvtiers.plugins import distribution_of, installed_tiers, load_tier

INTRODUCTION = """# Options

Every option of the configuration file with its type, default and meaning, generated from the models that validate it.
`kvtiers tiers` prints the same for the tiers that are installed, `kvtiers tiers --json-schema` a schema for an editor.
An option with a dot in its name lies within another: `primary.capacity` is `capacity` under `primary:`.
*Live*: `kvtiers ctl reload` applies it to a running engine.
"""


def options_page() -> str:
    """Return the page in Markdown: the file's own options, those of every tier, then those of each installed type."""
    common = options_of(TierConfig)
    parts = [INTRODUCTION, "## The file\n", table(options_of(OffloadConfig))]
    for name, field in OffloadConfig.model_fields.items():
        if field.default is None:  # a section that a file may leave out
            for model in models_in(field.annotation):
                parts += [f"## The section `{name}`\n", f"{inspect.getdoc(model)}\n", table(options_of(model))]
    parts += ["## Options of every tier\n", "An entry under `secondary:` takes these beside its own.\n", table(common)]
    for entry in installed_tiers():
        own = [option for option in options_of(load_tier(entry.name).config) if option not in common]
        package = distribution_of(entry).partition(" ")[0]
        parts += [f"## Tier type `{entry.name}`\n", f"From `{package}`.\n", table(own)]
    return "\n".join(parts)


def table(options: Iterable[Option]) -> str:
    """Return these options as one Markdown table, a row each."""
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in options:
        default = "**required**" if option.required else _code(option.default)
        live = "; *live*" if option.live else ""
        rows.append(f"| {_code(option.name)} | {_text(option.type)} | {default} | {_text(option.description)}{live} |")
    return "\n".join(rows) + "\n"


def _code(text: str) -> str:
    return f"`{_text(text)}`" if text else ""


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(options_page())
