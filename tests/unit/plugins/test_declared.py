"""What only looks like part of the contract is refused where a tier is loaded and opened, with what was meant."""

import pytest
from tests.stores import DictStore

from kvtiers.api import ChunkStore, LookupResult, SecondaryTierManager, TierContext, TierPluginError
from kvtiers.plugins import load_tier, open_plugin


def refusal(distributions, options: str, kind: str = "store") -> str:
    distributions.tier("mine", options=options, kind=kind)
    with pytest.raises(TierPluginError) as caught:
        load_tier("mine")
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize(
    "option",
    [
        'name: str = Field("localhost", description="where the server runs")',
        'name: str = "localhost"',
        'deadline: float = Field(3.0, description="seconds")',
        'deadline: Duration = Field(3.0, description="of a request")',
        'threads: str = "many"',
    ],
)
def test_an_option_of_every_tier_under_another_meaning_is_refused_with_another_name(distributions, option):
    name = option.partition(":")[0]
    text = refusal(distributions, option)
    assert f"Config declares the option {name!r}, which every tier has (" in text
    assert f"choose another name, such as 'server_{name}'" in text
    assert "To change its default alone, keep its type and its description" in text


def test_a_default_may_be_changed(distributions):
    distributions.tier(
        "mine", options='threads: int = Field(32, description=TierConfig.model_fields["threads"].description)'
    )
    assert load_tier("mine").config(type="mine").threads == 32


def test_a_tier_that_moves_its_values_by_itself_may_have_threads_of_its_own_but_no_deadline(distributions):
    assert "deadline" in refusal(distributions, "threads: int = 2\ndeadline: float = 1.0", "manager")
    distributions.tier("other", options="threads: int = 2", kind="manager")
    assert load_tier("other").kind == "manager"


class Half(DictStore):
    closed = False

    def write_many(self, names, srcs):
        return [None for _ in names]

    def close(self):
        type(self).closed = True


class Diagnoze(DictStore):
    def diagnoze(self, value_bytes):
        return []


class Status(DictStore):
    """A method with a name of its own is no near miss."""

    def status(self):
        return "fine"

    def listen(self):
        return "to nothing"


def opened(distributions, store_class):
    distributions.tier("mine", opened="return STORE()")
    plugin = load_tier("mine")
    context = TierContext("mine", 4096, "ns", False, memoryview(bytearray(4096)), 4096)
    plugin.open.__globals__["STORE"] = store_class
    return open_plugin(plugin, plugin.config(type="mine"), context, ChunkStore)


def test_half_an_ability_is_refused_when_the_store_is_opened_and_the_store_is_closed(distributions):
    with pytest.raises(TierPluginError, match="Half has write_many but not batch_values, read_many_into"):
        opened(distributions, Half)
    assert Half.closed


def test_an_attribute_of_an_instance_is_refused_and_the_line_says_that_it_belongs_to_the_class(distributions):
    class Instance(DictStore):
        def __init__(self):
            super().__init__()
            self.batch_values = 8

        def read_many_into(self, names, dsts):
            raise AssertionError("it is not opened")

        def write_many(self, names, srcs):
            raise AssertionError("it is not opened")

    expected = (
        "has read_many_into, write_many but not batch_values.*add batch_values .batch_values: on the class, since"
    )
    with pytest.raises(TierPluginError, match=expected):
        opened(distributions, Instance)


def test_a_misspelt_method_is_refused_when_the_store_is_opened_with_what_was_meant(distributions):
    with pytest.raises(TierPluginError, match=r"Diagnoze has 'diagnoze'.* Did you mean 'diagnose'\?"):
        opened(distributions, Diagnoze)


def test_a_method_of_the_author_s_own_is_none_of_core_s_business(distributions):
    assert opened(distributions, Status).status() == "fine"


class Careless(SecondaryTierManager):
    """A tier of the third rung that keeps no quotas."""

    def __init__(self, context):
        self.closed, self.quota_of = False, None

    def lookup(self, key, ctx):
        return LookupResult.MISS

    def submit_store(self, job):
        pass

    def submit_load(self, job):
        pass

    def get_finished_jobs(self):
        return []

    def drain(self, timeout):
        return True

    def close(self):
        self.closed = True


class Keeper(Careless):
    def set_quotas(self, quota_of):
        self.quota_of = quota_of


class Misspelt(Careless):
    def set_quota(self, quota_of):
        """Never called."""


class Refuses(Keeper):
    def set_quotas(self, quota_of):
        raise ValueError("these are too many")


def opened_manager(distributions, tier_class, **options):
    distributions.tier("mine", opened="return TIER(context)", options="quotas: dict[str, int] = {}", kind="manager")
    plugin, made = load_tier("mine"), []
    context = TierContext("mine", 4096, "ns", False, memoryview(bytearray(4096)), 4096)

    def open_tier(given):
        made.append(tier_class(given))
        return made[0]

    plugin.open.__globals__["TIER"] = open_tier
    try:
        return open_plugin(plugin, plugin.config(type="mine", **options), context, SecondaryTierManager)
    except BaseException:
        assert made[0].closed, "one that is not used is closed"
        raise


def test_a_tier_that_keeps_quotas_gets_them_before_its_first_call(distributions):
    tier = opened_manager(distributions, Keeper, quotas={"blue": 1000, "*": 200})
    assert [tier.quota_of(tenant) for tenant in ("blue", "red", "")] == [1000, 200, None]


@pytest.mark.parametrize("options", [{}, {"quotas": {"blue": 1000}, "read_only": True}])
def test_without_quotas_or_stores_it_gets_none(distributions, options):
    assert opened_manager(distributions, Keeper, **options).quota_of is None


@pytest.mark.parametrize(
    ("tier_class", "said"),
    [
        (Careless, r"its type takes 'quotas', but Careless has no set_quotas\(\); leave 'quotas' out"),
        (Misspelt, r"Misspelt has 'set_quota'.* Did you mean 'set_quotas'\?"),
    ],
)
def test_quotas_that_a_tier_does_not_keep_are_one_line(distributions, tier_class, said):
    with pytest.raises(TierPluginError, match=said):
        opened_manager(distributions, tier_class, quotas={"blue": 1000})


def test_a_tier_that_refuses_its_quotas_is_closed(distributions):
    with pytest.raises(ValueError, match="too many"):
        opened_manager(distributions, Refuses, quotas={"blue": 1000})
