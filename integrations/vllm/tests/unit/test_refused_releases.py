"""A vLLM that is not supported is refused with a sentence, whatever names of its own it has changed."""

import pytest

from kvtiers.api import StartError

from . import fake_vllm

EACH = [(module, name) for module, names in fake_vllm.NAMES.items() for name in names]


@pytest.mark.parametrize(("module", "name"), EACH)
def test_a_release_that_lacks_a_name_is_refused_by_its_version(monkeypatch, module, name):
    with pytest.raises(StartError, match=r"does not support vLLM 0\.34\.0; it supports vLLM 0\.28 to"):
        fake_vllm.load(monkeypatch, module, "0.34.0", without=name)


def test_a_tier_is_refused_by_its_version_also_where_no_name_is_lacking(monkeypatch):
    with pytest.raises(StartError, match=r"does not support vLLM 0\.34\.0"):
        fake_vllm.load(monkeypatch, "own_tiering.tier", "0.34.0")


@pytest.mark.parametrize(
    ("module", "name"), [("stack.spec", "OffloadingSpec"), ("stack.connector", "OffloadingConnector")]
)
def test_a_release_that_is_not_for_the_whole_stack_is_refused_by_its_version_if_it_lacks_a_name(
    monkeypatch, module, name
):
    with pytest.raises(StartError, match=r"KvtiersConnector runs on vLLM .*, not on 0\.28\.0"):
        fake_vllm.load(monkeypatch, module, "0.28.0", without=name)


@pytest.mark.parametrize(("module", "name"), EACH)
def test_a_supported_release_that_lacks_a_name_says_which(monkeypatch, module, name):
    with pytest.raises(ImportError, match=name):
        fake_vllm.load(monkeypatch, module, "0.32.0", without=name)


@pytest.mark.parametrize("module", fake_vllm.NAMES)
def test_a_supported_release_that_has_them_all_is_taken(monkeypatch, module):
    assert fake_vllm.load(monkeypatch, module, "0.32.0").__all__
