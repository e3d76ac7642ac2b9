"""The pytest plugin of the kit: a test for an ability that a store does not have is not collected at all.

Loaded in every pytest run of an environment that has kvtiers, so it imports pytest alone and looks only at plain
functions that carry the kit's mark (see ``kvtiers.testing.applies``).
"""

from types import FunctionType

import pytest

pytest.register_assert_rewrite(
    "kvtiers.testing.chunk_store", "kvtiers.testing.secondary_tier", "kvtiers.testing.tier_plugin"
)


def pytest_pycollect_makeitem(collector: object, obj: object) -> list[pytest.Item] | None:
    """Collect nothing for a test of the kit that does not apply to this subclass; None: not our business."""
    applies_to = obj.__dict__.get("kvtiers_applies_to") if isinstance(obj, FunctionType) else None
    if applies_to is None or not isinstance(collector, pytest.Class):
        return None
    try:
        return None if applies_to(collector.obj) else []
    except AttributeError as error:
        raise collector.CollectError(str(error)) from None
