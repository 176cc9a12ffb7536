"""The callback for ms-swift, against a stand-in of its table; the real package is run in test_real_packages.py."""

import json
import sys
from types import ModuleType

import pytest

from hf_nanguard import ArgumentError, NanGuardCallback
from hf_nanguard.hf.compat.prepared_dataset import find_files
from hf_nanguard.hf.trainer.mixin import GuardedTrainerMixin
from hf_nanguard.integrations.ms_swift import register

from ..models import token_dataset
from ..trainers import build


@pytest.fixture
def callbacks_map(monkeypatch) -> dict:
    package, module = ModuleType("swift"), ModuleType("swift.callbacks")
    module.callbacks_map = {"lisa": object}
    monkeypatch.setitem(sys.modules, "swift", package)
    monkeypatch.setitem(sys.modules, "swift.callbacks", module)
    return module.callbacks_map


def test_the_callback_is_registered_with_its_settings(callbacks_map):
    register({"nanguard_max_bad_steps": 7})
    callback = callbacks_map["nanguard"](object(), object())  # as ms-swift calls it: arguments, trainer
    assert isinstance(callback, NanGuardCallback)
    assert callback.arguments.nanguard_max_bad_steps == 7
    assert "lisa" in callbacks_map


class Lazy(list):
    """As ms-swift's own dataset, which holds the one that was loaded."""

    def __init__(self, dataset):
        super().__init__(dataset)
        self.dataset = dataset


def test_the_trainer_is_guarded_and_its_dataset_gets_a_record_of_its_files(callbacks_map, tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    file.touch()
    # ms-swift saves its arguments before it builds a trainer, however they were given: by flags, a YAML file or in Python
    (tmp_path / "args.json").write_text(json.dumps({"model": "m", "dataset": [f"{file}#500", "hub/rows"]}))
    register()
    extra = {"train_dataset": Lazy(token_dataset(4)), "callbacks": [callbacks_map["nanguard"](None, None)]}
    trainer = build("plain", tmp_path, guard=False, extra=extra)
    assert isinstance(trainer, GuardedTrainerMixin)
    assert find_files(trainer.train_dataset) == [str(file)]
    assert (
        "Trainer is guarded. Dataset rows in events are rows of the dataset that ms-swift has prepared" in caplog.text
    )


def test_without_saved_arguments_there_is_no_record(callbacks_map, tmp_path, caplog):
    register()
    extra = {"train_dataset": token_dataset(4), "callbacks": [callbacks_map["nanguard"](None, None)]}
    trainer = build("plain", tmp_path, guard=False, extra=extra)
    assert find_files(trainer.train_dataset) == []
    assert "Trainer is guarded" in caplog.text


def test_bad_settings_are_refused_at_once(callbacks_map):
    with pytest.raises(ArgumentError, match="nanguard_max_bad_steps"):
        register({"nanguard_max_bad_steps": 0})
    assert "nanguard" not in callbacks_map
