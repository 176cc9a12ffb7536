"""The plugin for axolotl, against a stand-in of its base class; the real package is run in test_real_packages.py."""

import logging
import sys
from types import ModuleType

import pytest
from pydantic import BaseModel, ValidationError

from hf_nanguard.hf.compat.prepared_dataset import find_files
from hf_nanguard.hf.trainer.mixin import GuardedTrainerMixin
from hf_nanguard.integrations import axolotl

from ..trainers import build


@pytest.fixture
def plugin(monkeypatch):
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    axolotl._make_plugin.cache_clear()
    yield axolotl.NanGuardPlugin()
    axolotl._make_plugin.cache_clear()


def test_the_plugin_guards_the_trainer_with_the_settings_of_the_file(plugin, tmp_path, caplog):
    trainer = build("plain", tmp_path, guard=False)
    file = tmp_path / "rows.jsonl"
    file.touch()
    (tmp_path / "more").mkdir()
    inside = tmp_path / "more" / "a.jsonl"
    inside.touch()
    named = [{"path": str(file)}, {"path": "json", "data_files": [str(file), "nowhere.json"]}, {"path": "hub/rows"}]
    datasets = [*named, {"path": str(inside.parent)}]
    config = {"learning_rate": 1e-3, "nanguard_max_bad_steps": 7, "nanguard_mode": None, "datasets": datasets}
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        plugin.post_trainer_create(config, trainer)
    assert isinstance(trainer, GuardedTrainerMixin)
    assert (trainer.nanguard.policy.max_bad_steps, trainer.nanguard.policy.mode) == (7, "act")
    assert "Trainer is guarded" in caplog.text
    assert find_files(trainer.train_dataset) == [str(inside), str(file)]


def test_settings_are_keys_of_the_config_and_are_checked_with_it(plugin):
    module, _, name = plugin.get_input_args().rpartition(".")
    settings = getattr(sys.modules[module], name)

    class Config(BaseModel):
        learning_rate: float

    class Merged(Config, settings):  # as axolotl does
        pass

    assert Merged(learning_rate=1.0, nanguard_on_spike="skip").nanguard_on_spike == "skip"
    assert Merged(learning_rate=1.0).nanguard_on_spike is None
    with pytest.raises(ValidationError, match=r"nanguard_on_spike must be one of .* got 'jump'"):
        Merged(learning_rate=1.0, nanguard_on_spike="jump")


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="NanGuard"):
        _ = axolotl.NanGuard
