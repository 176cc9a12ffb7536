"""Facts from the folder of a run or of a checkpoint: its arguments, state, model, adapter and tokenizer. Nothing is loaded."""

from collections.abc import Mapping
from pathlib import Path

from transformers import TrainingArguments

from ...errors import ArgumentError
from ...safe_files import read_file
from ..rules.run_facts import Facts
from .argument_facts import find_argument_facts, find_highest_rate, read_number
from .argument_values import find_bad_values
from .file_facts import ConfigFile, find_scale, read_targets
from .json_files import read_json
from .model_files import find_model_facts, read_model_config
from .saved_arguments import read_saved_arguments

MAX_TEMPLATE = 2**20
ARGUMENT_CLASSES = {"SFTConfig": "sft", "DPOConfig": "dpo", "KTOConfig": "kto", "RewardConfig": "reward", "GRPOConfig": "grpo",
                    "RLOOConfig": "rloo"}  # fmt: skip


def read_run(folder: Path) -> ConfigFile:
    """Reads the folder of a run: what its newest checkpoint says. Pickles are not loaded: of `training_args.bin` only the
    instructions are read, for their plain values."""
    checkpoints = sorted(
        (path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()), key=lambda path: int(path.name[11:])
    )
    newest = checkpoints[-1] if checkpoints else folder
    state, config, adapter = (
        read_json(newest / name) for name in ("trainer_state.json", "config.json", "adapter_config.json")
    )
    saved = read_saved_arguments(newest) or read_saved_arguments(folder)
    if saved is None and not any(isinstance(each, Mapping) for each in (state, config, adapter)):
        raise ArgumentError(
            f"{folder} must be the folder of a run, but it has neither a checkpoint nor a model. Give its YAML file."
        )
    facts = Facts.of(adapter="none") if isinstance(config, Mapping) and adapter is None else Facts()
    if isinstance(adapter, Mapping):
        facts = _read_adapter(adapter)
    elif isinstance(config, Mapping):
        facts = facts.update(read_model_config(config, newest))
    facts = facts.update(_read_tokenizer(newest))
    if isinstance(state, Mapping):
        steps, rate = state.get("max_steps"), find_highest_rate(state)
        facts = facts.update(Facts.of(learning_rate=rate, max_steps=steps if isinstance(steps, int) else None))
    if saved is None:
        remark = f"{folder.name} has no training_args.bin that can be read, so most arguments are not known: give its YAML file."
        return ConfigFile(str(folder), "run", facts, remarks=[remark])
    values = saved[1]
    for name in find_bad_values(values, [TrainingArguments]):
        del values[name]
    return ConfigFile(str(folder), "run", facts.update(find_argument_facts(values, find_kind(saved[0]))))


def find_kind(class_name: str) -> str:
    """Returns the kind of training whose arguments have a class of this name, which may be guarded."""
    return next((task for name, task in ARGUMENT_CLASSES.items() if class_name.endswith(name)), "trainer")


def _read_adapter(adapter: Mapping[str, object]) -> Facts:
    """Returns what the config of an adapter says, and the model it was trained on if it is on this machine."""
    targets, base = read_targets(adapter.get("target_modules")), adapter.get("base_model_name_or_path")
    scale = None
    if not adapter.get("rank_pattern") and not adapter.get("alpha_pattern"):
        numbers = {
            name: adapter.get(name) for name in ("r", "lora_alpha") if isinstance(adapter.get(name), int | float)
        }
        scale = find_scale(
            read_number(numbers, "r"), read_number(numbers, "lora_alpha"), adapter.get("use_rslora") is True
        )
    facts = find_model_facts(base) if isinstance(base, str) and base else Facts()
    return facts.update(
        Facts.of(
            adapter=str(adapter.get("peft_type", "lora")).lower(),
            adapter_targets=targets,
            adapter_scale=scale,
            has_output_head_adapter="lm_head" in (targets or ()),
        )
    )


def _read_tokenizer(folder: Path) -> Facts:
    """Returns what the files of a tokenizer say."""
    content = read_json(folder / "tokenizer.json")
    ids: list[object] = []
    if isinstance(content, Mapping):
        model, added = content.get("model"), content.get("added_tokens")
        known = model.get("vocab") if isinstance(model, Mapping) else None
        ids = [len(known) - 1] if isinstance(known, list | dict) else []
        ids += [each.get("id") for each in added if isinstance(each, Mapping)] if isinstance(added, list) else []
    template = _read_template(folder)
    return Facts.of(
        vocabulary=max((each for each in ids if isinstance(each, int)), default=-1) + 1 or None,
        has_chat_template=None if content is None else template is not None,
        has_generation_marks=None if template is None else "{% generation" in template or "{%- generation" in template,
    )


def _read_template(folder: Path) -> str | None:
    try:
        return read_file(folder / "chat_template.jinja", MAX_TEMPLATE).decode("utf-8")
    except (OSError, ValueError):
        return None
