"""A validated tier config goes to another process as JSON and comes back the same."""

import json

import pytest
from pydantic import Field, ValidationError

from kvtiers.api import Duration, Secret, Share, Size, TierConfig
from kvtiers.api.config import dump_resolved, load_resolved


class ShelfConfig(TierConfig):
    path: str
    size: Size = 1
    ttl: Duration | None = None
    part: Share = 0.5
    password: Secret | None = None
    keys: tuple[Secret, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    limit: float | None = Field(default=None, gt=0)


def through_json(config: ShelfConfig) -> ShelfConfig:
    return load_resolved(ShelfConfig, json.loads(json.dumps(dump_resolved(config))))


def test_a_config_survives_the_way_to_another_process(monkeypatch, tmp_path):
    monkeypatch.setenv("KVTIERS_TEST_SECRET", "hunter2")
    (tmp_path / "key").write_text("hunter3\n")
    config = ShelfConfig.model_validate(
        {
            "type": "shelf", "path": "/a", "size": "3GiB", "ttl": "100us", "part": "0.001%", "limit": 2.5,
            "password": "${KVTIERS_TEST_SECRET}", "keys": ["plain", {"file": f"{tmp_path}/key"}],
            "labels": {"a": "b"}, "deadline": "1m", "rate_limit": {"bytes_per_second": 9007199254740993},
        }
    )  # fmt: skip
    monkeypatch.delenv("KVTIERS_TEST_SECRET")
    copy = through_json(config)
    assert copy == config
    assert copy.rate_limit.bytes_per_second == 2**53 + 1
    assert [copy.password.reveal(), *(key.reveal() for key in copy.keys)] == ["hunter2", "plain", "hunter3"]
    assert copy.password.source == "${KVTIERS_TEST_SECRET}"


def test_a_secret_in_a_file_is_read_again_where_it_arrives(tmp_path):
    (tmp_path / "key").write_text("old\n")
    config = ShelfConfig.model_validate({"type": "shelf", "path": "/a", "password": {"file": f"{tmp_path}/key"}})
    copy = through_json(config)
    (tmp_path / "key").write_text("new\n")
    assert copy.password.reveal() == "new"


def test_text_that_looks_like_a_variable_is_not_read_again(monkeypatch):
    monkeypatch.setenv("KVTIERS_TEST_PATH", "/${NOT_A_VARIABLE_HERE}")
    monkeypatch.setenv("KVTIERS_TEST_SECRET", "pa${ss")
    config = ShelfConfig.model_validate(
        {"type": "shelf", "path": "${KVTIERS_TEST_PATH}", "password": "${KVTIERS_TEST_SECRET}"}
    )
    copy = through_json(config)
    assert (copy.path, copy.password.reveal()) == ("/${NOT_A_VARIABLE_HERE}", "pa${ss")


def test_a_duration_that_json_made_an_integer_is_still_seconds():
    data = dump_resolved(ShelfConfig(type="shelf", path="/a"))
    assert load_resolved(ShelfConfig, data | {"deadline": 7}).deadline == 7.0


def test_a_resolved_config_is_still_checked():
    data = dump_resolved(ShelfConfig(type="shelf", path="/a"))
    for change in ({"deadline": -1.0}, {"threads": 0}, {"surprise": 1}, {"deadline": "x"}):
        with pytest.raises(ValidationError):
            load_resolved(ShelfConfig, data | change)
