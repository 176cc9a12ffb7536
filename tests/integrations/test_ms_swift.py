"""The callback for ms-swift, against a stand-in of its table; the real package is run in test_real_packages.py."""

import sys
from types import ModuleType

import pytest

from hf_nanguard import ArgumentError, NanGuardCallback
from hf_nanguard.integrations.ms_swift import register


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


def test_bad_settings_are_refused_at_once(callbacks_map):
    with pytest.raises(ArgumentError, match="nanguard_max_bad_steps"):
        register({"nanguard_max_bad_steps": 0})
    assert "nanguard" not in callbacks_map
