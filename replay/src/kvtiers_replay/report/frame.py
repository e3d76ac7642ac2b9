"""The frame of a page: Jinja2's templates in ``templates/``, with every name and text escaped."""

from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvtiers_replay.report.drawing import Drawing

__all__ = ["Figure", "render"]

_templates = Environment(
    loader=PackageLoader("kvtiers_replay.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)


class Figure(NamedTuple):
    """A drawing with its caption; ``wide``: over the whole page."""

    title: str
    note: str
    drawing: Drawing
    wide: bool = False


def render(template: str, **values: Any) -> str:
    """Return a page of this template; every page has a ``title`` and a line ``about`` it."""
    return _templates.get_template(template).render(values)
