"""Stores that each break one promise, beside the tests of the kit that must catch them; and some that break none.

Not collected by itself: ``test_broken_stores.py`` runs pytest on this file and compares.
"""

import ctypes
import math
import os
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.stores import DictStore

from kvtiers.api import ChunkStore, Finding, NotKept, StoreEntry
from kvtiers.testing import ChunkStoreTests
from kvtiers.testing.chunk_store.abilities import BatchTests, DiagnosisTests, ListingTests, PiecesTests, StatsTests

CAUGHT_BY: dict[str, tuple[set[str], set[str]]] = {}
OF_ABILITIES = (BatchTests, PiecesTests, ListingTests, DiagnosisTests, StatsTests)
"""The kit for a store that breaks an ability, and has the four methods of a healthy one, which all other tests call."""
RACES = {"test_a_reader_never_sees_a_mix_of_two_writes", "test_a_reader_beside_a_delete_sees_all_or_nothing"}


def caught_by(*tests, by_chance=(), **attributes):
    """Make a test class for the store, and note which tests of the kit must fail for it, and which others may."""

    def make(store_class):
        CAUGHT_BY[store_class.__name__] = set(tests), set(by_chance)
        is_persistent = issubclass(store_class, Folder)

        @pytest.fixture
        def open_folder(self, tmp_path):
            return partial(store_class, tmp_path / "values")

        @pytest.fixture
        def open_memory(self):
            return store_class

        open_store = open_folder if is_persistent else open_memory
        kit = OF_ABILITIES if tests and store_class.__base__ is EveryAbility else (ChunkStoreTests,)
        name = f"Test{store_class.__name__}"
        body = {"store_class": store_class, "persistent": is_persistent, "open_store": open_store, "patience": 60.0}
        globals()[name] = type(name, kit, body | attributes)
        return store_class

    return make


class Memory(DictStore):
    """Keeps every promise."""


class Folder(ChunkStore):
    """A file for each value, written aside and moved into place; keeps every promise, also over a reopen."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, name):
        return self.folder / (name.replace("_", "__").replace("/", "_-") + "~")[-250:]

    def read_into(self, name, dst):
        try:
            with self.path(name).open("rb") as file:
                return file.readinto(dst) if os.fstat(file.fileno()).st_size <= len(dst) else 0
        except FileNotFoundError:
            return 0

    def write(self, name, src):
        path = self.path(name)
        aside = path.with_name(f".{os.getpid()}-{threading.get_ident()}")
        aside.write_bytes(src)
        aside.replace(path)

    def exists(self, names):
        return [self.path(name).exists() for name in names]

    def delete(self, names):
        for name in names:
            self.path(name).unlink(missing_ok=True)


class EveryAbility(Memory):
    """All that a store may be able to do."""

    batch_values = 33

    def read_many_into(self, names, dsts):
        return [self.scatter(name, views) for name, views in zip(names, dsts, strict=True)]

    def scatter(self, name, views):
        whole, at = memoryview(bytearray(sum(map(len, views)))), 0
        length = self.read_into(name, whole)
        for view in views if length else ():
            view[:] = whole[at : at + len(view)]
            at += len(view)
        return length

    def write_many(self, names, srcs):
        return [self.write(name, b"".join(views)) for name, views in zip(names, srcs, strict=True)]

    def reads_in_pieces(self, nbytes):
        return nbytes > 4096

    def read_pieces(self, name, nbytes):
        value = self.values.get(name, b"")
        return [value[:5000], memoryview(value)[5000:]] if len(value) == nbytes else None

    def list(self, prefix):
        for name, value in self.values.copy().items():
            if name.startswith(prefix):
                yield StoreEntry(name, len(value), time.time())

    def diagnose(self, value_bytes):
        return [Finding("ok", "all well"), Finding("warning", f"{value_bytes} bytes are many", "use fewer")]

    def stats(self):
        return {"held_values": len(self.values)}


# Nothing broken.


@caught_by()
class HealthyMemory(Memory):
    pass


@caught_by()
class HealthyFolder(Folder):
    pass


@caught_by()
class HealthyEveryAbility(EveryAbility):
    pass


class Server(Folder):
    """It has each whole value that a killed process has sent, and ends that while another already uses the store."""

    def sent(self, process):
        return self.folder / f".sent-{process}"

    def write(self, name, src):
        self.sent(os.getpid()).mkdir(exist_ok=True)
        whole = self.sent(os.getpid()) / self.path(name).name
        part = whole.with_name(f"part-{threading.get_ident()}")  # of a writer that is killed now: no value
        part.write_bytes(src)
        part.replace(whole)
        super().write(name, src)

    def end_others_writes(self, name):
        for folder in {*self.folder.glob(".sent-*")} - {self.sent(os.getpid())}:
            with suppress(FileNotFoundError):
                (folder / self.path(name).name).replace(self.path(name))


@caught_by()
class EndsAKilledWritersWriteAfterTheNextOne(Server):
    def write(self, name, src):
        super().write(name, src)
        self.end_others_writes(name)


@caught_by()
class EndsAKilledWritersWriteAfterADelete(Server):
    def delete(self, names):
        super().delete(names)
        for name in names:
            self.end_others_writes(name)


# Values.


@caught_by("test_open_store_opens_the_class_under_test", store_class=Folder)
class IsAnotherClass(Memory):
    pass


@caught_by("test_the_class_says_what_core_asks_of_it")
class NamesItsTransientErrors(Memory):
    transient_errors = ("ConnectionError",)


WHOLE = "test_every_public_method_is_the_contract_s_and_every_ability_is_whole"


@caught_by(WHOLE)
class HasHalfAnAbility(Memory):
    def read_many_into(self, names, dsts):
        return [self.read_into(name, views[0]) for name, views in zip(names, dsts, strict=True)]


@caught_by(WHOLE)
class MisspellsAnAbility(Memory):
    def diagnoze(self, value_bytes):
        return []


@caught_by(WHOLE)
class MisspellsAnAttribute(Memory):
    ask_one_by_one = True


@caught_by(
    "test_a_value_comes_back_as_it_was_written",
    "test_a_large_value_that_is_longer_or_shorter_is_not_taken_for_one_of_that_length",
)
class CutsLargeValues(Memory):
    def write(self, name, src):
        half = 1 << 22
        super().write(name, bytes(src[:half]) + bytes(max(0, len(src) - half)))


@caught_by("test_any_bytes_are_a_value")
class TreatsZerosAsNothing(Memory):
    def write(self, name, src):
        if any(src[:64]):
            super().write(name, src)


@caught_by(
    "test_an_absent_value_is_a_return_value",
    "test_no_buffer_is_kept_after_a_read",
    "test_64_threads_each_get_their_own_bytes",
    "test_a_reopened_store_starts_empty",
    "test_the_longest_name_is_a_name",
    "test_delete_removes_these_values_and_no_others",
    by_chance=RACES,
)
class RaisesOnAbsence(Memory):
    def read_into(self, name, dst):
        assert self.values[name] is not None
        return super().read_into(name, dst)


@caught_by(
    "test_a_longer_value_is_absent",
    "test_a_later_write_replaces_the_value",
    "test_a_large_value_that_is_longer_or_shorter_is_not_taken_for_one_of_that_length",
)
class ReadsAnyLength(Memory):
    def read_into(self, name, dst):
        value = self.values.get(name, b"")
        nbytes = min(len(value), len(dst))
        dst[:nbytes] = value[:nbytes]
        return nbytes


@caught_by(
    "test_a_shorter_value_is_read_with_its_length",
    "test_a_later_write_replaces_the_value",
    "test_a_large_value_that_is_longer_or_shorter_is_not_taken_for_one_of_that_length",
)
class SaysTheRoomForTheLength(Memory):
    def read_into(self, name, dst):
        return len(dst) if super().read_into(name, dst) else 0


@caught_by(
    "test_a_shorter_value_is_read_with_its_length",
    "test_a_large_value_that_is_longer_or_shorter_is_not_taken_for_one_of_that_length",
)
class ReadsOneLengthAlone(Memory):
    def read_into(self, name, dst):
        return super().read_into(name, dst) if len(self.values.get(name, b"")) == len(dst) else 0


@caught_by("test_an_empty_value_is_absent")
class TakesAnEmptyValueForOne(Memory):
    def read_into(self, name, dst):
        return len(dst) if self.values.get(name) == b"" else super().read_into(name, dst)


@caught_by("test_a_later_write_replaces_the_value", "test_64_threads_each_get_their_own_bytes", by_chance=RACES)
class NeverReplaces(Memory):
    def write(self, name, src):
        self.values.setdefault(name, bytes(src))


@caught_by("test_names_that_look_alike_are_kept_apart")
class FlattensNames(Memory):
    """As a folder in which a value's file has the name with ``_`` for ``/``."""

    def read_into(self, name, dst):
        return super().read_into(name.replace("/", "_"), dst)

    def write(self, name, src):
        super().write(name.replace("/", "_"), src)

    def exists(self, names):
        return super().exists([name.replace("/", "_") for name in names])

    def delete(self, names):
        super().delete([name.replace("/", "_") for name in names])


@caught_by("test_the_longest_name_is_a_name")
class CutsNames(Memory):
    def write(self, name, src):
        if len(name) < 200:
            super().write(name, src)


# Names.


@caught_by(
    "test_exists_answers_each_name_in_order",
    "test_delete_removes_these_values_and_no_others",
    "test_64_threads_each_get_their_own_bytes",
    "test_exists_answers_many_names_at_once",
)
class AnswersExistsOutOfOrder(Memory):
    def exists(self, names):
        return sorted(super().exists(names), reverse=True)


@caught_by(
    "test_exists_answers_each_name_in_order",
    "test_delete_removes_these_values_and_no_others",
    "test_64_threads_each_get_their_own_bytes",
    "test_exists_answers_many_names_at_once",
)
class FindsNothing(Memory):
    def exists(self, names):
        return [False for _ in names]


@caught_by("test_exists_answers_many_names_at_once")
class AnswersFewNames(Memory):
    def exists(self, names):
        return super().exists(names[:200])


@caught_by("test_delete_removes_these_values_and_no_others")
class DeletesWhatStartsAlike(Memory):
    def delete(self, names):
        super().delete([held for held in list(self.values) if held.startswith(tuple(names))])


@caught_by("test_deleting_an_absent_value_is_no_error", by_chance=RACES)
class RaisesOnDeletingTwice(Memory):
    def delete(self, names):
        for name in names:
            del self.values[name]


@caught_by("test_a_deleted_name_can_be_written_again", "test_a_reader_beside_a_delete_sees_all_or_nothing")
class RefusesDeletedNames(Memory):
    def __init__(self):
        super().__init__()
        self.deleted = set()

    def delete(self, names):
        super().delete(names)
        self.deleted.update(names)

    def write(self, name, src):
        if name not in self.deleted:
            super().write(name, src)


@caught_by("test_no_names_are_no_error")
class WantsNames(Memory):
    def delete(self, names):
        assert names[0]
        super().delete(names)


# Memory.


@caught_by("test_a_write_copies_what_it_keeps", "test_no_buffer_is_kept_after_a_write")
class KeepsTheSource(Memory):
    def write(self, name, src):
        self.values[name] = src


@caught_by("test_a_write_copies_what_it_keeps", "test_no_buffer_is_kept_after_a_write")
class KeepsAViewOfTheSource(Memory):
    def write(self, name, src):
        self.values[name] = memoryview(src)


@caught_by("test_a_write_copies_what_it_keeps", "test_no_buffer_is_kept_after_a_write")
class KeepsAnArrayOfTheSource(Memory):
    def write(self, name, src):
        self.values[name] = np.frombuffer(src, np.uint8)


@caught_by("test_no_buffer_is_kept_after_a_write")
class KeepsASliceOfTheSource(Memory):
    def write(self, name, src):
        self.values[name] = bytes(src)
        self.last = src[1:]


@caught_by("test_a_read_gives_bytes_of_its_own", "test_no_buffer_is_kept_after_a_read")
class KeepsTheDestination(Memory):
    def read_into(self, name, dst):
        found = super().read_into(name, dst)
        if found:
            self.values[name] = dst  # the value is there already, so why hold it twice
        return found


@caught_by("test_no_buffer_is_kept_after_a_read")
class KeepsAnArrayOfAMissedDestination(Memory):
    def read_into(self, name, dst):
        found = super().read_into(name, dst)
        if not found:
            self.spare = np.frombuffer(dst, np.uint8)
        return found


@caught_by("test_a_read_writes_nothing_outside_its_destination", "test_a_longer_value_is_absent")
class WritesPastTheDestination(Memory):
    def read_into(self, name, dst):
        value = self.values.get(name)
        if value is None:
            return 0
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(dst)), value, len(value))
        return len(value) if len(value) <= len(dst) else 0


@caught_by("test_a_write_changes_nothing_in_memory")
class ScramblesTheSource(Memory):
    def write(self, name, src):
        super().write(name, src)
        ctypes.memset(np.frombuffer(src, np.uint8).ctypes.data, 0, 64)


# Threads.


@caught_by("test_64_threads_each_get_their_own_bytes")
class SharesAScratchBuffer(Memory):
    """As a client with one connection, used by all threads without a lock."""

    def __init__(self):
        super().__init__()
        self.scratch = bytearray()

    def write(self, name, src):
        self.scratch[:] = src
        time.sleep(0)
        self.values[name] = bytes(self.scratch)


@caught_by("test_a_reader_never_sees_a_mix_of_two_writes", by_chance=RACES)
class WritesInPieces(Memory):
    def write(self, name, src):
        value = self.values.setdefault(name, bytearray(len(src)))
        if len(value) != len(src):
            value = self.values[name] = bytearray(len(src))
        for start in range(0, len(src), 65536):
            value[start : start + 65536] = src[start : start + 65536]
            time.sleep(0)


@caught_by("test_64_threads_each_get_their_own_bytes", patience=15.0)
class HangsUnderLoad(Memory):
    """As a client with 16 connections that are never given back."""

    def __init__(self):
        super().__init__()
        self.threads = set()
        self.never = threading.Event()

    def write(self, name, src):
        self.threads.add(threading.get_ident())
        if len(self.threads) > 16:
            self.never.wait()
        super().write(name, src)


@caught_by("test_close_ends_all_child_processes")
class LeavesAProcess(Folder):
    """As one that starts a program to compress with, which inherits what it can."""

    child = None

    def write(self, name, src):
        if self.child is None:
            self.child = subprocess.Popen(["sleep", "30"], close_fds=False)
        super().write(name, src)


# Failures.


class Server:
    """What a store may be a client of."""

    is_up = True

    def ask(self):
        if not self.is_up:
            raise ConnectionRefusedError("the server is down")


class Remote(EveryAbility):
    """Every call asks the server first."""

    def __init__(self):
        super().__init__()
        self.server = Server()

    def read_into(self, name, dst):
        self.server.ask()
        return super().read_into(name, dst)

    def write(self, name, src):
        self.server.ask()
        super().write(name, src)

    def exists(self, names):
        self.server.ask()
        return super().exists(names)

    def delete(self, names):
        self.server.ask()
        super().delete(names)

    def list(self, prefix):
        self.server.ask()
        yield from super().list(prefix)


@pytest.fixture
def _break_backend(self):
    @contextmanager
    def stopped(store):
        store.server.is_up = False
        yield
        store.server.is_up = True

    return stopped


NOT_SWALLOWED = "test_a_backend_that_fails_is_an_exception_and_never_an_answer"


@caught_by(break_backend=_break_backend)
class HealthyRemote(Remote):
    pass


@caught_by(NOT_SWALLOWED, break_backend=_break_backend)
class SwallowsErrorsOfReads(Remote):
    def read_into(self, name, dst):
        try:
            return super().read_into(name, dst)
        except ConnectionError:
            return 0


@caught_by(NOT_SWALLOWED, break_backend=_break_backend)
class SwallowsErrorsOfWrites(Remote):
    def write(self, name, src):
        with suppress(ConnectionError):
            super().write(name, src)


@caught_by(NOT_SWALLOWED, break_backend=_break_backend)
class TakesFailuresForFullness(Remote):
    def write(self, name, src):
        try:
            super().write(name, src)
        except ConnectionError as error:
            raise NotKept("full") from error


# Life.


@caught_by("test_values_survive_a_reopen")
class ForgetsOnClose(Folder):
    def close(self):
        for path in self.folder.iterdir():
            path.unlink()


@caught_by("test_a_reopened_store_starts_empty")
class RemembersThoughVolatile(Memory):
    def __init__(self, held={}):  # noqa: B006 -- shared by all that are opened
        self.values = held


@caught_by("test_a_writer_killed_in_the_middle_leaves_no_half_value", by_chance=RACES)
class WritesInPlace(Folder):
    def write(self, name, src):
        with self.path(name).open("wb", buffering=0) as file:
            for start in range(0, len(src), 1 << 19):
                if start:
                    time.sleep(0.002)  # on a busy machine, too, most of the time of a write lies within it
                file.write(src[start : start + (1 << 19)])


@caught_by("test_a_writer_killed_in_the_middle_leaves_no_half_value")
class WritesInPlaceUnderALock(Folder):
    """As a file of fixed slots: the length is always right."""

    def __init__(self, folder):
        super().__init__(folder)
        self.lock = threading.Lock()

    def read_into(self, name, dst):
        with self.lock:
            return super().read_into(name, dst)

    def write(self, name, src):
        with self.lock:
            descriptor = os.open(self.path(name), os.O_RDWR | os.O_CREAT)
            os.ftruncate(descriptor, len(src))
            for start in range(0, len(src), 1 << 19):
                os.pwrite(descriptor, src[start : start + (1 << 19)], start)
                time.sleep(0.002)
            os.close(descriptor)


@caught_by("test_a_killed_writer_does_not_hinder_the_next_one")
class LeavesALockBehind(Folder):
    """One writer at a time, from open to close; a reader needs no lock."""

    def __init__(self, folder):
        super().__init__(folder)
        self.lock = self.folder.with_name("lock")
        self.is_writer = not self.lock.exists()
        if self.is_writer:
            self.lock.touch()

    def write(self, name, src):
        if not self.is_writer:
            raise TimeoutError(f"{self.lock} is held")
        super().write(name, src)

    def close(self):
        if self.is_writer:
            self.lock.unlink()


@caught_by(
    "test_a_writer_killed_in_the_middle_leaves_no_half_value", "test_a_killed_writer_does_not_hinder_the_next_one"
)
class CannotBeOpenedElsewhere(Folder):
    pass


@pytest.fixture
def _open_by_lambda(self, tmp_path):
    return lambda: CannotBeOpenedElsewhere(tmp_path)


TestCannotBeOpenedElsewhere.open_store = _open_by_lambda  # noqa: F821 -- made by the decorator


@caught_by("test_close_ends_all_threads")
class LeavesAThread(Memory):
    def __init__(self):
        super().__init__()
        self.never = threading.Event()
        threading.Thread(target=self.never.wait, daemon=True, name="left-behind").start()


@caught_by("test_close_closes_all_descriptors")
class LeavesADescriptor(Memory):
    def __init__(self):
        super().__init__()
        self.descriptor = os.open(os.devnull, os.O_RDONLY)


# Abilities.


@caught_by(
    "test_batch_values_says_how_many_values_a_call_takes",
    "test_a_batch_comes_back_as_it_was_written",
    "test_a_batch_answers_each_name_in_order",
)
class NamesNoNumberOfValues(EveryAbility):
    batch_values = "many"


WRITTEN_VIEWS = "test_a_value_written_out_of_several_views_is_all_of_them_in_order"
READ_VIEWS = "test_a_value_read_into_several_views_fills_all_of_them_in_order"
SHORTER_VIEWS = "test_of_several_views_a_shorter_value_fills_the_first_and_a_longer_one_is_absent"


@caught_by("test_a_batch_comes_back_as_it_was_written", WRITTEN_VIEWS)
class AnswersABatchWithYes(EveryAbility):
    def write_many(self, names, srcs):
        super().write_many(names, srcs)
        return [True for _ in names]


@caught_by("test_a_batch_answers_each_name_in_order")
class StopsABatchAtAMiss(EveryAbility):
    def read_many_into(self, names, dsts):
        answers = []
        for name, views in zip(names, dsts, strict=True):
            answers.append(self.scatter(name, views) if not answers or answers[-1] else 0)
        return answers


@caught_by("test_an_empty_batch_is_no_error")
class WantsABatch(EveryAbility):
    def write_many(self, names, srcs):
        return [*super().write_many(names[:1], srcs[:1]), *super().write_many(names[1:], srcs[1:])] or None


@caught_by("test_batches_and_single_calls_see_the_same_values", WRITTEN_VIEWS, READ_VIEWS, SHORTER_VIEWS)
class KeepsBatchesApart(EveryAbility):
    def read_many_into(self, names, dsts):
        return super().read_many_into([name + "!" for name in names], dsts)

    def write_many(self, names, srcs):
        return super().write_many([name + "!" for name in names], srcs)


@caught_by("test_no_buffer_of_a_batch_is_kept")
class KeepsABatch(EveryAbility):
    def write_many(self, names, srcs):
        self.last = [memoryview(view)[4:] for views in srcs for view in views]
        return super().write_many(names, srcs)


@caught_by("test_the_pieces_of_a_value_are_all_of_it_in_order")
class LosesItsLastPiece(EveryAbility):
    def read_pieces(self, name, nbytes):
        pieces = super().read_pieces(name, nbytes)
        return pieces and pieces[:-1]


@caught_by("test_what_is_absent_or_of_another_length_has_no_pieces")
class GivesPiecesOfAnyLength(EveryAbility):
    def read_pieces(self, name, nbytes):
        value = self.values.get(name)
        return None if value is None else [value]


@caught_by(WRITTEN_VIEWS)
class WritesTheFirstViewsAlone(EveryAbility):
    """As one call of writev, which may write less than it is given."""

    def write_many(self, names, srcs):
        return super().write_many(names, [views[:2] for views in srcs])


@caught_by("test_no_buffer_of_a_batch_is_kept")
class KeepsAViewOfAValue(EveryAbility):
    def write_many(self, names, srcs):
        self.last = [views[-1][:8] for views in srcs]
        return super().write_many(names, srcs)


@caught_by(READ_VIEWS, SHORTER_VIEWS)
class ReadsTheFirstViewsAlone(EveryAbility):
    """As one call of readv, which may read less than it is asked for."""

    def scatter(self, name, views):
        length = super().scatter(name, views[:2]) if len(views) < 3 else len(self.values.get(name, b""))
        return length if length <= sum(map(len, views)) else 0


@caught_by(SHORTER_VIEWS)
class TakesAllItsViewsForTheLength(EveryAbility):
    def scatter(self, name, views):
        length = super().scatter(name, views)
        return sum(map(len, views)) if length and len(views) > 1 else length


@caught_by("test_no_buffer_of_a_batch_is_kept")
class KeepsAViewReadInto(EveryAbility):
    def scatter(self, name, views):
        self.last = views[-1][:8]
        return super().scatter(name, views)


@caught_by("test_a_listing_has_each_value_once_with_its_length")
class ListsGuessedLengths(EveryAbility):
    def list(self, prefix):
        return (StoreEntry(entry.name, 4096) for entry in super().list(prefix))


@caught_by("test_a_listing_says_when_values_were_written")
class ListsAnotherClock(EveryAbility):
    def list(self, prefix):
        return (StoreEntry(entry.name, entry.nbytes, time.monotonic()) for entry in super().list(prefix))


@caught_by("test_a_listing_has_every_name_that_starts_with_the_prefix")
class ListsWithWildcards(EveryAbility):
    """As SQL's LIKE without ESCAPE."""

    def list(self, prefix):
        def alike(name):
            return len(name) >= len(prefix) and all(p in (n, "_") for p, n in zip(prefix, name, strict=False))

        return (entry for entry in super().list("") if alike(entry.name))


@caught_by("test_a_listing_may_run_while_values_change")
class ListsItsLiveDictionary(EveryAbility):
    def list(self, prefix):
        for name in self.values:
            time.sleep(0)
            if name.startswith(prefix):
                yield StoreEntry(name, len(self.values[name]))


@caught_by("test_a_diagnosis_is_made_of_findings")
class DiagnosesWithoutAFix(EveryAbility):
    def diagnose(self, value_bytes):
        return [Finding("warning", "something is odd")]


@caught_by("test_a_diagnosis_finds_no_error_in_a_healthy_backend")
class DiagnosesErrorsAlways(EveryAbility):
    def diagnose(self, value_bytes):
        return [Finding("error", "the server is too old", "upgrade it")]


@caught_by("test_stats_are_numbers_with_metric_names")
class CountsWithoutNumbers(EveryAbility):
    def stats(self):
        return {"hit_rate": math.nan}


@caught_by("test_stats_may_be_read_while_values_move")
class CountsItsLiveDictionary(EveryAbility):
    def stats(self):
        for name in self.values:
            time.sleep(0)
            if not name:
                raise NotKept("full")
        return {"held_values": len(self.values)}
