"""Facts from a file: arguments of a recipe, TRL, axolotl or LlamaFactory, or a configuration of accelerate; or from the folder of a run."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ...yaml_file import read_yaml
from ..rules.run_facts import Facts
from .argument_facts import find_argument_facts, read_dtype, read_flag, read_number
from .argument_values import find_bad_values, find_contradictions
from .file_facts import ConfigFile, find_scale, read_targets
from .host_configs import RECIPE_NAMES, RENAMED, find_argument_classes, find_tasks, find_unknown, read_defaults
from .integrator_files import is_axolotl, is_llamafactory, read_axolotl, read_llamafactory
from .launcher_files import is_accelerate, is_deepspeed, read_accelerate, read_deepspeed
from .model_files import find_model_facts
from .run_folder import read_run


def read_config(
    path: str | Path, task: str | None = None, flags: Mapping[str, object] = MappingProxyType({})
) -> ConfigFile:
    """Reads a YAML file or the folder of a run, whose pickles (`training_args.bin`) are never loaded. `task` is the kind of
    training, where the file does not say it; `flags` are arguments that take precedence over those of the file."""
    if Path(path).is_dir():
        return read_run(Path(path))
    values = read_yaml(str(path), "The configuration")
    if is_accelerate(values):
        return read_accelerate(str(path), values)
    if is_deepspeed(values):
        return read_deepspeed(str(path), values)
    if is_axolotl(values):
        return read_axolotl(str(path), values, task)
    if is_llamafactory(values):
        return read_llamafactory(str(path), values, task)
    return read_arguments(str(path), {**values, **flags}, task)


def read_arguments(path: str, values: Mapping[str, object], task: str | None = None) -> ConfigFile:
    """Reads arguments of a recipe, of TRL's scripts or of the Trainer."""
    possible = (task,) if task else find_tasks(values)
    task = possible[0]
    defaults = read_defaults(task)
    unknown = find_unknown(values, defaults)
    bad = find_contradictions(values) | find_bad_values(values, find_argument_classes(task))
    sound = {name: value for name, value in values.items() if name not in bad}
    names = {**{name: RENAMED.get(name, "") for name in unknown}, **RECIPE_NAMES}
    given = {**defaults, **{names[name]: value for name, value in sound.items() if names.get(name)}, **sound}
    result = ConfigFile(path, "arguments", find_argument_facts(given, task).update(_read_model_flags(given)))
    reader = "The Trainer" if task == "trainer" else f"TRL's {task} script"
    result.report_unknown(unknown, reader)
    result.report_values(bad, values, reader)
    if len(possible) > 1:
        others = ", ".join(possible[1:])
        result.remarks.append(
            f"{Path(path).name} was judged as arguments of {task}; {others} would take them too, and --task says which."
        )
    return result


def _read_model_flags(values: Mapping[str, object]) -> Facts:
    """Returns what TRL's arguments about the model say."""
    bits = 4 if read_flag(values, "load_in_4bit") else 8 if read_flag(values, "load_in_8bit") else 0
    dtype = read_dtype(values.get("dtype"))
    uses_peft, targets = bool(read_flag(values, "use_peft")), read_targets(values.get("lora_target_modules"))
    scale = find_scale(
        read_number(values, "lora_r"), read_number(values, "lora_alpha"), read_flag(values, "use_rslora")
    )
    facts = Facts.of(
        adapter="lora" if uses_peft else "none",
        adapter_targets=targets,
        adapter_scale=scale if uses_peft else None,
        has_output_head_adapter=uses_peft and "lm_head" in (targets or ()),
        quantization_bits=bits,
        model_dtype=None if bits else dtype,
        compute_dtype=dtype if bits == 4 else None,
    )
    name = values.get("model_name_or_path")
    known = find_model_facts(name) if isinstance(name, str) else Facts.of(is_pretrained=False)
    return facts.update(known)
