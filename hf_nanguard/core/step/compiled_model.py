"""Monitors of a compiled model, which ignores hooks on its modules: they get a forward of their own, which is not compiled."""

from collections.abc import Callable

from ..ranks import Ranks
from ..rerun.micro_batch import AccumulationGroup
from ..rerun.runner import Runner
from ..torch_private import has_compiled_part
from .redo import Redo


def can_hook(runner: Runner, ranks: Ranks) -> bool:
    """Returns whether hooks on modules can be called; the extra forwards of a compiled model are made on one rank only."""
    return ranks.size == 1 or not has_compiled_part(runner.model)


def extra_forwards(
    runner: Runner, redo: Redo, find_group: Callable[[], AccumulationGroup]
) -> Callable[[], None] | None:
    """Returns a function that runs the forward of every usable micro-batch of the group once more, for hooks that a compiled model
    ignores, and leaves no trace; `None` if hooks are called anyway or cannot be."""

    def run() -> None:
        group = find_group()
        if runner.why_not(group) is not None:
            return
        with redo.replay(runner), runner.undisturbed():
            for micro in group.micro_batches:
                if not micro.must_be_dropped:
                    runner.look(micro)

    if not has_compiled_part(runner.model) or not can_hook(runner, redo.ranks):
        return None
    return lambda: redo.boundary.call("extra forward", run)
