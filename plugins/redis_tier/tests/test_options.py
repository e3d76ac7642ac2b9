"""The options: what is accepted, and what one clear line refuses."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvtiers.api import TierConfig
from kvtiers.config.options import options_of
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.places import is_loopback, parse_url

URL = "redis://cache:6379"
README = Path(__file__).parents[1] / "README.md"
KINDS = {"true or false": "boolean", "number": "integer"}


def config(url=URL, **options) -> RedisConfig:
    return RedisConfig(type="redis", url=url, **options)


@pytest.mark.parametrize(
    ("url", "tls", "addresses", "path", "database"),
    [
        ("redis://cache", False, (("cache", 6379),), "", None),
        ("redis://cache/", False, (("cache", 6379),), "", None),
        ("rediss://cache.internal:6380/7", True, (("cache.internal", 6380),), "", 7),
        ("redis://a:1,b,[::1]:3/0", False, (("a", 1), ("b", 6379), ("::1", 3)), "", 0),
        ("unix:///run/redis/redis.sock", False, (), "/run/redis/redis.sock", None),
    ],
)
def test_a_url_says_where_the_servers_are(url, tls, addresses, path, database):
    places = parse_url(url)
    assert (places.tls, places.addresses, places.path, places.database) == (tls, addresses, path, database)


def test_sentinels_have_a_port_of_their_own():
    assert config("redis://a,b:1", topology="sentinel").places.addresses == (("a", 26379), ("b", 1))


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        ("expected redis://", {"url": "cache:6379"}),
        ("expected redis://", {"url": "http://cache"}),
        ("expected redis://", {"url": "redis://"}),
        ("expected redis://", {"url": "redis://a:99999"}),
        ("expected redis://", {"url": "redis://a:0"}),
        ("expected redis://", {"url": "redis://a,,b", "topology": "cluster"}),
        ("expected a database number", {"url": "redis://a/x"}),
        ("has no parameters", {"url": "redis://a?db=1"}),
        ("an absolute path", {"url": "unix://redis.sock"}),
        ("give user and password as the options", {"url": "redis://user:hunter2@cache"}),
        ("not a UNIX socket", {"url": "unix:///a", "topology": "cluster"}),
        ("several hosts need", {"url": "redis://a,b"}),
        ("names database 1, the option 'database' 2", {"url": "redis://a/1", "database": 2}),
        ("database 0 only", {"url": "redis://a/1", "topology": "cluster"}),
        ("'a:b' is no address; expected 'HOST:PORT'", {"topology": "cluster", "address_map": {"a:1": "a:b"}}),
        ("'address_map' needs 'topology: cluster'", {"address_map": {"a:1": "b:1"}}),
        ("needs a url that begins with rediss://", {"tls_ca": __file__}),
        ("no file '/nowhere'", {"url": "rediss://a", "tls_ca": "/nowhere"}),
        ("'tls_key' needs 'tls_cert'", {"url": "rediss://a", "tls_key": __file__}),
        ("'username' needs 'password'", {"username": "kv"}),
        ("'sentinel_username' needs", {"sentinel_username": "kv"}),
        ("'refresh_ttl' needs 'ttl'", {"refresh_ttl": True}),
        ("pattern", {"prefix": "white space"}),
        ("pattern", {"client_name": "white space"}),
        ("no unit", {"ttl": 60}),
        ("less than or equal to 32767", {"keepalive": "12h"}),
    ],
)
def test_a_mistake_is_one_clear_line(problem, options):
    with pytest.raises(ValidationError) as refusal:
        config(**options)
    (error,) = refusal.value.errors()
    assert problem in error["msg"]
    assert "hunter2" not in error["msg"]


def test_a_timeout_is_never_longer_than_the_deadline():
    assert config(timeout="1m", deadline="20s").reply_seconds == 20
    assert config(timeout="5s", deadline="20s").reply_seconds == 5
    assert config(connect_timeout="1m", deadline="20s").connect_seconds == 20
    assert config(connect_timeout="5s", deadline="20s").connect_seconds == 5


@pytest.mark.parametrize(("local", "window"), [(True, 512 << 10), (False, 4 << 20)])
def test_the_window_suits_the_way_to_the_servers(local, window):
    assert config().window_bytes(local=local) == window
    assert config(window="1MiB").window_bytes(local=local) == 1 << 20


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1"])
def test_what_stays_on_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["cache", "10.0.0.1", "127.0.0.1.example.com", "::2", "1270.0.0.1"])
def test_what_does_not_stay_on_this_machine(host):
    assert not is_loopback(host)


def documented():
    """Yield name, type and default of each option in the README's table."""
    table = README.read_text(encoding="utf-8").partition("## Options")[2].partition("\n\n|")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        names, kinds, default, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert meaning
        names = re.findall(r"`(.+?)`", names)
        kinds = re.findall(r"`(.+?)`", kinds) or kinds.split(", ")
        kinds = [" | ".join(kinds)] if len(names) == 1 else kinds * (len(names) // len(kinds))
        for name, kind in zip(names, kinds, strict=True):
            yield name, KINDS.get(kind, kind), default.replace("`", "") or "none"


def test_the_readme_has_every_option_with_its_type_and_its_default():
    common = options_of(TierConfig)
    own = [option for option in options_of(RedisConfig) if option not in common]
    said = {"tls_ca": "the system's", "ttl": "never", "window": "512KiB, 4MiB"}  # instead of none
    written = {(o.name, o.type, "required" if o.required else said.get(o.name, o.default or "none")) for o in own}
    assert {o.default for o in own if o.name in said} == {"none"}
    assert set(documented()) == written
    assert all(option.description for option in own)


def test_the_place_is_the_servers_the_database_and_the_prefix():
    same = [config(url, topology="cluster") for url in ("redis://a,b:1", "rediss://b:1,a:6379")]
    assert {tier.place for tier in same} == {"a:6379,b:1 database 0"}
    unix = config("unix:///run/redis.sock", prefix="kv:")
    assert unix.place == "/run/redis.sock database 0 prefix kv:"
    assert config("redis://cache/1").place == config("redis://cache:6379", database=1).place == "cache:6379 database 1"
    others = [config("redis://cache"), config("redis://cache", prefix="a"), config("redis://cache2")]
    others += [config("redis://cache", topology="sentinel", master=name) for name in ("one", "two")]
    assert len({tier.place for tier in others}) == 5
