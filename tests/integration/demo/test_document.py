"""The page on engines of one's own shows code that runs: each block of it stands in the demo, word by word."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "your-own-engine.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_code_on_the_page_is_the_demos(block):
    assert block in (ROOT / "examples" / "demo" / "tiered.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"scheduler\.(\w+)\(", PAGE))))
def test_every_call_that_the_page_names_is_there(name):
    from kvtiers.scheduler import OffloadScheduler

    assert callable(getattr(OffloadScheduler, name))
