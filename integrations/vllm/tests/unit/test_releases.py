"""Which releases of vLLM are supported, and what stands for their layout."""

import re
from pathlib import Path

import pytest

from kvtiers.api import StartError
from kvtiers_vllm.releases import RELEASES, public_version, release_of


@pytest.mark.parametrize("version", ["0.28.0", "0.30.0", "0.32.0+cpu", "0.33.0", "0.33.1.dev3"])
def test_a_release_between_the_first_and_the_last_is_known(version):
    assert release_of(version).version == version[:4]


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0", "", "dev"])
def test_any_other_is_refused_by_a_sentence_that_names_those(version):
    with pytest.raises(StartError, match=r"does not support vLLM .*; it supports vLLM 0\.28 to 0\.33") as refused:
        release_of(version)
    assert version in str(refused.value)


def test_a_release_that_no_test_runs_shares_nothing():
    epochs = [
        RELEASES["0.32"].epoch("0.32.0"),
        RELEASES["0.32"].epoch("0.32.1"),
        RELEASES["0.31"].epoch("0.31.0"),
        RELEASES["0.29"].epoch("0.29.0"),
        RELEASES["0.30"].epoch("0.30.0"),
    ]
    assert len(set(epochs)) == 5
    assert RELEASES["0.32"].epoch(public_version("0.32.0+cpu")) == epochs[0]


def test_the_table_in_the_docs_says_what_is_known_of_each_release():
    text = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text()
    said = {
        cells[0]: (
            cells[1] == "both",
            re.findall(r"\d+\.\d+\.\d+", cells[2]),
            cells[3] == "random",
            cells[4] == "with a tag",
        )
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
        if re.fullmatch(r"\d+\.\d+", cells[0])
    }
    assert said == {
        version: (release.whole_stack, list(release.tested), release.random_seed, release.tags_salt)
        for version, release in RELEASES.items()
    }
