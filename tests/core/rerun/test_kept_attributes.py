"""A replayed loss leaves nothing behind in the trainer's books."""

import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from hf_nanguard.core.rerun.kept_attributes import WatchedAttributes, untouched


class Owner:
    """Has books of every kind."""

    def __init__(self):
        self.number = 1
        self.tensor = torch.zeros(2)
        self.metrics = {"train": defaultdict(list, loss=[1.0]), "eval": defaultdict(list)}
        self.texts = deque(["a", "b"], maxlen=3)
        self.seen = {1, 2}
        self.rows = [[1], [2, 3]]
        self.ordered = OrderedDict(x=1, y=2)
        self.counts = Counter("aab")


def scribble(owner):
    owner.number += 1
    owner.tensor = torch.ones(2)
    owner.new = "left behind"
    owner.metrics["train"]["loss"].append(2.0)
    owner.metrics["train"]["grad"].append(3.0)
    owner.metrics["eval"] = {}
    owner.texts.extend("cdef")
    owner.seen.add(9)
    owner.rows[0].append(7)
    owner.rows.pop()
    owner.ordered["z"] = 3
    owner.ordered.move_to_end("x")
    owner.counts.update("zz")


def snapshot(owner):
    return {name: repr(value) for name, value in vars(owner).items()}


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_as_before(raises):
    owner = Owner()
    before = snapshot(owner)
    objects = dict(vars(owner))
    inner = owner.metrics["train"], owner.metrics["train"]["loss"], owner.metrics["eval"], owner.rows[0], owner.rows[1]

    def block():
        with untouched(owner):
            scribble(owner)
            assert snapshot(owner) != before
            if raises:
                raise ValueError("planted")

    if raises:
        with pytest.raises(ValueError, match="planted"):
            block()
    else:
        block()
    assert snapshot(owner) == before
    assert not hasattr(owner, "new")
    assert all(vars(owner)[name] is value for name, value in objects.items()), "the same objects"
    after = owner.metrics["train"], owner.metrics["train"]["loss"], owner.metrics["eval"], owner.rows[0], owner.rows[1]
    assert all(one is other for one, other in zip(inner, after, strict=True)), "the same containers inside"


def test_kinds_of_containers_survive():
    owner = Owner()
    with untouched(owner):
        scribble(owner)
    owner.metrics["train"]["fresh"].append(1)
    assert owner.metrics["train"]["fresh"] == [1], "still a defaultdict"
    owner.texts.extend("xyz")
    assert list(owner.texts) == ["x", "y", "z"], "still bounded"


def test_a_deleted_attribute_comes_back():
    owner = Owner()
    with untouched(owner):
        del owner.number
    assert owner.number == 1


def test_tensors_are_kept_by_reference_not_copied():
    owner = Owner()
    owner.list = [owner.tensor]
    with untouched(owner):
        owner.list.clear()
    assert owner.list[0] is owner.tensor


def test_keys_may_be_tensors():
    owner, keys = Owner(), [torch.zeros(2), torch.zeros(2)]
    owner.by_tensor = {keys[0]: 1}
    with untouched(owner):
        pass
    with untouched(owner):
        owner.by_tensor[keys[1]] = owner.by_tensor.pop(keys[0])
    [key] = owner.by_tensor
    assert key is keys[0]


def test_tensors_inside_containers_get_their_values_back():
    owner = Owner()
    owner.means = {"a": [torch.zeros(2)], "draws": torch.Generator().manual_seed(1)}
    inner, state = owner.means["a"][0], owner.means["draws"].get_state()
    with untouched(owner):
        inner += 1
        torch.rand(3, generator=owner.means["draws"])
        owner.means["a"].append(1)
    assert owner.means["a"] == [inner]
    assert torch.equal(inner, torch.zeros(2))
    assert torch.equal(owner.means["draws"].get_state(), state)


def test_datasets_are_left_alone():
    owner = Owner()
    owner.train_dataset = [1, 2]
    with untouched(owner):
        owner.train_dataset.append(3)
    assert owner.train_dataset == [1, 2, 3]


def test_an_output_kept_by_the_trainer_is_no_obstacle():
    """A trainer may keep the last model output, which is a dict that refuses `update`."""
    owner = Owner()
    owner.last_output = CausalLMOutput(loss=torch.ones(()), logits=torch.zeros(1))
    kept = owner.last_output
    with untouched(owner):
        owner.last_output = None
    assert owner.last_output is kept
    assert set(kept) == {"loss", "logits"}


def test_a_container_that_holds_itself():
    owner = Owner()
    owner.loop = []
    owner.loop.append(owner.loop)
    with untouched(owner):
        owner.loop.append(1)
    assert owner.loop == [owner.loop]


def test_nested_use():
    owner = Owner()
    with untouched(owner):
        owner.number = 5
        with untouched(owner):
            owner.number = 6
            owner.rows.append(1)
        assert owner.number == 5
        assert len(owner.rows) == 2
    assert owner.number == 1


@contextmanager
def called(watched):
    """Surrounds what the function does, as the recorder surrounds `compute_loss`."""
    watched.begin_call()
    has_returned = False
    try:
        yield
        has_returned = True
    finally:
        watched.end_call(has_returned)


def test_only_what_the_function_writes_is_put_back():
    owner = Owner()
    watched = WatchedAttributes(owner, ignored=["counts"])
    for number in range(3):
        watched.begin_group()
        owner.number += 1  # by others
        before = snapshot(owner)
        for _ in range(2):
            with called(watched):
                owner.texts.append("c")
                owner.rows.append([number])
                owner.tensor = owner.tensor + 1
                owner.made_by_it = number
                owner.counts.update("z")
            owner.ordered["others"] = number
        assert watched.written == {"texts", "rows", "tensor", "made_by_it"}
        watched.restore()
        after = {**before, "ordered": repr(owner.ordered), "counts": repr(owner.counts)}
        assert snapshot(owner) == after


def test_a_function_that_has_only_raised_is_still_learned_from():
    owner = Owner()
    watched = WatchedAttributes(owner)

    def call(fails):
        with called(watched):
            assert not fails
            owner.rows.append([0])

    watched.begin_group()
    with pytest.raises(AssertionError):
        call(True)
    for _ in range(2):
        watched.begin_group()
        before = snapshot(owner)
        call(False)
        watched.restore()
        assert snapshot(owner) == before


def test_an_error_of_the_function_is_no_obstacle():
    owner = Owner()
    watched = WatchedAttributes(owner)
    watched.begin_group()

    def fail():
        with called(watched):
            scribble(owner)
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    watched.restore()
    assert snapshot(owner) == snapshot(Owner())


def test_outputs_objects_and_long_lists_are_neither_held_nor_copied():
    owner = Owner()
    owner.history, owner.last, owner.steps = [torch.zeros(1) for _ in range(5000)], None, 0
    watched = WatchedAttributes(owner)
    outputs = []
    for number in range(3):
        watched.begin_group()
        with called(watched):
            owner.history.append(torch.zeros(1))
            owner.last = CausalLMOutput(logits=torch.zeros(2, requires_grad=True))
            owner.steps += 1
            outputs.append(weakref.ref(owner.last))
        watched.restore()
        assert (len(owner.history), owner.steps) == (5001 + number, 0)
        assert [reference() for reference in outputs[:-1]] == [None] * number
        assert "history" not in watched.kept.contents


def test_a_copy_from_before_anything_was_learned_puts_back_what_was_learned_since():
    owner = Owner()
    watched = WatchedAttributes(owner)
    first = watched.copy()
    watched.begin_group()
    with called(watched):
        owner.number += 1
    owner.rows.append("others")
    first.restore()
    assert owner.number == 1
    assert "others" in owner.rows


@dataclass(frozen=True)
class Frozen:
    number: int = 1


class Counting:
    """Does more than to keep what is written."""

    def __init__(self):
        vars(self)["number"], self.num_written = 1, 0

    def __setattr__(self, name, value):
        vars(self)[name] = value
        vars(self)["num_written"] = vars(self).get("num_written", 0) + 1


@pytest.mark.parametrize("make", [Frozen, Counting])
def test_an_object_that_refuses_to_be_written_is_put_back(make):
    owner = make()
    before = dict(vars(owner))
    with untouched(owner):
        vars(owner).update(number=2, new="left behind")
    assert vars(owner) == before


class Refusing(type):
    """The class of a class that refuses to be written."""

    def __setattr__(cls, name, value):
        raise AttributeError(name)

    def __delattr__(cls, name):
        raise AttributeError(name)


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("meta", [type, Refusing])
def test_a_class_is_put_back(meta, derived):
    base = meta("Base", (), {"calls": 1, "seen": [1]})
    owner = meta("Derived", (base,), {}) if derived else base
    watched = WatchedAttributes(owner)
    for _ in range(2):
        watched.begin_group()
        with called(watched):
            type.__setattr__(owner, "calls", owner.calls + 1)
            type.__setattr__(owner, "new", "left behind")
            type.__setattr__(owner, "seen", [*owner.seen, 2])
        assert owner.calls == 2
        watched.restore()
        assert (owner.calls, owner.seen, base.calls) == (1, [1], 1)
        assert not hasattr(owner, "new")
        assert ("calls" in vars(owner)) is not derived
