"""What is wrong with a tier's class is one line where it is opened."""

from kvtiers.api import LookupResult, SecondaryTierManager
from kvtiers.api.declared import class_problems


class Neither(SecondaryTierManager):
    def submit_store(self, job): ...
    def submit_load(self, job): ...
    def get_finished_jobs(self):
        return []


class One(Neither):
    def lookup(self, key, context):
        return LookupResult.MISS


class Many(Neither):
    def lookup_many(self, keys, context):
        return [LookupResult.MISS]


def test_a_manager_that_answers_no_lookup_is_refused_in_one_line():
    assert class_problems(Neither) == [
        "Neither has neither lookup nor lookup_many: each would ask the other, without end; write one of them"
    ]
    assert class_problems(One) == class_problems(Many) == []
