"""A tier type with an option of each kind, and a config file that uses it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtiers.api import ConfigError
from kvtiers.config import load_config

MINIMAL = "version: 1\nprimary: {capacity: 1GiB}\n"

OPTIONS = """
path: str
capacity: Size | None = Field(default=None, gt=0, description="most bytes of values")
ttl: Duration = 60.0
fill: Share = 0.5
password: Secret | None = None
keys: list[Secret] = []
nodes: list[str] = []
labels: dict[str, str] = {}
sync: bool = False
speed: float = Field(default=1.0, le=10)
"""

FULL = """\
version: 1
namespace: prod
model:
  name: meta-llama/Llama-3.1-8B-Instruct
  revision: 0e9e39f
  kv_dtype: bfloat16
  hash_bytes: 32
primary:
  capacity: 64GiB
  eviction: lru
  huge_pages: off
  numa_node: 0
  prefault: true
  start_deadline: 60s
secondary:
  - type: shelf
    path: /var/cache/kvtiers
    capacity: 500GiB
    ttl: 24h
    fill: 80%
    password: "words"
    keys: [one, two]
    nodes: [here, there]
    labels: {rack: a1}
    sync: true
    speed: 2.5
    breaker: {failures: 3, window: 20s}
    rate_limit: {bytes_per_second: 1GB}
  - type: shelf
    name: second
    path: /mnt
    io: thread
    read_only: true
    threads: 8
    deadline: 10s
    admission: second_access
lookup_wait: 20ms
load_wait: auto
budgets:
  store_reserve: 10%
  all_tiers: 50%
  one_tier: 25%
  protected: 40%
  protect_for: 10s
clean_reserve: 5%
record:
  path: /var/log/kvtiers/trace.jsonl
  max_bytes: 2GB
"""


@pytest.fixture
def shelf(distributions):
    """Install the tier type ``shelf``; return the name of its entry module."""
    return distributions.tier("shelf", options=OPTIONS)


@pytest.fixture
def full() -> str:
    return FULL


@pytest.fixture
def tiers_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test writes its file; the same name from the current directory, so that lines begin with it."""
    monkeypatch.chdir(tmp_path)
    return Path("tiers.yaml")


@pytest.fixture
def wrong(tiers_yaml: Path, shelf: str) -> Callable[[str], list[str]]:
    """Load this YAML, which must be refused; return its lines without the file's name."""

    def load(text: str) -> list[str]:
        tiers_yaml.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config(tiers_yaml)
        lines = caught.value.problems
        assert all(line.startswith("tiers.yaml: ") for line in lines)
        return [line.removeprefix("tiers.yaml: ") for line in lines]

    return load


@pytest.fixture
def with_tier() -> Callable[[str], str]:
    """Return a function: lines of options -> a config with a tier of the type ``shelf`` that has them."""

    def build(options: str) -> str:
        lines = "".join(f"    {line}\n" for line in options.strip().splitlines())
        return f"{MINIMAL}secondary:\n  - type: shelf\n    path: /a\n{lines}"

    return build
