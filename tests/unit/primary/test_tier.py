"""What the primary tier promises the engine and the tiers, one promise a test."""

import pytest

from kvtiers.api import ConfigError, LookupResult
from kvtiers.primary.tier import CPUPrimaryTier

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tier(clock):
    return CPUPrimaryTier(10, 64, memoryview(bytearray(640)), protect_seconds=5.0, clock=clock)


def names(text):
    return [letter.encode() * 5 for letter in text]


def text_of(keys):
    return b"".join(key[:1] for key in keys).decode()


def stored(tier, text, request_id="r"):
    allocation = tier.prepare_store(names(text), request_id)
    tier.complete_store(allocation.rows, success=True)
    tier.on_request_finished(request_id)
    return allocation.rows


def promoted(tier, text, request_id="p"):
    allocation = tier.prepare_write(names(text), request_id, reserve_rows=0)
    tier.complete_write(allocation.rows, success=True)
    return allocation.rows


def counts(tier):
    return (tier.free_rows, tier.evictable, tier.pending_rows, tier.pinned_rows, tier.quarantined_rows)


def only(tier, text):
    """Say which of the letters are here, ready or pending."""
    return "".join(letter for letter in text if tier.lookup(letter.encode() * 5) is not MISS)


# Stores


def test_a_chunk_is_readable_only_after_its_write_completed(tier):
    allocation = tier.prepare_store(names("ab"), "r")
    assert tier.find(names("abc")) == [PENDING, PENDING, MISS]
    assert tier.prepare_load(names("a"), "r") is None
    assert tier.prepare_read(names("a")) is None
    assert tier.complete_store(allocation.rows, success=True) == names("ab")
    assert tier.find(names("abc")) == [HIT, HIT, MISS]


def test_rows_and_keys_stand_in_offered_order(tier):
    stored(tier, "bd")
    allocation = tier.prepare_store(names("abcde"), "r")
    assert (text_of(allocation.keys), allocation.rows, allocation.evicted) == ("ace", [2, 3, 4], [])
    tier.complete_store(allocation.rows, success=True)
    assert tier.prepare_load(names("edcba"), "r") == [4, 1, 3, 0, 2]


def test_a_chunk_that_is_here_in_any_state_gets_no_second_row(tier):
    first = tier.prepare_store(names("ab"), "r")
    tier.complete_store(first.rows[:1], success=True)
    assert tier.prepare_store(names("ab"), "other") == ([], [], [])
    assert tier.prepare_write(names("ab"), "other", reserve_rows=0) == ([], [], [])
    assert tier.free_rows == 8


def test_a_key_offered_twice_gets_one_row(tier):
    allocation = tier.prepare_store(names("abab"), "r")
    assert (text_of(allocation.keys), allocation.rows) == ("ab", [0, 1])
    assert tier.free_rows == 8


def test_the_row_freed_last_goes_first_and_then_fresh_ones_in_order(clock):
    """Memory is populated and pinned ahead of the highest row in use: a row that is used again costs none."""
    tier = CPUPrimaryTier(4, 64, memoryview(bytearray(256)), clock=clock)
    stored(tier, "ab")
    failed = tier.prepare_store(names("c"), "r").rows
    tier.complete_store(failed, success=False)
    assert (failed, tier.prepare_store(names("d"), "r").rows, tier._rows._next_fresh) == ([2], [2], 3)
    assert (tier.prepare_store(names("e"), "r").rows, tier._rows._next_fresh) == ([3], 4)
    allocation = tier.prepare_store(names("fg"), "r")
    assert (text_of(allocation.evicted), sorted(allocation.rows)) == ("ba", [0, 1])


def test_rows_freed_in_order_are_reused_in_reverse(tier):
    rows = tier.prepare_store(names("abcdefghij"), "r").rows
    tier.complete_store(rows[1:4], success=False)
    assert tier.prepare_store(names("xyz"), "r").rows == [3, 2, 1]


def test_a_store_that_fits_evicts_nothing_and_one_that_does_not_exactly_what_it_needs(tier):
    stored(tier, "abcdefgh")
    assert tier.prepare_store(names("xy"), "r").evicted == []
    assert text_of(tier.prepare_store(names("uvw"), "r").evicted) == "hgf"


def test_a_store_that_cannot_fit_changes_nothing(tier):
    stored(tier, "abcdefgh")
    tier.prepare_load(names("abcdef"), "reader")
    before = (counts(tier), tier.coldest(10), tier.take_events())
    assert tier.prepare_store(names("uvwxy"), "r") is None
    assert (counts(tier), tier.coldest(10), tier.take_events()) == (*before[:2], [])
    assert only(tier, "abcdefghuvwxy") == "abcdefgh"


def test_offered_chunks_are_never_evicted_for_their_own_call(tier):
    stored(tier, "abcde", "old")
    stored(tier, "fghij", "new")
    allocation = tier.prepare_store(names("edcvw"), "r")
    assert (text_of(allocation.keys), text_of(allocation.evicted)) == ("vw", "ba")
    tier.complete_store(allocation.rows, success=True)
    assert tier.prepare_store(names("cdevwfghijx"), "r") is None
    assert only(tier, "abcdefghijvw") == "cdefghijvw"


def test_a_failed_store_takes_its_own_pending_chunks_and_nothing_else(tier):
    stored(tier, "ab")
    allocation = tier.prepare_store(names("abcd"), "r")
    assert tier.complete_store(allocation.rows, success=False) == []
    assert only(tier, "abcd") == "ab"
    assert counts(tier) == (8, 2, 0, 0, 0)


def test_chunks_evicted_for_a_store_that_fails_stay_gone(tier):
    stored(tier, "abcdefghij")
    tier.complete_store(tier.prepare_store(names("x"), "r").rows, success=False)
    assert only(tier, "abcdefghijx") == "abcdefghi"


def test_a_store_may_start_with_readers(tier):
    rows = tier.prepare_store(names("ab"), "r").rows
    assert tier.complete_store(rows, success=True, readers=2) == names("ab")
    assert counts(tier) == (8, 0, 0, 2, 0)
    tier.complete_read(rows)
    assert counts(tier) == (8, 0, 0, 2, 0)
    tier.complete_read(rows)
    assert counts(tier) == (8, 2, 0, 0, 0)


# Reads


def test_a_chunk_that_is_read_is_not_evicted(tier):
    stored(tier, "abcdefghij")
    rows = tier.prepare_load(names("ij"), "reader")
    cascade = tier.prepare_read(names("hi"))
    assert text_of(tier.prepare_store(names("xyz"), "r").evicted) == "gfe"
    tier.complete_load(rows)
    assert counts(tier)[3] == 2
    tier.complete_read(cascade)
    assert only(tier, "hij") == "hij"


def test_a_load_of_a_chunk_that_is_not_ready_pins_nothing(tier):
    stored(tier, "abc")
    tier.prepare_store(names("d"), "r")
    before = counts(tier)
    for text in ("abcd", "abx", "x"):
        assert tier.prepare_load(names(text), "r") is None
        assert tier.prepare_read(names(text)) is None
    assert counts(tier) == before


def test_a_key_loaded_twice_in_one_call_is_pinned_twice(tier):
    stored(tier, "a")
    rows = tier.prepare_load(names("aa"), "r")
    assert rows == [0, 0]
    tier.complete_load(rows[:1])
    assert tier.pinned_rows == 1
    tier.complete_load(rows[1:])
    assert counts(tier) == (9, 1, 0, 0, 0)


def test_a_key_loaded_twice_in_one_call_is_used_once(tier):
    stored(tier, "ab")
    tier.complete_load(tier.prepare_load(names("aabb"), "r"))
    stored(tier, "cd", "r")
    assert text_of(tier.coldest(4)) == "dcba"


def test_a_load_is_a_use_and_a_cascade_is_none(tier):
    for letter in "abc":
        stored(tier, letter, letter)
    tier.complete_read(tier.prepare_read(names("a")))
    assert text_of(tier.coldest(3)) == "abc"
    tier.complete_load(tier.prepare_load(names("a"), "reader"))
    assert text_of(tier.coldest(3)) == "bca"


def test_looking_up_is_no_use(tier):
    for letter in "abc":
        stored(tier, letter, letter)
    tier.lookup(names("a")[0])
    tier.find(names("ab"))
    tier.resident_run(names("ab"))
    assert text_of(tier.coldest(3)) == "abc"


def test_touch_keeps_the_head_longest_and_ignores_what_is_not_here(tier):
    stored(tier, "abc")
    tier.touch(names("cxbac"))
    assert text_of(tier.coldest(3)) == "abc"


def test_the_resident_run_ends_at_the_first_miss(tier):
    stored(tier, "ab")
    rows = tier.prepare_store(names("cd"), "r").rows
    assert tier.resident_run(names("abcdxab")) == (4, 2)
    assert tier.resident_run(names("xab")) == (0, 0)
    assert tier.resident_run([]) == (0, 0)
    tier.complete_store(rows, success=True)
    assert tier.resident_run(names("abcd")) == (4, 0)


# Promotions


def test_promotions_leave_the_reserve_alone(tier):
    stored(tier, "abcdef")
    allocation = tier.prepare_write(names("uvwxyz"), "p", reserve_rows=7)
    assert (text_of(allocation.keys), allocation.evicted) == ("uvw", [])
    before = counts(tier)
    assert tier.prepare_write(names("xyz"), "p", reserve_rows=7) is None
    assert counts(tier) == before
    assert only(tier, "uvwxyz") == "uvw"


def test_promotions_get_a_prefix_of_what_is_missing_and_never_evict_the_run_they_belong_to(tier):
    stored(tier, "cd", "old")
    stored(tier, "efghijkl", "new")
    allocation = tier.prepare_write(names("acbdvwxyz"), "p", reserve_rows=5, max_rows=4)
    assert (text_of(allocation.keys), text_of(allocation.evicted)) == ("abvw", "lkji")


def test_promotions_stop_where_only_their_own_run_could_make_room(tier):
    stored(tier, "abcdefghij")
    allocation = tier.prepare_write(names("abcdefghxyz"), "p", reserve_rows=0)
    assert (text_of(allocation.keys), text_of(allocation.evicted)) == ("xy", "ji")
    assert tier.prepare_write(names("abcdefghz"), "p", reserve_rows=0) is None


def test_of_a_promotion_that_failed_in_part_the_landed_chunks_stay(tier):
    rows = tier.prepare_write(names("abcd"), "p", reserve_rows=0).rows
    assert tier.complete_write(rows, success=False, landed={b"b" * 5, b"d" * 5, b"x" * 5}) == names("bd")
    assert only(tier, "abcd") == "bd"
    assert tier.free_rows == 8


def test_of_a_promotion_that_failed_nothing_stays(tier):
    assert tier.complete_write(tier.prepare_write(names("ab"), "p", reserve_rows=0).rows, success=False) == []
    assert counts(tier) == (10, 0, 0, 0, 0)


def test_a_landed_promotion_is_protected_until_it_is_first_read(tier):
    stored(tier, "efghij")
    promoted(tier, "abcd")
    assert (tier.protected_rows, tier.evictable) == (4, 6)
    assert tier.prepare_store(names("opqrstu"), "r") is None
    tier.complete_load(tier.prepare_load(names("abcd"), "p"))
    assert (tier.protected_rows, tier.evictable) == (0, 10)
    assert tier.prepare_store(names("opqrstu"), "r") is not None


def test_a_cascade_does_not_end_the_protection(tier):
    promoted(tier, "ab")
    tier.complete_read(tier.prepare_read(names("ab")))
    assert (tier.protected_rows, tier.evictable) == (2, 0)


def test_protection_ends_with_time(tier, clock):
    promoted(tier, "ab")
    clock.now += 3
    promoted(tier, "cd")
    clock.now += 2
    tier.release_expired(clock.now)
    assert (tier.protected_rows, text_of(tier.coldest(9))) == (2, "ba")


def test_protection_that_ended_with_time_is_no_obstacle_to_a_store(tier, clock):
    stored(tier, "efghij")
    promoted(tier, "abcd")
    clock.now += 5
    assert tier.prepare_store(names("opqrstuvwx"), "r") is not None


def test_beyond_their_share_the_oldest_promotions_lose_their_protection(tier):
    promoted(tier, "abc")
    promoted(tier, "de")
    assert (tier.protected_rows, text_of(tier.coldest(9))) == (4, "a")


def test_a_promotion_that_is_read_by_a_cascade_when_its_protection_ends_stays_pinned(tier, clock):
    promoted(tier, "a")
    rows = tier.prepare_read(names("a"))
    clock.now += 9
    tier.release_expired(clock.now)
    assert (tier.protected_rows, tier.evictable) == (0, 0)
    tier.complete_read(rows)
    assert tier.evictable == 1


@pytest.mark.parametrize(("share", "protected"), [(0.0, 0), (0.01, 1), (1.0, 5)])
def test_a_share_is_at_least_one_row_unless_it_is_nothing(share, protected):
    tier = CPUPrimaryTier(10, 0, memoryview(b""), protected_share=share)
    promoted(tier, "abcde")
    assert (tier.protected_rows, tier.evictable) == (protected, 5 - protected)


# Failure in two steps, and reset


def test_an_abandoned_write_is_gone_at_once_and_its_row_is_kept_until_the_writer_ended(tier):
    rows = tier.prepare_write(names("abc"), "p", reserve_rows=0).rows
    tier.abandon(rows[:2])
    assert only(tier, "abc") == "c"
    assert counts(tier) == (7, 0, 1, 0, 2)
    assert tier.complete_write(rows, success=True) == names("c")
    assert counts(tier)[0] == 9
    assert tier.quarantined_rows == 0


def test_a_chunk_whose_row_is_in_quarantine_may_be_stored_again(tier):
    old = tier.prepare_write(names("a"), "p", reserve_rows=0).rows
    tier.abandon(old)
    new = tier.prepare_store(names("a"), "r").rows
    assert not set(old) & set(new)
    assert tier.complete_write(old, success=True, landed=names("a")) == []
    assert tier.lookup(names("a")[0]) is PENDING
    assert tier.complete_store(new, success=True) == names("a")


def test_a_reset_forgets_everything_and_keeps_what_may_still_be_touched(tier):
    stored(tier, "abcdef")
    loading = tier.prepare_load(names("ab"), "reader")
    cascading = tier.prepare_read(names("bc"))
    storing = tier.prepare_store(names("g"), "r").rows
    promoted(tier, "h")
    tier.reset_cache()
    assert only(tier, "abcdefgh") == ""
    assert counts(tier) == (6, 0, 0, 0, 4)
    held = {*loading, *cascading, *storing}
    fresh = tier.prepare_store(names("abcdefg")[:6], "r").rows
    assert not held & set(fresh)
    tier.complete_load(loading)
    assert tier.quarantined_rows == 3  # b is still being cascaded
    tier.complete_read(cascading)
    assert tier.complete_store(storing, success=True) == []
    assert (tier.quarantined_rows, tier.free_rows, tier.misuse) == (0, 4, 0)
    assert sorted(tier.prepare_store(names("uvwx"), "r").rows) == sorted(held)


def test_a_write_from_before_a_reset_never_becomes_readable(tier):
    old = tier.prepare_store(names("a"), "r").rows
    tier.reset_cache()
    new = tier.prepare_store(names("a"), "r").rows
    assert tier.complete_store(old, success=True) == []
    assert tier.lookup(names("a")[0]) is PENDING
    assert tier.complete_store(new, success=True) == names("a")


def test_a_reset_with_nothing_in_flight_starts_again_at_the_first_row(tier):
    stored(tier, "abcde")
    tier.reset_cache()
    assert tier.prepare_store(names("xyz"), "r").rows == [0, 1, 2]


def test_a_write_may_be_abandoned_after_a_reset(tier):
    rows = tier.prepare_write(names("a"), "p", reserve_rows=0).rows
    tier.reset_cache()
    tier.abandon(rows)
    assert (tier.quarantined_rows, tier.misuse) == (1, 0)
    tier.complete_write(rows, success=False)
    assert tier.free_rows == 10


def test_completing_what_is_not_leased_is_counted_and_changes_nothing(tier):
    rows = stored(tier, "abc")
    pending = tier.prepare_store(names("d"), "r").rows
    before = (counts(tier), tier.coldest(9))
    tier.complete_load(rows)
    tier.complete_read([*pending, 9])
    tier.complete_store([*rows, 8], success=False)
    tier.complete_write([-1, 10], success=True)
    tier.abandon([0, 9, 10, -1])
    assert (counts(tier), tier.coldest(9)) == before
    assert tier.misuse == 3 + 2 + 4 + 2 + 4
    tier.complete_store([*pending, *pending], success=True)
    assert (counts(tier), tier.misuse) == ((6, 4, 0, 0, 0), 16)


# Bookkeeping


def test_clean_chunks_are_not_offered_again_and_are_forgotten_with_the_chunk(tier):
    stored(tier, "abcdefghij")
    tier.mark_clean(names("jihx"))
    assert tier.clean_rows == 3
    assert text_of(tier.coldest(2)) == "gf"
    assert text_of(tier.coldest(2, clean=True)) == "ji"
    assert text_of(tier.coldest(2, lambda key: key[:1] in b"ab")) == "ba"
    stored(tier, "x")
    assert tier.clean_rows == 2
    stored(tier, "j")
    assert text_of(tier.coldest(10, lambda key: key[:1] in b"hij")) == "j"


def test_events_say_what_is_resident(tier):
    stored(tier, "abcdefgh")
    allocation = tier.prepare_store(names("xyz"), "r")
    tier.complete_store(allocation.rows[:2], success=True)
    tier.complete_store(allocation.rows[2:], success=False)
    promotion = tier.prepare_write(names("pq"), "p", reserve_rows=0)
    tier.complete_write(promotion.rows, success=False, landed=names("p"))
    events = [(event.tier, event.removed, text_of(event.keys)) for event in tier.take_events()]
    assert events == [
        ("", False, "abcdefgh"),
        ("", True, "h"),
        ("", False, "xy"),
        ("", True, "g"),
        ("", False, "p"),
    ]
    tier.reset_cache()
    assert tier.take_events() == []


def test_no_events_are_kept_where_none_are_wanted():
    tier = CPUPrimaryTier(2, 0, memoryview(b""), record_events=False)
    stored(tier, "ab")
    stored(tier, "c")
    assert tier.take_events() == []


def test_a_tier_without_rows_has_room_for_nothing():
    tier = CPUPrimaryTier(0, 64, memoryview(b""))
    assert tier.prepare_store(names("a"), "r") is None
    assert tier.prepare_write(names("a"), "r", reserve_rows=0) is None
    assert tier.prepare_store([], "r") == ([], [], [])
    assert tier.prepare_load([], "r") == []


def test_the_view_is_the_regions_own_memory():
    region = bytearray(256)
    tier = CPUPrimaryTier(4, 64, memoryview(region))
    tier.get_kv_memoryview()[3 * tier.row_stride] = 7
    assert region[192] == 7


def test_after_close_the_region_may_be_unmapped():
    region = bytearray(256)
    tier = CPUPrimaryTier(4, 64, memoryview(region))
    with pytest.raises(BufferError):
        region.clear()
    tier.close()
    region.clear()


@pytest.mark.parametrize("view", [memoryview(bytearray(255)), memoryview(bytearray(256)).cast("B", [4, 64])])
def test_a_view_that_does_not_fit_the_rows_is_refused(view):
    with pytest.raises(ValueError, match="expected a flat view of 4 rows of 64 bytes"):
        CPUPrimaryTier(4, 64, view)


def test_an_unknown_policy_stops_the_start():
    with pytest.raises(ConfigError, match="Did you mean 'lru'"):
        CPUPrimaryTier(4, 64, memoryview(bytearray(256)), policy="lruu")


def test_a_retired_row_is_never_leased_again_and_its_chunk_leaves_with_its_last_use(tier):
    stored(tier, "abcdef")
    tier.prepare_load(names("ef"), "reader")
    tier.take_events()
    tier.retire_rows(3)
    assert only(tier, "abcdef") == "abcef"  # d was idle; a reader of e and f goes on
    assert (tier.free_rows, tier.retired_rows) == (0, 5)
    tier.complete_load([4, 5])
    assert only(tier, "abcdef") == "abc"
    assert (tier.free_rows, tier.retired_rows, tier.evictable) == (0, 7, 3)
    assert [(text_of(event.keys), event.removed) for event in tier.take_events()] == [("d", True), ("ef", True)]
    allocation = tier.prepare_store(names("xyz"), "r")
    assert sorted(allocation.rows) == [0, 1, 2]
    assert tier.prepare_store(names("w"), "r") is None
