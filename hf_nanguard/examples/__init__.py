"""Building blocks of the recipes: command line, run, comparison with a stock run, and tasks made in code."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare import Figures, Outcome, compare_runs, measure_rewards
    from .recipe.guarded_run import guarded_run, one_sentence, run_script
    from .recipe.planted_comparison import compare_grpo, compare_sft
    from .recipe.recipe_parser import RecipeFlags, RecipeParser, argument
    from .recipe.safe_weights import PICKLE_HELP, require_safetensors
    from .recipe.user_data import find_model_options, fit_model, load_rows, load_tokenizer
    from .tasks import calendar_words, pictures, sums, token_alignment

# Loaded on first use: the commands import this package, and must answer `--help` at once.
_HOMES = {
    "compare": ("Figures", "Outcome", "compare_runs", "measure_rewards"),
    "recipe.guarded_run": ("guarded_run", "one_sentence", "run_script"),
    "recipe.planted_comparison": ("compare_grpo", "compare_sft"),
    "recipe.recipe_parser": ("RecipeFlags", "RecipeParser", "argument"),
    "recipe.safe_weights": ("PICKLE_HELP", "require_safetensors"),
    "recipe.user_data": ("find_model_options", "fit_model", "load_rows", "load_tokenizer"),
}
_TASKS = ("calendar_words", "pictures", "sums", "token_alignment")

__all__ = sorted([*_TASKS, *(name for names in _HOMES.values() for name in names)])


def __getattr__(name: str) -> Any:
    if name in _TASKS:
        return import_module(f".tasks.{name}", __name__)
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
