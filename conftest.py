"""Settings of every test of the project, also of the engines' suites and of a folder that runs by itself."""

import contextlib
import os
import signal


def pytest_configure() -> None:
    """Choose how signals and property tests behave, before anything is collected."""
    # A shell has what it starts in the background ignore SIGINT, and so would each program that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(ImportError):  # not in every environment that runs some of the tests
        from hypothesis import HealthCheck, settings

        # The same examples in each run, so that nothing but a change turns a test red; `make test-explore` draws new
        # ones, and ten times as many where a test does not say how many it can bear. An example that takes long, to
        # make or to run, says something of the machine only.
        explores = "KVTIERS_EXPLORE" in os.environ
        examples = 1_000 if explores else 100
        settings.register_profile(
            "any-machine",
            deadline=None,
            derandomize=not explores,
            max_examples=examples,
            suppress_health_check=[HealthCheck.too_slow],
        )
        settings.load_profile("any-machine")
