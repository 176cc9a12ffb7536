"""The five ways to guard a trainer, as one table: every law holds for each of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_nanguard import GuardArguments, NanGuardCallback, attach
from hf_nanguard.takeover.takeover import Takeover
from tests.trainers import build


def _as_class(kind: str, folder: Path, guard: GuardArguments | None, extra: dict[str, Any], **settings: Any) -> Any:
    return build(kind, folder, extra={**extra, "guard": guard}, **settings)


def _attached(kind: str, folder: Path, guard: GuardArguments | None, extra: dict[str, Any], **settings: Any) -> Any:
    return attach(build(kind, folder, guard=False, extra=extra, **settings), guard)


def _in_the_list(kind: str, folder: Path, guard: GuardArguments | None, extra: dict[str, Any], **settings: Any) -> Any:
    callbacks = [NanGuardCallback(guard), *extra.get("callbacks", ())]
    return build(kind, folder, guard=False, extra={**extra, "callbacks": callbacks}, **settings)


def _added_later(kind: str, folder: Path, guard: GuardArguments | None, extra: dict[str, Any], **settings: Any) -> Any:
    trainer = build(kind, folder, guard=False, extra=extra, **settings)
    trainer.add_callback(NanGuardCallback(guard))
    return trainer


def _taken_over(kind: str, folder: Path, guard: GuardArguments | None, extra: dict[str, Any], **settings: Any) -> Any:
    given = (
        {} if guard is None else {name: value for name, value in vars(guard).items() if name.startswith("nanguard_")}
    )
    with Takeover(given, lambda sentence: None):
        return build(kind, folder, guard=False, extra=extra, **settings)


WAYS: dict[str, Callable[..., Any]] = {
    "class": _as_class,
    "attach": _attached,
    "callback in the constructor": _in_the_list,
    "callback added later": _added_later,
    "nanguard run": _taken_over,
}


def build_guarded(
    way: str,
    kind: str,
    folder: Path,
    guard: GuardArguments | None = None,
    extra: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Builds a guarded trainer in one of the five ways."""
    return WAYS[way](kind, folder, guard, extra or {}, **settings)
