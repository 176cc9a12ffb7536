"""Iterators that a loss reads cannot be put back, so they are not read while a micro-batch runs again."""

import csv
import io
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

from hf_nanguard.core.rerun.closed_iterators import UnrepeatableError, closed_iterators

numbers = count()


class Holder:
    def __init__(self, stream):
        self.stream = stream

    def read(self, *args):
        return next(self.stream)

    __call__ = read


class Reader(nn.Module):
    """A module with an iterator of its own."""

    def __init__(self, stream=None):
        super().__init__()
        self.stream = stream

    def forward(self):
        return next(self.stream)


def _of_closure():
    stream = iter(range(9))
    return lambda: next(stream), nn.Module(), stream


def _of_inner_function():
    stream = (number for number in range(9))

    def inner():
        return next(stream)

    return lambda: inner(), nn.Module(), stream


def _of_global():
    return lambda: next(numbers), nn.Module(), numbers


def _of_module():
    module = Reader(iter([1, 2, 3]))
    return module.forward, nn.Sequential(module), module.stream


def _of_hook():
    holder, module = Holder(map(int, "123")), nn.Identity()
    module.register_forward_hook(holder)
    return lambda: module(torch.zeros(1)), nn.Sequential(module), holder.stream


def _of_object():
    holder = Holder(zip("abc", "def", strict=True))
    return holder.read, nn.Module(), holder.stream


def _of_partial():
    streams = {"names": [iter("abc")]}
    return partial(lambda given: next(given["names"][0]), streams), nn.Module(), streams["names"][0]


@pytest.mark.parametrize(
    "make", [_of_closure, _of_inner_function, _of_global, _of_module, _of_hook, _of_object, _of_partial]
)
def test_an_iterator_is_found_and_stays_where_it_is(make):
    read, model, iterator = make()
    functions = [] if make in (_of_module, _of_hook) else [read]
    read()
    with closed_iterators(model, *functions), pytest.raises(UnrepeatableError, match="reads from the iterator"):
        read()
    read()
    assert str(next(iterator)) in ("2", "3", "c", "('c', 'f')")  # the third item: two were read outside, none inside


def test_what_is_no_iterator_can_be_used():
    log, table = io.StringIO(), csv.writer(io.StringIO())

    def loss():
        log.write("step")
        table.writerow([1])
        return sum(iter([1, 2]))

    with closed_iterators(nn.Module(), loss):
        assert loss() == 3


def test_other_methods_of_an_iterator_can_be_used():
    class Cursor:
        def __next__(self):
            return 1

        def execute(self):
            return "done"

    cursor = Cursor()
    with closed_iterators(nn.Module(), lambda: cursor):
        assert cursor.execute() == "done"
    assert type(cursor) is Cursor


def test_what_somebody_has_replaced_meanwhile_stays():
    holder = Holder(iter("abc"))
    with closed_iterators(nn.Module(), holder.read):
        holder.stream = iter("xyz")
    assert holder.read() == "x"


def test_an_error_inside_puts_everything_back():
    holder = Holder(stream := iter("abc"))
    with pytest.raises(KeyboardInterrupt), closed_iterators(nn.Module(), holder):
        raise KeyboardInterrupt
    assert holder.stream is stream


def test_itself_and_empty_variables():
    held = []
    held.append(held)

    def loss():
        return held, late

    with closed_iterators(nn.Module(), loss):
        assert held[0] is held
    late = 1
    assert loss() == (held, 1)
