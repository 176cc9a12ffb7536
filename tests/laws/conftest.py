"""The laws are proved for every way to guard a trainer: `build` of their modules builds in each of them."""

import pytest

from tests.trainers import build

from .ways import build_guarded, params

LAWS = ("test_identity", "test_no_trace", "test_honesty")


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in LAWS:
        metafunc.parametrize("guarded_way", params("class"), indirect=True)


@pytest.fixture(autouse=True)
def guarded_way(request, monkeypatch):
    """Makes the `build` of a module of laws guard its trainers in one of the ways."""
    way = getattr(request, "param", None)

    def build_in_way(kind, folder, trainer_class=None, guard=True, extra=None, **overrides):
        extra = dict(extra or {})
        if not guard:
            return build(kind, folder, trainer_class, False, extra=extra, **overrides)
        given = extra.pop("guard", None)
        return build_guarded(way, kind, folder, given, extra, trainer_class=trainer_class, **overrides)

    if way is not None:
        monkeypatch.setattr(request.module, "build", build_in_way)
