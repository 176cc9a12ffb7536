"""Shared by `nanguard sft` and `nanguard grpo`: a short help, and the call of the recipe.

The recipes take every flag of TRL's scripts. Listing them needs the host libraries, so `--help` shows common flags and
`--help_all` all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .command_parser import Subparsers, load_recipe
from .setting_flags import add_flags

PRESETS = ("balanced", "ultra_conservative")
# Flags with the name of their value, none for a switch, and their help.
OWN = {
    "--config": ("FILE", "YAML file with any of the arguments, one per line"),
    "--compare": (None, "plant a failure, run stock and guarded, and print both outcomes"),
    "--json": (None, "print the result as one JSON object, and everything else on standard error"),
    "--allow_pickle": (None, "also load weights that are pickles, which can run any code; only for models you trust"),
    "--help_all": (None, "list all flags, including those of TRL, and exit"),
}
COMMON = {
    "--model_name_or_path": ("NAME", "folder of a model, or its name on the hub"),
    "--dataset_name": ("NAME", "folder of data files, or the name of a dataset on the hub"),
    "--output_dir": ("FOLDER", "folder for the model, checkpoints and events of the guard"),
    "--learning_rate": ("X", "peak of the schedule"),
    "--max_steps": ("N", "optimizer steps"),
    "--per_device_train_batch_size": ("N", "samples per micro-batch"),
    "--gradient_accumulation_steps": ("N", "micro-batches per step"),
    "--bf16": ("BOOL", "bfloat16 mixed precision; on unless --fp16 is given"),
    "--use_peft": (None, "train LoRA adapters; --lora_r, --lora_alpha, --lora_target_modules, ..."),
}
SETTINGS = """precedence of values:
  Highest first: flag, YAML file of --config, --preset, TRL's default. The built-in model is untrained and keeps
  its own learning rate with a preset.
"""
EXIT_CODES = "exit codes: 0; 1 if the guard had to halt the run; 2 for bad arguments; 130 for Ctrl-C\n"
HELP = ("-h", "--help")


def add_recipe(
    subparsers: Subparsers,
    name: str,
    summary: str,
    description: str,
    examples: str,
    common: dict[str, tuple[str | None, str]],
) -> None:
    """Adds the command of a recipe to the command line; its help shows the flags `common` besides those of all recipes."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        usage=f"nanguard {name} [--preset NAME] [--config FILE] [--compare] [--json] [any flag of TRL's {name} script]",
        description=description,
        epilog=f"{SETTINGS}\nexamples:\n{examples}\n{EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", choices=PRESETS, help="arguments that work for this kind of training")
    host = parser.add_argument_group("common flags of TRL")
    for group, flags in ((parser, OWN), (host, {**COMMON, **common})):
        for flag, (metavar, text) in flags.items():
            kind = {"action": "store_true"} if metavar is None else {"metavar": metavar}
            group.add_argument(flag, help=text, **kind)  # type: ignore[arg-type] # mypy checks each keyword for each type
    add_flags(parser.add_argument_group("settings of the guard"))
    parser.set_defaults(run=run)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line that begins with a recipe's name into our own words and those the recipe parses."""
    if any(word in HELP for word in words):
        return [words[0], HELP[1]], []
    return list(words[:1]), list(words[1:])


def run(arguments: argparse.Namespace) -> int:
    """Runs the recipe and returns its exit code."""
    recipe = load_recipe(arguments.command, arguments.command)
    from ...examples.recipe.guarded_run import run_recipe

    parser = recipe.make_parser(f"nanguard {arguments.command}")
    if "--help_all" in arguments.words:
        parser.print_help()
        return 0
    return run_recipe(parser, recipe.main, arguments.words)
