"""What kvtiers' whole stack has to know of the engine that it is built in."""

from types import SimpleNamespace

import pytest

from kvtiers.api import StartError

from . import fake_vllm


@pytest.fixture
def weights_version_of(monkeypatch):
    return fake_vllm.load(monkeypatch, "stack.spec", "0.32.0").weights_version_of


def test_the_weights_version_is_the_engine_cores(weights_version_of):
    versions = iter(["", "2"])
    version = weights_version_of(SimpleNamespace(get_weight_version=lambda: next(versions)))
    assert [version(), version()] == ["", "2"]


def test_an_engine_whose_weights_version_cannot_be_known_does_not_start(weights_version_of):
    with pytest.raises(StartError, match=r"vLLM 0\.32\.0 .* updated in place would go unseen"):
        weights_version_of(None)
