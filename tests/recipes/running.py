"""Recipes run as tests need them: for their outcomes, or for their exit code."""

from types import ModuleType

from hf_nanguard.examples import Outcome, run_script


def find_outcomes(recipe: ModuleType, *words: str) -> list[Outcome]:
    """Returns the outcomes of a recipe's runs, the guarded one last."""
    return recipe.main(*recipe.make_parser().parse(list(words)))


def find_exit_code(recipe: ModuleType, *words: str) -> int:
    """Runs a recipe as a script and returns its exit code."""
    return run_script(recipe.make_parser, recipe.main, list(words))
