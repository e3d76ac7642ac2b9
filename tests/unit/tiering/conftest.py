import pytest

from .harness import Bench


@pytest.fixture(autouse=True)
def _no_tier_was_asked_what_none_may_be_asked():
    Bench.all.clear()
    yield
    violations = [what for bench in Bench.all for what in bench.violations()]
    Bench.all.clear()
    assert not violations
