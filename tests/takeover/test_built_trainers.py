"""Every Trainer that is built during a takeover is guarded, or it is said why not; afterwards none is."""

import copy
import inspect
import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import pytest
from accelerate.state import GradientState
from datasets import Dataset, concatenate_datasets, interleave_datasets
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardArguments, GuardedTrainer, GuardedTrainerMixin, GuardedTrainingArguments, guarded
from hf_nanguard.hf.compat.prepared_dataset import find_files
from hf_nanguard.hf.compat.unguardable_class import LOOP, find_own_loop, find_own_super
from hf_nanguard.takeover.built_trainers import Takeover
from hf_nanguard.testing import Fault, plant

from ..models import tiny_llama, token_dataset
from ..reference import assert_same, tensors_of
from ..trainers import build, common_arguments, stock_class


@pytest.fixture
def said() -> list[str]:
    return []


def take_over(said, **settings):
    return Takeover(settings, said.append)


@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
def test_stock_trainers_are_guarded_meanwhile(kind, tmp_path, said):
    with take_over(said, nanguard_on_spike="skip") as takeover:
        trainer = build(kind, tmp_path, guard=False)
    assert isinstance(trainer, GuardedTrainerMixin)
    assert isinstance(trainer, stock_class(kind))
    assert type(trainer).__name__ == stock_class(kind).__name__
    assert trainer.nanguard.arguments.nanguard_on_spike == "skip"
    events = tmp_path / "nanguard" / "events.jsonl"
    name = stock_class(kind).__name__
    assert said == [f"{name} is guarded with nanguard_on_spike=skip; events go to {events}"]
    assert takeover.num_built == 1
    assert type(build(kind, tmp_path, guard=False)) is stock_class(kind)


def test_a_constructor_finds_itself_as_without_us(tmp_path, said):
    seen = []

    class Mine(Trainer):
        def __init__(self, *args, guard, **kwargs):
            seen.append((guard, type(self)))
            super().__init__(*args, **kwargs)
            seen.append(len(self.get_train_dataloader()))
            assert "nanguard" not in vars(self)

    signature = inspect.signature(Trainer)
    with take_over(said):
        assert inspect.signature(Trainer) == signature
        trainer = build("plain", tmp_path, Mine, guard=False, extra={"guard": "a tower"})
    assert seen == [("a tower", Mine), 24]
    assert isinstance(trainer, GuardedTrainerMixin)
    assert inspect.signature(Trainer) == signature


def test_an_error_in_a_constructor_is_the_scripts(tmp_path, said):
    class Mine(Trainer):
        def __init__(self):
            raise KeyError("mine")

    with take_over(said) as takeover, pytest.raises(KeyError, match="mine"):
        Mine()
    assert (said, takeover.num_built) == ([], 0)
    with pytest.raises(KeyError, match="mine"):
        Mine()


def test_a_guarded_trainer_is_left_alone_but_for_what_is_given(tmp_path, said):
    own = GuardArguments(nanguard_max_bad_steps=3, nanguard_on_spike="clip")
    with take_over(said):
        trainer = build("plain", tmp_path, GuardedTrainer, guard=False, extra={"guard": own})
    assert type(trainer) is GuardedTrainer
    assert trainer.nanguard.arguments is own
    assert said[0].startswith(
        "GuardedTrainer was already guarded with nanguard_on_spike=clip, nanguard_max_bad_steps=3;"
    )
    with take_over(said, nanguard_on_spike="skip"):
        trainer = build("plain", tmp_path, GuardedTrainer, guard=False, extra={"guard": own})
    assert type(trainer) is GuardedTrainer
    settings = trainer.nanguard.arguments
    assert (settings.nanguard_max_bad_steps, settings.nanguard_on_spike) == (3, "skip")


def test_what_is_given_wins_over_the_scripts_own_arguments(tmp_path, said):
    own = {"nanguard_max_bad_steps": 3, "nanguard_on_spike": "clip"}
    args = GuardedTrainingArguments(**common_arguments(tmp_path), **own)
    with take_over(said, nanguard_on_spike="skip"):
        trainer = Trainer(tiny_llama(), args, train_dataset=token_dataset(8))
    settings = trainer.nanguard.arguments
    assert (settings.nanguard_max_bad_steps, settings.nanguard_on_spike) == (3, "skip")
    assert (args.nanguard_max_bad_steps, args.nanguard_on_spike) == (3, "clip")


def test_settings_that_do_not_go_with_the_scripts_own(tmp_path, said):
    args = GuardedTrainingArguments(**common_arguments(tmp_path), nanguard_skip_grad_norm=2.0)
    with pytest.raises(SystemExit) as stop, take_over(said, nanguard_mode="observe"):
        Trainer(tiny_llama(), args, train_dataset=token_dataset(8))
    assert stop.value.code == 2
    assert "nanguard_skip_grad_norm was set to 2.0 while nanguard_mode is 'observe'" in said[0]


def test_off_is_said(tmp_path, said):
    with take_over(said, nanguard_mode="off"):
        build("plain", tmp_path, guard=False)
    assert said == ["Trainer is not guarded because nanguard_mode is off."]


class OwnLoop(Trainer):
    def _inner_training_loop(self, *args, **kwargs):
        return "mine"


class AddedTo(Trainer):
    def train(self, *args, **kwargs):
        return super().train(*args, **kwargs)

    def _inner_training_loop(self, *args, **kwargs):
        return Trainer._inner_training_loop(self, *args, **kwargs)


class AddedToOwn(OwnLoop):
    def _inner_training_loop(self, *args, **kwargs):
        return super()._inner_training_loop(*args, **kwargs)


def test_the_host_has_the_methods_of_a_loop():
    called = {name: inspect.getsource(vars(Trainer)[name]) for name in LOOP}
    assert "_inner_training_loop" in called["train"]
    assert "_run_epoch" in called["_inner_training_loop"]
    assert find_own_loop(OwnLoop) == find_own_loop(AddedToOwn) == ["_inner_training_loop"]
    assert find_own_loop(AddedTo) == find_own_loop(Trainer) == find_own_loop(GuardedTrainer) == []


def test_trainers_of_trl_use_the_hosts_loop():
    import trl

    classes = [trl.SFTTrainer, trl.GRPOTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.RLOOTrainer, trl.RewardTrainer]
    assert [find_own_loop(cls) for cls in classes] == [[]] * len(classes)
    assert [find_own_super(cls) for cls in classes] == [[]] * len(classes)


class OwnSuper(Trainer):
    """Written as one should not: in a subclass each of the methods calls itself."""

    def __init__(self, *args, **kwargs):
        super(type(self), self).__init__(*args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        return super(self.__class__, self).compute_loss(*args, **kwargs)

    def log(self, *args, **kwargs):
        return super(type(self), self).log(*args, **kwargs)


class OpenSuper(Trainer):
    def compute_loss(self, *args, **kwargs):
        assert type(self).__name__ == self.__class__.__name__
        return super(OpenSuper, self).compute_loss(*args, **kwargs)  # noqa: UP008

    def log(self, *args, **kwargs):
        return super().log(*args, **kwargs), type(self), self.__class__


def test_a_super_that_admits_no_subclass_is_found():
    assert find_own_super(OwnSuper) == ["compute_loss", "log"]
    assert find_own_super(OpenSuper) == []


class NoSubclass(type):
    def __new__(mcs, name, bases, body):
        if any(isinstance(base, NoSubclass) for base in bases):
            raise TypeError("Sealed is final")
        return super().__new__(mcs, name, bases, body)


class Sealed(Trainer, metaclass=NoSubclass):
    pass


class Fixed(Trainer):
    def __setattr__(self, name, value):
        if name == "__class__" and value is not Fixed:
            raise TypeError("Fixed stays Fixed")
        super().__setattr__(name, value)


def test_a_trainer_that_is_none_is_left_alone(said):
    class Bare(Trainer):
        def __init__(self):
            self.args = "mine"

    with take_over(said):
        trainer = Bare()
    assert (type(trainer), trainer.args) == (Bare, "mine")
    assert said == [
        "Bare cannot be guarded because it was not built by the constructor of Trainer. It trains unguarded."
    ]


def test_a_trainer_that_lacks_something_is_left_alone(tmp_path, said, caplog):
    class Lacking(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            del self.accelerator

    with take_over(said):
        trainer = build("plain", tmp_path, Lacking, guard=False)
    assert type(trainer) is Lacking
    assert said[0] == (
        "Lacking cannot be guarded because its guard could not be built; the log says why. It trains unguarded."
    )
    assert "'Lacking' object has no attribute 'accelerator'" in caplog.text


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (OwnSuper, "its compute_loss, log calls super(type(self), self); write super() there"),
        (OwnLoop, "its _inner_training_loop runs a training loop of its own"),
        (Sealed, "it cannot be subclassed (Sealed is final)"),
        (Fixed, "its class cannot be changed (TypeError: Fixed stays Fixed)"),
    ],
)
def test_what_cannot_be_guarded_runs_unguarded(cls, why, tmp_path, said):
    with take_over(said):
        trainer = build("plain", tmp_path, cls, guard=False, max_steps=1)
    assert said == [f"{cls.__name__} cannot be guarded because {why}. It trains unguarded."]
    assert type(trainer) is cls
    assert trainer.train() == "mine" if cls is OwnLoop else trainer.train().global_step == 1


class Slotted(Trainer):
    __slots__ = ("extra",)


class Remembering(Trainer):
    def __setstate__(self, state):
        vars(self).update(state, remembered=True)


@pytest.fixture
def fresh():
    """After a run, accelerate holds weak references that no trainer of the process can be pickled with, stock or guarded."""
    GradientState._reset_state()


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda trainer: pickle.loads(pickle.dumps(trainer))}


@pytest.mark.parametrize("cls", [Trainer, Slotted, Remembering])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_guarded_by_itself(way, cls, tmp_path, said, fresh):
    with take_over(said):
        trainer = build("plain", tmp_path, cls, guard=False, max_steps=1)
        if cls is Slotted:
            trainer.extra = 3
        other = WAYS[way](trainer)
    assert vars(other).keys() - {"remembered"} == vars(trainer).keys()
    assert isinstance(other, GuardedTrainerMixin)
    assert isinstance(other, cls)
    assert other.nanguard.trainer is other
    assert other.train().global_step == 1
    assert cls is not Slotted or other.extra == 3
    assert cls is not Remembering or other.remembered
    assert said[0] == said[1]


def test_a_pickle_needs_nothing_of_ours(tmp_path, said, fresh):
    with take_over(said):
        text = pickle.dumps(build("plain", tmp_path, guard=False))
    assert b"nanguard" not in text.replace(str(tmp_path).encode(), b"")
    assert type(pickle.loads(text)) is Trainer


def test_a_registry_hears_nothing(tmp_path, said):
    known = []

    class Registered(Trainer):
        def __init_subclass__(cls, *, key):
            known.append(key)

    class Mine(Registered, key="mine"):
        pass

    with take_over(said):
        trainer = build("plain", tmp_path, Mine, guard=False)
    assert isinstance(trainer, GuardedTrainerMixin)
    assert known == ["mine"]

    class Derived(guarded(Mine), key="derived"):  # type: ignore[misc, call-arg]
        pass

    assert known == ["mine", "derived"]


def test_a_constructor_that_trains_is_told_of(tmp_path, said):
    class Eager(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.train()

    with take_over(said):
        copy.copy(build("plain", tmp_path, Eager, guard=False, max_steps=1))
    late = "Eager trained in its constructor, without the guard. Later training is guarded."
    assert [sentence == late for sentence in said] == [True, False, False]


def test_events_are_counted_wherever_the_script_goes(tmp_path, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with take_over(said):
        trainer = build("plain", Path("run"), guard=False)
        plant(trainer, Fault("loss", 1, 1))
        trainer.train()
        monkeypatch.chdir("/")
    assert said[-1] == f"1 event in {Path('run', 'nanguard', 'events.jsonl')}."


def test_a_forked_process_tells_of_its_own_trainers_only(tmp_path):
    """What it says comes back by a queue: a fork of multiprocessing ends without the end of the takeover."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def build_with_event(folder: Path) -> None:
        build("plain", folder, guard=False)
        (folder / "nanguard").mkdir(parents=True)
        (folder / "nanguard" / "events.jsonl").write_text("{}\n")

    with Takeover({}, queue.put):
        build_with_event(tmp_path / "parent")
        child = context.Process(target=build_with_event, args=(tmp_path / "child",))
        child.start()
        child.join(60)
        idle = context.Process(target=sys.exit)
        idle.start()
        idle.join(60)
    told = []
    while not queue.empty():
        told.append(queue.get())
    files = [tmp_path / name / "nanguard" / "events.jsonl" for name in ("parent", "child")]
    begun = [f"Trainer is guarded; events go to {file}" for file in files]
    assert told == [*begun, *(f"1 event in {file}." for file in reversed(files))]


def test_the_temperature_of_an_online_trainer_is_raised_before_it_is_built(tmp_path, said, caplog):
    with take_over(said, nanguard_min_temperature=0.5):
        trainer = build("grpo", tmp_path, guard=False, temperature=0.2)
    assert trainer.temperature == trainer.args.temperature == 0.5
    assert "temperature=0.2 was raised" in caplog.text


def test_events_of_an_earlier_run_are_not_counted(tmp_path, said):
    file = tmp_path / "nanguard" / "events.jsonl"
    file.parent.mkdir()
    file.write_text("{}\n{}\n")
    with take_over(said):
        build("plain", tmp_path, guard=False)
        build("plain", tmp_path, guard=False)
        file.write_text("{}\n{}\n{}\n")
    assert said[-1] == f"1 event in {file}."


def test_files_of_other_ranks_are_named_if_they_are_of_this_run(tmp_path, said):
    folder = tmp_path / "nanguard"
    folder.mkdir()
    for rank in (1, 2):
        (folder / f"events-rank{rank}.jsonl").write_text("{}\n")
    os.utime(folder / "events-rank1.jsonl", (1, 1))
    with take_over(said) as takeover:
        takeover.began -= 60  # the clock of a file system may be coarse
        build("plain", tmp_path, guard=False)
    assert said[-1] == f"no events in {folder / 'events.jsonl'} (other ranks: events-rank2.jsonl)."


def test_only_the_first_rank_speaks(tmp_path, said, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "process_index", 1)
    with take_over(said):
        trainer = build("plain", tmp_path, guard=False)
        build("plain", tmp_path, OwnLoop, guard=False)
    assert isinstance(trainer, GuardedTrainerMixin)
    assert said == []


# ---- the takeover itself fails ----


def _fail(*args, **kwargs):
    raise RuntimeError("planted")


@pytest.mark.parametrize("name", ["_prepare", "guard", "_report_events"])
def test_a_takeover_that_fails_leaves_the_script_as_it_is(name, tmp_path, said, monkeypatch):
    monkeypatch.setattr(Takeover, name, _fail)
    with take_over(said):
        trainer = build("plain", tmp_path / "ours", guard=False)
        trainer.train()
    stock = build("plain", tmp_path / "stock", guard=False)
    stock.train()
    assert_same(tensors_of(trainer), tensors_of(stock))
    assert any(" failed at " in text and text.endswith("(RuntimeError: planted).") for text in said)
    assert isinstance(trainer, GuardedTrainerMixin) == (name != "guard")


def test_a_message_that_fails_leaves_the_trainer_guarded(tmp_path, said, monkeypatch):
    """Of an event file that cannot be read, or a path that cannot be printed."""
    monkeypatch.setattr("hf_nanguard.report.run_files.Tail.__init__", _fail)
    with take_over(said):
        trainer = build("plain", tmp_path, guard=False)
    assert isinstance(trainer, GuardedTrainerMixin)
    assert said[0].startswith("message failed at takeover/built_trainers.py:")


def test_a_guard_that_cannot_be_built_leaves_the_trainer_stock(tmp_path, said, monkeypatch):
    monkeypatch.setattr("hf_nanguard.takeover.built_trainers.reduce_as", _fail)
    with take_over(said):
        trainer = build("plain", tmp_path / "ours", guard=False)
    assert type(trainer) is Trainer
    assert "takeover/built_trainers.py" in said[0]
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps


def test_ctrl_c_in_a_takeover_is_ctrl_c(tmp_path, said, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Takeover, "guard", interrupt)
    with pytest.raises(KeyboardInterrupt), take_over(said):
        build("plain", tmp_path, guard=False)


def test_a_dataset_made_of_several_keeps_the_files_of_all():
    """Without that, a framework that mixes datasets leaves no way back from a text to its file."""
    parts = []
    for number in range(3):
        parts.append(Dataset.from_dict({"text": [f"row {number}"]}))
        parts[-1].info.download_checksums = {f"file{number}.jsonl": {"num_bytes": number}} if number < 2 else None
    for mix in (concatenate_datasets, interleave_datasets):
        stock = mix(parts)
        with Takeover({}, print):
            ours = mix(parts)
        assert find_files(ours) == ["file0.jsonl", "file1.jsonl"]
        assert find_files(stock) == find_files(mix(parts)) == []
        assert ours.to_list() == stock.to_list()
        assert ours._fingerprint == stock._fingerprint, "what was cached must be found again"
