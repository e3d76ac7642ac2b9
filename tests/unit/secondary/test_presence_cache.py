import pytest

from kvtiers.api import LookupResult
from kvtiers.secondary.presence_cache import PresenceCache

MISS, HIT, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.RETRY


class Asked:
    """The questions that were sent."""

    def __init__(self):
        self.questions = []
        self.takes = True

    def __call__(self, probe_id, keys, is_prefix):
        self.questions.append((probe_id, list(keys), is_prefix))
        return self.takes

    @property
    def last(self):
        return self.questions[-1]


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def tier(clock, asked):
    return PresenceCache(60.0, 30.0, clock, asked)


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(8)]


def settle(tier, asked, keys, answers):
    """Ask, and have it answered."""
    tier.ask(keys)
    tier.flush()
    tier.answered(asked.last[0], bytes(answers))


def test_what_is_unknown_is_asked_once_at_the_end_of_the_step(tier, asked, keys):
    assert tier.ask(keys) == [RETRY]
    assert tier.ask(keys) == [RETRY]
    assert asked.questions == []
    tier.flush()
    tier.ask(keys)
    tier.flush()
    assert [(question, is_prefix) for _, question, is_prefix in asked.questions] == [(keys, True)]


def test_an_answer_is_believed_up_to_the_first_miss(tier, asked, keys):
    settle(tier, asked, keys, [1, 1, 1, 0])
    assert tier.ask(keys) == [HIT, HIT, HIT, MISS]
    assert tier.ask(keys[3:]) == [MISS]


def test_what_the_answer_does_not_reach_stays_unknown(tier, asked, keys):
    settle(tier, asked, keys, [1, 1])
    assert tier.ask(keys) == [HIT, HIT, RETRY]
    tier.flush()
    assert asked.last[1] == keys[2:]


def test_single_keys_of_a_step_are_one_question(tier, asked, keys):
    for key in keys:
        assert tier.ask([key]) == [RETRY]
    tier.flush()
    assert [(question, is_prefix) for _, question, is_prefix in asked.questions] == [(keys, False)]
    tier.answered(asked.last[0], bytes([0, 1, 0, 1, 0, 1, 0, 1]))
    assert [tier.ask([key])[0] for key in keys] == [MISS, HIT] * 4


def test_a_run_that_reaches_one_being_asked_stops_before_it(tier, asked, keys):
    tier.ask(keys[4:])
    tier.ask(keys[:6])
    tier.flush()
    assert [question for _, question, _ in asked.questions] == [keys[4:], keys[:4]]


def test_a_run_that_reaches_a_chunk_that_is_to_be_asked_alone_stops_before_it(tier, asked, keys):
    tier.ask(keys[4:5])
    tier.ask(keys[:6])
    tier.flush()
    assert [question for _, question, _ in asked.questions] == [keys[4:5], keys[:4]]


def test_a_run_is_not_asked_beyond_a_known_miss(tier, asked, keys):
    settle(tier, asked, [keys[3]], [0])
    assert tier.ask(keys) == [RETRY]
    tier.flush()
    assert asked.last[1] == keys[:3]


def test_a_hit_is_believed_for_its_time_and_a_miss_for_a_second(tier, asked, keys, clock):
    settle(tier, asked, keys, [1, 0])
    clock.now += 0.9
    assert tier.ask(keys[:2]) == [HIT, MISS]
    clock.now += 0.2
    assert tier.ask(keys[:2]) == [HIT, RETRY]
    clock.now += 59
    assert tier.ask(keys[:1]) == [RETRY]


def test_an_answer_that_is_never_believed_for_long_is_still_believed_in_the_next_step(asked, clock, keys):
    tier = PresenceCache(0.0, 30.0, clock, asked)
    settle(tier, asked, keys, [1, 1, 0])
    clock.now += 0.1
    assert tier.ask(keys) == [HIT, HIT, MISS]


def test_a_store_that_completes_turns_a_miss_into_a_hit(tier, asked, keys):
    settle(tier, asked, keys, [0])
    assert tier.ask(keys) == [MISS]
    tier.stored(keys[:2])
    assert tier.ask(keys[:2]) == [HIT, HIT]


def test_a_failed_load_turns_a_hit_into_a_miss(tier, asked, keys):
    settle(tier, asked, keys, [1] * 8)
    tier.lost([keys[2]])
    assert tier.ask(keys) == [HIT, HIT, MISS]


def test_an_answer_that_is_older_than_what_is_known_since_is_void(tier, asked, keys):
    tier.ask(keys[:3])
    tier.flush()
    probe = asked.last[0]
    tier.stored([keys[0]])
    tier.lost([keys[1]])
    tier.answered(probe, bytes([0, 1, 1]))
    assert tier.ask(keys[:1]) == [HIT]
    assert tier.ask(keys[1:2]) == [MISS]
    assert tier.ask(keys[2:3]) == [HIT]


def test_a_question_that_could_not_be_asked_is_a_miss_for_now(tier, asked, keys, clock):
    asked.takes = False
    tier.ask(keys)
    tier.flush()
    assert tier.ask(keys) == [MISS]
    assert tier.open_probes == 0
    asked.takes = True
    clock.now += 1.1
    assert tier.ask(keys) == [RETRY]


def test_a_question_that_is_not_answered_in_time_is_a_miss_and_counted(tier, asked, keys, clock):
    tier.ask(keys[:2])
    tier.flush()
    probe = asked.last[0]
    clock.now += 10
    tier.ask(keys[4:])
    tier.flush()
    clock.now += 20.1
    assert tier.give_up_overdue() == 1
    assert tier.ask(keys[:2]) == [MISS]
    assert tier.ask(keys[4:]) == [RETRY]
    tier.answered(probe, bytes([1, 1]))
    assert tier.ask(keys[:2]) == [MISS], "the answer comes too late"


def test_questions_that_have_ended_are_counted_with_the_seconds_from_their_being_sent(tier, asked, keys, clock):
    tier.ask(keys[:2])
    clock.now += 1.0
    tier.flush()
    clock.now += 0.25
    tier.answered(asked.last[0], bytes([1, 0]))
    tier.answered(asked.last[0], bytes([1, 0]))
    assert (tier.questions, tier.seconds) == (1, 0.25)
    for key in keys[4:6]:
        tier.ask([key])
        tier.flush()
    clock.now += 31.0
    tier.failed(asked.last[0])
    assert tier.give_up_overdue() == 1
    assert (tier.questions, tier.seconds) == (3, 62.25)
    asked.takes = False
    tier.ask(keys[6:])
    tier.flush()
    assert tier.questions == 3, "what could not be sent was no question"


def test_a_tier_that_answers_nothing_is_not_asked_without_end(tier, asked, kit):
    answers = []
    for number in range(1000):
        answers += tier.ask([kit.key(number), kit.key(number + 10_000)])
        tier.flush()
    assert len(asked.questions) == tier.open_probes == 128
    assert answers.count(RETRY) == 1000, "what cannot be asked now is no miss: its request asks again"
    tier.answered(asked.questions[0][0], b"\1\1")
    assert tier.ask([kit.key(999), kit.key(10_999)]) == [RETRY]
    tier.flush()
    assert len(asked.questions) == 129


def test_what_a_host_with_much_to_read_does_not_take_is_asked_again_and_without_a_host_it_is_a_miss(tier, asked, kit):
    first, second = ([kit.key(10 * run + number) for number in range(4)] for run in range(2))
    tier.ask(first)
    tier.flush()
    asked.takes = False
    for _ in range(3):
        assert tier.ask(second) == [RETRY]
        tier.flush()
    asked.takes = True
    assert tier.ask(second) == [RETRY]
    tier.flush()
    tier.answered(asked.last[0], b"\1\1\1\1")
    assert tier.ask(second) == [HIT] * 4
    tier.answered(asked.questions[0][0], b"\1\1\1\1")
    asked.takes = False
    third = [kit.key(100), kit.key(101)]
    tier.ask(third)
    tier.flush()
    assert tier.ask(third) == [MISS], "nothing else is in flight"


def test_a_very_long_run_is_asked_in_bounded_pieces(tier, asked, kit):
    many = [kit.key(number) for number in range(20_000)]
    seen = 0
    while seen < len(many):
        answers = tier.ask(many)
        assert answers == [HIT] * seen + [RETRY]
        tier.flush()
        probe, question, _ = asked.last
        assert len(question) <= 8192
        tier.answered(probe, bytes([1]) * len(question))
        seen += len(question)
    assert tier.ask(many) == [HIT] * len(many)


def test_after_clear_nothing_is_known_and_old_answers_count_for_nothing(tier, asked, keys):
    settle(tier, asked, keys[:4], [1, 1, 1, 1])
    tier.ask(keys[4:])
    tier.flush()
    probe = asked.last[0]
    tier.clear()
    tier.answered(probe, bytes([1] * 4))
    assert tier.ask(keys) == [RETRY]
    assert tier.ask(keys[4:]) == [RETRY]


@pytest.mark.parametrize("answers", [b"", bytes(100)])
def test_too_few_or_too_many_answers_do_no_harm(tier, asked, keys, answers):
    settle(tier, asked, keys, answers)
    assert tier.ask(keys) == ([RETRY] if not answers else [MISS])
    assert None not in tier._verdicts


def test_its_memory_is_bounded(clock, asked, kit):
    tier = PresenceCache(60.0, 30.0, clock, asked, most=1000)
    for number in range(5000):
        tier.stored([kit.key(number)])
        assert len(tier._verdicts) <= 1000
    assert tier.ask([kit.key(4999)]) == [HIT]
    assert tier.ask([kit.key(0)]) == [RETRY]


def test_what_the_store_lacks_is_told_without_a_question_until_it_may_be_there(tier, asked, keys, clock):
    settle(tier, asked, keys[:1], [0])
    settle(tier, asked, keys[1:2], [0])
    settle(tier, asked, keys[2:3], [1])
    assert tier.lacks_all(keys[:2])
    assert not tier.lacks_all(keys[:3])
    assert not tier.lacks_all(keys[3:4])
    assert tier.lacks_all([])
    tier.stored(keys[:1])
    assert not tier.lacks_all(keys[:2])
    assert tier.lacks_all(keys[1:2])
    clock.now += 2.0
    assert not tier.lacks_all(keys[1:2])
