"""ARC: what is used again survives what is used once, and the ghost lists teach it how much of each to keep."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.primary.eviction import ARCPolicy


def names(text):
    return [letter.encode() * 5 for letter in text]


def text_of(keys):
    return b"".join(key[:1] for key in keys).decode()


def store(policy, text, request_id):
    policy.on_store_miss(names(text), request_id)
    policy.access(names(text), request_id, names(text))
    policy.mark_evictable(names(text))
    policy.request_finished(request_id)


def use(policy, text, request_id):
    policy.access(names(text), request_id)
    policy.request_finished(request_id)


def test_what_a_later_request_used_survives_a_scan():
    policy = ARCPolicy(capacity=6)
    store(policy, "ab", "first")
    use(policy, "ab", "second")
    for letter in "uvwxyz":
        store(policy, letter, letter)
    assert text_of(policy.evict(6)) == "uvwxyz"
    assert text_of(policy.evict(2)) == "ba"


def test_a_requests_own_load_of_what_it_stored_is_no_second_use():
    policy = ARCPolicy(capacity=6)
    policy.access(names("a"), "first", names("a"))
    policy.mark_evictable(names("a"))
    policy.access(names("a"), "first")
    policy.request_finished("first")
    store(policy, "b", "second")
    use(policy, "b", "third")
    store(policy, "c", "fourth")
    assert text_of(policy.evict(3)) == "acb"


def test_a_second_use_counts_when_its_request_ends():
    policy = ARCPolicy(capacity=6)
    store(policy, "a", "first")
    policy.access(names("a"), "second")
    store(policy, "b", "third")
    assert text_of(policy.coldest()) == "ab"
    policy.request_finished("second")
    assert text_of(policy.coldest()) == "ba"


def test_a_chunk_that_is_still_being_written_stays_in_the_first_list():
    policy = ARCPolicy(capacity=6)
    policy.access(names("a"), "first", names("a"))
    store(policy, "b", "second")
    use(policy, "b", "third")
    use(policy, "a", "fourth")
    policy.mark_evictable(names("a"))
    assert text_of(policy.evict(2)) == "ab"


def test_a_chunk_that_is_pinned_at_the_end_of_the_request_changes_lists_and_stays_pinned():
    policy = ARCPolicy(capacity=6)
    store(policy, "ab", "first")
    policy.mark_pinned(names("a"))
    use(policy, "ab", "second")
    store(policy, "c", "third")
    assert text_of(policy.coldest()) == "cb"
    policy.mark_evictable(names("a"))
    assert text_of(policy.coldest()) == "cba"


def test_both_lists_of_a_request_are_in_the_order_of_its_prefix():
    policy = ARCPolicy(capacity=9)
    store(policy, "abcd", "first")
    use(policy, "bd", "second")
    use(policy, "abcd", "third")
    assert text_of(policy.coldest()) == "dcba"


def test_a_ghost_of_the_first_list_lets_it_grow_once_a_request():
    policy = ARCPolicy(capacity=4)
    store(policy, "abcd", "first")
    policy.evict(2)
    assert policy.target == 0
    for _ in range(3):
        policy.on_store_miss(names("dx"), "second")
    assert policy.target == 1
    policy.on_store_miss(names("d"), "third")
    assert policy.target == 2


def test_a_ghost_of_the_second_list_lets_the_first_shrink():
    policy = ARCPolicy(capacity=4)
    store(policy, "ab", "first")
    use(policy, "ab", "second")
    policy.evict(2)
    store(policy, "cd", "third")
    policy.evict(1)
    policy.on_store_miss(names("d"), "fourth")
    assert policy.target == 2  # two ghosts in the second list, one in the first
    policy.on_store_miss(names("a"), "fifth")
    assert policy.target == 1
    for request_id in ("sixth", "seventh"):
        policy.on_store_miss(names("b"), request_id)
    assert policy.target == 0


def test_the_target_stays_within_the_capacity():
    policy = ARCPolicy(capacity=2)
    store(policy, "ab", "first")
    policy.evict(2)
    for request_id in "uvwxyz":
        policy.on_store_miss(names("ab"), request_id)
    assert policy.target == 2


def test_below_its_target_the_first_list_is_spared():
    policy = ARCPolicy(capacity=4)
    store(policy, "a", "first")
    use(policy, "a", "second")
    store(policy, "b", "third")
    policy.evict(1)
    for request_id in ("fourth", "fifth"):
        policy.on_store_miss(names("b"), request_id)
    store(policy, "b", "fifth")
    assert policy.target == 2
    assert text_of(policy.coldest()) == "ab"
    store(policy, "c", "sixth")
    assert text_of(policy.coldest()) == "abc"
    assert text_of(policy.evict(3)) == "abc"


def test_ghosts_never_outnumber_the_rows():
    policy = ARCPolicy(capacity=3)
    for letter in "abcdefgh":
        store(policy, letter, letter)
        policy.evict(1)
    policy.on_store_miss(names("abcde"), "r")
    assert policy.target == 0
    policy.on_store_miss(names("fgh"), "r")
    assert policy.target == 3


def test_a_failed_eviction_leaves_no_ghosts():
    policy = ARCPolicy(capacity=3)
    store(policy, "abc", "r")
    assert policy.evict(4) is None
    policy.on_store_miss(names("abc"), "s")
    assert policy.target == 0


def test_what_a_request_uses_is_spared_also_when_another_one_s_end_has_moved_it():
    policy = ARCPolicy(capacity=12)
    store(policy, "abcd", "first")
    policy.access(names("abcd"), "r")
    use(policy, "abcd", "other")  # which moves them to the second list
    store(policy, "uvw", "g")
    use(policy, "uvw", "h")
    assert text_of(policy.coldest()) == "dcbawvu"
    assert text_of(policy.evict_unused(5, "r")) == "wvu"
    policy.access(names("x"), "r", names("x"))
    policy.mark_evictable(names("x"))
    store(policy, "y", "z")
    assert text_of(policy.evict_unused(5, "r")) == "y"


class TextbookARC:
    """ARC as in figure 4 of Megiddo and Modha, one chunk a request; each ghost list has as many keys as the cache."""

    def __init__(self, capacity):
        self.capacity, self.p = capacity, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []  # the least recently used first

    def request(self, x):
        """Serve a request; return whether it was a hit."""
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        for resident in (t1, t2):
            if x in resident:
                resident.remove(x)
                t2.append(x)
                return True
        if x in b1:
            self.p = min(self.p + max(1.0, len(b2) / len(b1)), float(self.capacity))
        elif x in b2:
            self.p = max(self.p - max(1.0, len(b1) / len(b2)), 0.0)
        if len(t1) + len(t2) == self.capacity:
            self._replace(x)
        comes_back = x in b1 or x in b2
        for ghosts in (b1, b2):
            if x in ghosts:
                ghosts.remove(x)
            del ghosts[: -self.capacity]
        (t2 if comes_back else t1).append(x)
        return False

    def _replace(self, x):
        t1 = self.t1
        if t1 and (len(t1) > self.p or (x in self.b2 and len(t1) == self.p) or not self.t2):
            self.b1.append(t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


@settings(deadline=None)
@given(capacity=st.integers(1, 8), asked=st.lists(st.integers(0, 14), max_size=150))
def test_requests_of_one_chunk_each_are_served_as_the_paper_says(capacity, asked):
    textbook, policy, resident = TextbookARC(capacity), ARCPolicy(capacity), set()
    for number, chunk in enumerate(asked):
        key, request_id = b"%05d" % chunk, f"r{number}"
        is_hit = key in resident
        assert is_hit == textbook.request(chunk)
        if is_hit:
            policy.access([key], request_id)
        else:
            policy.on_store_miss([key], request_id)
            if len(resident) == capacity:
                resident.difference_update(policy.evict(1))
            resident.add(key)
            policy.access([key], request_id, [key])
            policy.mark_evictable([key])
        policy.request_finished(request_id)
        assert resident == {b"%05d" % each for each in textbook.t1 + textbook.t2}
        assert policy.target == textbook.p
    # And in the order in which they would leave, if nothing else came.
    left = policy.evict(len(resident))
    assert [key for key in left if int(key) in textbook.t1] == [b"%05d" % each for each in textbook.t1]
    assert [key for key in left if int(key) in textbook.t2] == [b"%05d" % each for each in textbook.t2]


def test_a_chunk_that_comes_back_from_a_ghost_list_is_one_that_was_used_again():
    policy = ARCPolicy(capacity=4)
    store(policy, "abcd", "first")
    assert text_of(policy.evict(2)) == "dc"
    store(policy, "cd", "second")
    store(policy, "xy", "third")
    assert text_of(policy.evict(4)) == "bayx"
    assert text_of(policy.evict(2)) == "dc"
