"""`check_config`: the settings of a run judged by rules, in seconds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from transformers import Trainer, TrainingArguments

from ..core.event import strict
from ..errors import ArgumentError
from ..hf.compat.trainer_protocol import HostTrainer
from .facts.argument_facts import find_argument_facts
from .facts.config_file import read_arguments, read_config
from .facts.device_facts import find_accelerator_facts, find_device_facts
from .facts.file_facts import ConfigFile
from .facts.host_configs import TASKS, find_config_class
from .facts.trainer_inspection import find_trainer_facts
from .rules.finding import Examination, Examined
from .rules.memory_estimate import estimate_memory
from .rules.precision_sources import Source, find_sources
from .rules.rule_set import judge
from .rules.run_facts import Facts

NO_DEVICE: Mapping[str, Any] = dict.fromkeys(("device_type", "bf16_support", "device_memory", "disk_free"))


@dataclass
class ConfigReport(Examined):
    """The result of [`check_config`]."""

    facts: Facts  # what the rules have judged
    precision: list[Source] = field(default_factory=list)  # every source of it, and whether they agree
    examination: Examination = field(default_factory=Examination)  # findings, sound rules, rules without facts
    unjudged: list[str] = field(default_factory=list)  # names in a file that no rule knows
    remarks: list[str] = field(default_factory=list)  # how a file was understood, where that is not certain

    def as_dict(self) -> dict[str, object]:
        """Returns everything as strict JSON values."""
        return strict({
            "findings": [found.as_dict() for found in self.findings],
            "precision": [{"source": source.name, "value": source.value, "verdict": source.verdict} for source in self.precision],
            "sound": self.examination.sound,
            "unchecked": self.examination.unchecked,
            "unjudged": self.unjudged,
            "remarks": self.remarks,
            "facts": self.facts.known(),
        })  # fmt: skip


Configuration = Trainer | TrainingArguments | Mapping[str, object] | str | Path


def check_config(*configurations: Configuration, task: str | None = None, skip: Collection[str] = ()) -> ConfigReport:
    """Judges the settings of a run by rules, without running or loading anything.

    Args:
        configurations (`Trainer`, `TrainingArguments`, `dict`, `str` or `Path`):
            A trainer, its arguments, a dictionary of them, a YAML file (of a recipe, TRL, axolotl or accelerate) or the folder of
            a run. Given several, e.g. a file of arguments and one of accelerate, they are judged together.
        task (`str`, *optional*):
            The kind of training (`sft`, `grpo`, ...), where the configuration does not say it.
        skip (`Collection[str]`, *optional*):
            Names of rules, or topics (`precision`, `hyperparameters`, `resources`), to leave out.

    Returns:
        `ConfigReport`: `.findings`, each with severity, what, why and what to change; `.is_sound`.

    Example:

    ```python
    for found in check_config("my.yaml").findings:
        print(found.severity, found.what, found.why, found.change)
    ```
    """
    if not configurations:
        raise ArgumentError("check_config() must be given a trainer, arguments, a YAML file or the folder of a run.")
    if task is not None and task not in TASKS:
        raise ArgumentError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
    return judge_files([_read(each, task) for each in configurations], skip)


def judge_files(
    files: Sequence[ConfigFile], skip: Collection[str] = (), trainer: Facts | None = None, memory: int | None = None
) -> ConfigReport:
    """Judges what files say together, and what is known of the trainer that was built from them, for a device with `memory` bytes if
    that is given."""
    facts = Facts()
    for file in files:
        facts = facts.update(file.facts)
    if facts.device_type is None:  # of a file, which may be checked on another machine than the one that trains
        facts = find_accelerator_facts().update(facts)
    if facts.mixed_precision is None and facts.accelerate_precision is not None:
        facts = replace(facts, mixed_precision=facts.accelerate_precision)
    if trainer is not None:
        elsewhere = files and facts.device_type is None
        facts = facts.update(replace(trainer, **NO_DEVICE) if elsewhere else trainer)
    facts = estimate_memory(facts if memory is None else facts.update(Facts.of(device_memory=memory)))
    unjudged = [name for file in files for name in file.unjudged]
    remarks = [remark for file in files for remark in file.remarks]
    report = ConfigReport(facts, find_sources(facts), judge(facts, skip), unjudged, remarks)
    for file in files:
        report.examination.add(file.examination)
    return report


def _read(given: Configuration, task: str | None) -> ConfigFile:
    if isinstance(given, Trainer):
        return ConfigFile("", "trainer", find_trainer_facts(cast(HostTrainer, given)))
    if isinstance(given, TrainingArguments):
        kinds = (task,) if task else TASKS
        found = next(kind for kind in (*kinds, "trainer") if isinstance(given, find_config_class(kind)))
        values = {each.name: getattr(given, each.name, None) for each in fields(given)}
        return ConfigFile(
            "", "arguments", find_argument_facts(values, found).update(find_device_facts(given.device.type))
        )
    if isinstance(given, Mapping):
        return read_arguments("the configuration", given, task)
    if isinstance(given, str | Path):
        return read_config(given, task)
    raise ArgumentError(f"check_config() must be given a trainer, arguments or a file, got {type(given).__name__}.")
