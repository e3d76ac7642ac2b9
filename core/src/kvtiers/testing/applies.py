"""The selection of the kit's tests: which apply to which subclass. The pytest plugin asks when it collects them."""

from collections.abc import Callable
from typing import Any, TypeVar

from kvtiers.api.declared import members_of

__all__ = ["applies_to", "supports"]

_Test = TypeVar("_Test", bound=Callable[..., object])
_MARK = "kvtiers_applies_to"


def applies_to(condition: Callable[[Any], bool]) -> Callable[[_Test], _Test]:
    """Collect the test only in subclasses for which ``condition(subclass)`` holds."""

    def mark(test: _Test) -> _Test:
        setattr(test, _MARK, condition)
        return test

    return mark


def supports(ability: type) -> Callable[[_Test], _Test]:
    """Collect the test only where the tested ``store_class`` has this ability (a runtime Protocol)."""

    def has_ability(tests: Any) -> bool:
        store_class = getattr(tests, "store_class", None)
        if store_class is None:
            raise AttributeError(
                f"{tests.__name__}: set 'store_class' to your ChunkStore's class; its abilities decide what is tested"
            )
        return all(getattr(store_class, name, None) is not None for name in members_of(ability))

    return applies_to(has_ability)
