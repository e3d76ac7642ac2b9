import gc
import pickle
import threading

import numpy as np
import pytest

from kvtiers.layout.borrowed_views import ValueViews

STRIDE = 8192


@pytest.fixture
def memory():
    return memoryview(bytearray(STRIDE * 4))


@pytest.fixture
def views(memory):
    return ValueViews(memory, STRIDE)


def test_a_view_is_flat_bytes_of_exactly_one_value(views, memory):
    loan = views.borrow([2], [4096], readonly=False)
    view = loan.views[0]
    assert (view.format, view.ndim, view.itemsize, len(view), view.readonly) == ("B", 1, 1, 4096, False)
    view[:] = b"\x07" * 4096
    assert bytes(memory[2 * STRIDE : 2 * STRIDE + 4096]) == b"\x07" * 4096
    assert not any(memory[2 * STRIDE + 4096 : 3 * STRIDE])
    del view
    assert loan.take_back()


def test_a_view_for_a_write_is_read_only(views):
    loan = views.borrow([0], [4096], readonly=True)
    with pytest.raises(TypeError):
        loan.views[0][0] = 1
    with pytest.raises(TypeError):
        loan.views[0][1:3][0] = 1
    assert loan.take_back()


@pytest.mark.parametrize(("row", "nbytes"), [(4, 4096), (-1, 4096), (0, STRIDE + 1), (0, 0), (0, -1), (2**40, 4096)])
def test_there_is_no_view_beyond_a_row(views, row, nbytes):
    with pytest.raises(IndexError, match=r"rows 0 to 3 have 8192 bytes"):
        views.borrow([row], [nbytes], readonly=True)
    with pytest.raises(IndexError):
        views.own([row], [nbytes])


def test_a_view_that_is_kept_is_found_and_released_so_that_it_cannot_be_used_any_more(views):
    loan = views.borrow([1], [4096], readonly=False)
    view = loan.views[0]
    assert not loan.take_back()
    assert loan.is_free()
    with pytest.raises(ValueError, match="released"):
        view[0] = 1


def test_one_view_of_many_that_is_kept_is_found(views):
    loan = views.borrow([0, 1, 2], [4096, 4096, 4096], readonly=True)
    last = loan.views[-1]
    assert not loan.take_back()
    with pytest.raises(ValueError, match="released"):
        bytes(last)


KEEPERS = {
    "a slice": lambda view: view[5:9],
    "an array": lambda view: np.frombuffer(view, np.uint8),
    "a view of it": memoryview,
    "a cast": lambda view: view.cast("I"),
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS.keys())
@pytest.mark.parametrize("readonly", [True, False])
def test_a_buffer_that_was_kept_is_found_and_found_again_when_it_is_released(views, keep, readonly):
    loan = views.borrow([1], [4096], readonly=readonly)
    kept = keep(loan.views[0])
    assert not loan.take_back()
    assert not loan.is_free()
    del kept
    assert loan.is_free()


def test_a_view_that_is_in_use_right_now_counts_as_kept_until_it_is_not(views):
    loan = views.borrow([1], [4096], readonly=False)
    using = memoryview(loan.views[0]).cast("B")
    exported = np.asarray(using)
    assert not loan.take_back()
    del using
    assert not loan.is_free()
    del exported
    assert loan.is_free()


def test_an_export_that_forbids_the_release_is_no_error(views):
    loan = views.borrow([1], [4096], readonly=False)
    exported = pickle.PickleBuffer(loan.views[0])
    with pytest.raises(BufferError):
        loan.views[0].release()
    assert not loan.take_back()
    del exported
    assert loan.is_free()


def test_an_unreachable_cycle_is_not_a_kept_buffer(views):
    def use(view):
        error = ValueError("its traceback holds this frame")
        error.part = view[1:5]
        error.itself = error
        del view

    gc.disable()
    try:
        loan = views.borrow([1], [4096], readonly=False)
        use(loan.views[0])
        assert loan.take_back()
    finally:
        gc.enable()


def test_many_threads_whose_cycles_are_collected_at_once_are_not_accused(views):
    accused = []

    def borrow(row):
        for _ in range(20):
            loan = views.borrow([row], [4096], readonly=False)
            cycle = [loan.views[0][1:2]]
            cycle.append(cycle)
            del cycle
            if not loan.take_back():
                accused.append(row)

    threads = [threading.Thread(target=borrow, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not accused


def test_after_close_there_is_nothing_to_cut_from(views):
    views.close()
    with pytest.raises(IndexError):
        views.own([0], [4096])
