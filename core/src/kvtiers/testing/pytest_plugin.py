"""The kit's pytest plugin: tests that do not apply are not collected, and tests that hang fail.

Loaded in every pytest run of an environment that has kvtiers, so it imports pytest alone and looks only at plain
functions that carry the kit's mark (see ``kvtiers.testing.applies``).
"""

from functools import partial
from inspect import signature
from types import FunctionType

import pytest

pytest.register_assert_rewrite(
    "kvtiers.testing.chunk_store", "kvtiers.testing.secondary_tier", "kvtiers.testing.tier_plugin"
)


def pytest_pycollect_makeitem(collector: object, obj: object) -> list[pytest.Item] | None:
    """Collect nothing for a test of the kit that does not apply to this subclass; None: not a test of the kit."""
    applies_to = obj.__dict__.get("kvtiers_applies_to") if isinstance(obj, FunctionType) else None
    if applies_to is None or not isinstance(collector, pytest.Class):
        return None
    try:
        return None if applies_to(collector.obj) else []
    except AttributeError as error:
        raise collector.CollectError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of the kit in a thread, so that one which hangs fails; None: not a test of the kit."""
    __tracebackhide__ = True
    if not str(getattr(pyfuncitem.function, "__module__", "")).startswith("kvtiers.testing."):
        return None
    from kvtiers.testing.running import run_test  # imported here: only the kit's own tests need it

    arguments = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    run_test(partial(pyfuncitem.obj, **arguments), pyfuncitem.cls)
    return True
