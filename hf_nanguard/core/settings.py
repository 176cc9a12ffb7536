"""The settings of the guard, each declared once, as a field of [`Policy`].

The checks in this file, `GuardArguments` and the guarded configs, the flags, environment variables and YAML names of `nanguard
run`, shell completion and the tables in docs/arguments.md are derived from these declarations. This file imports only the
standard library, so that the command line can read the settings without importing torch.
"""

import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from ..errors import ArgumentError
from ..plain_text import format_value

PREFIX = "nanguard_"
TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
LARGEST = sys.float_info.max


def setting(
    default: object,
    help: str,
    choices: tuple[str, ...] = (),
    at_least: int | None = None,
    above: float | None = None,
    at_most: float = LARGEST,
) -> Any:
    """Declares a setting as a dataclass field. The annotation of the field gives the type.

    The help text is used in docstrings, `--help` and docs/arguments.md. Choices are the allowed values of a `str`; one without
    choices holds names separated by commas. The other arguments are the bounds of a number.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    return field(default=default, metadata={"help": help, "choices": choices, **bounds})


@dataclass(frozen=True)
class Policy:
    """What the guard does about the problems it detects."""

    mode: str = setting(
        "act",
        "`act` corrects bad steps, `observe` only records events and leaves the run unchanged, `off` disables the guard.",
        ("act", "observe", "off"),
    )
    doctor: str = setting(
        "warn",
        "Check settings and a few rows of the data at the start of a run: `warn` logs everything above a note, `strict` raises "
        "ArgumentError instead of starting, `off` checks nothing.",
        ("warn", "strict", "off"),
    )
    precision: str = setting(
        "keep",
        "`keep` trains in the precision of `bf16` and `fp16`. `auto`, in a guarded config, sets them to what is safe on this device: "
        "bfloat16, else float16 with a loss scaler, else float32.",
        ("keep", "auto"),
    )
    on_nonfinite: str = setting(
        "drop",
        "What to do if the loss or the gradients contain NaN or inf. `drop` repeats the accumulation group without the bad "
        "micro-batches and skips the step if none is left, `skip` skips the whole step, `repair` sets the bad gradient "
        "entries to zero before clipping, `floor` is `drop` with the loss floor as the logged loss of the dropped "
        "micro-batch, `halt` ends the run.",
        ("drop", "skip", "repair", "floor", "halt"),
    )
    loss_floor: float = setting(1e-6, "The loss that is logged for a micro-batch dropped by `floor`.", above=0)
    on_loss_error: str = setting(
        "raise",
        "What to do if the loss function raises an exception: `raise` it, or `drop` the micro-batch on the rank where it "
        "was raised, with all ranks kept in step.",
        ("raise", "drop"),
    )
    skip_grad_norm: float | None = setting(
        None, "Skip every step whose gradient norm before clipping is above this value.", above=0
    )
    on_spike: str = setting(
        "observe",
        "What to do if the gradient norm is far above its recent values (robust statistics of the last 100 healthy steps; all but "
        "`observe` need 50 of them): `observe` records an event, `clip` clips the norm to the spike threshold, `skip` skips the step, "
        "`rewind` goes back to the last snapshot, also if the loss diverges, and skips the step without one.",
        ("observe", "clip", "skip", "rewind"),
    )
    max_bad_steps: int = setting(
        10, "After this many bad steps in a row, rewind the run to its last snapshot, or halt it.", at_least=1
    )
    max_rewinds: int = setting(
        3,
        "How often a run may go back to a snapshot before it halts. A rewind restores weights, optimizer, schedule and random "
        "state and leaves out the batches since the snapshot. With 0 the run halts at once.",
        at_least=0,
    )
    rewind_lr_factor: float = setting(
        1.0,
        "Multiply the learning rate by this after a rewind, until the next snapshot. A rate that is shown to be too high is divided by 10 "
        "for the rest of the run, and by 100 and 10,000 more if that is not enough, whatever this says.",
        above=0,
        at_most=1,
    )
    snapshot_steps: int | None = setting(
        None,
        "Copy the state of the run to host memory every this many steps, if it is finite and neither loss nor norm spike. `None` "
        "means 100, if snapshots fit into a tenth of the free host memory. 0 disables snapshots.",
        at_least=0,
    )
    on_param_nonfinite: str = setting(
        "rewind",
        "What to do if weights or optimizer state contain NaN or inf: `rewind` to the last snapshot (and halt without one), or "
        "`halt`.",
        ("rewind", "halt"),
    )
    on_bad_start: str = setting(
        "halt",
        "What to do if weights or optimizer state contain NaN, or optimizer state contains inf, before the first step of a run or after a "
        "resume: `halt` before anything is trained, `repair`, by which a run that is resumed from a bad checkpoint continues from the newest "
        "good one before it (any other run halts), or `observe`, by which the run continues without snapshots.",
        ("halt", "repair", "observe"),
    )
    on_halt: str = setting(
        "raise",
        "How a halted run ends once the last good state is saved: `raise` raises NonFiniteError, `stop` ends the training "
        "loop without an error.",
        ("raise", "stop"),
    )

    on_bad_input: str = setting(
        "drop",
        "What to do about labels and inputs that cannot be trained on (all labels masked, labels or token ids out of range, "
        "non-finite inputs): `drop` the micro-batch, `drop_samples` drops only the bad samples if the batch can be split, "
        "`repair` fills the bad entries, `halt` ends the run.",
        ("drop", "drop_samples", "repair", "halt"),
    )
    stall_steps: int = setting(
        20,
        "Record an event after this many steps in a row without a learning signal (equal rewards, zero gradients, almost all "
        "labels masked, constant inputs). 0 disables it.",
        at_least=0,
    )

    autopsy: bool = setting(
        True,
        "Run a bad micro-batch again to find the operation that produced the first NaN or inf, the samples that caused it "
        "and the remedies that would help.",
    )
    max_autopsies: int = setting(5, "How many different faults are examined in one run.", at_least=1)
    autopsy_seconds: float = setting(
        60.0, "How many seconds an autopsy may continue after it has found the origin.", above=0
    )
    quarantine: str = setting(
        "skip",
        "What to do about dataset rows that were proved to be the cause of a bad step: `skip` writes them to `quarantine.jsonl`, and later "
        "runs in the same output directory (also resumed ones) train on the next row in their place, in that of rows with finite "
        "spikes only if `on_spike` is not `observe`; `record` only writes them, `off` does neither.",
        ("skip", "record", "off"),
    )
    bundle: bool = setting(
        True,
        "Whether an autopsy writes a bundle, which contains the bad micro-batch (its token ids and other tensors, also without "
        "`bundle_text`) so that `nanguard replay` can run it again. `False` leaves bundles out.",
    )
    bundle_weights: str = setting(
        "none", "Which weights an autopsy bundle contains: `none`, `trainable` or `all`.", ("none", "trainable", "all")
    )
    bundle_text: bool = setting(
        True,
        "Whether the log, events, metrics and autopsy bundles may contain text of the data: decoded samples, prompts, completions, "
        "messages of exceptions from your code, names of columns that no host library uses. Without it, step and row numbers, shapes, names of "
        "modules and lines of code remain, and the token ids in the bundle's tensor file, which anyone with the tokenizer can decode; "
        "`bundle` leaves those out, too.",
    )

    push_to_hub: bool = setting(
        False,
        "Whether `push_to_hub` and checkpoint pushes upload the guard's folder `nanguard` as well. It contains training data.",
    )

    logits_mode: str = setting(
        "repair",
        "What to do about logits right before sampling: `repair` rows that contain NaN or inf, `always` bounds every row as "
        "well, `off` changes nothing.",
        ("repair", "always", "off"),
    )
    logits_clip_value: float = setting(
        30.0,
        "In mode `always`, logits are raised to at least the maximum of their row minus twice this value.",
        above=0,
    )
    logits_min_prob: float = setting(
        1e-8, "In mode `always`, every token that is not masked gets at least this probability.", above=0, at_most=1
    )
    min_temperature: float = setting(
        0.1, "The lowest sampling temperature of an online trainer. A lower `temperature` is raised to it.", above=0
    )
    on_bad_reward: str = setting(
        "unscorable",
        "What to do if a reward is not a finite number or a reward function raises an exception: treat the completion as "
        "`unscorable`, or `halt` the run.",
        ("unscorable", "halt"),
    )
    ratio_bound: float | None = setting(  # the square of exp(40) still fits into float32
        20.0,
        "The largest log-ratio, of the policies or in the KL term, whose exponential is taken. `None` disables the bound.",
        above=0,
        at_most=40,
    )

    activation_steps: int = setting(
        50,
        "Measure module outputs and forecast overflow of their dtype every this many steps. 0 disables it.",
        at_least=0,
    )
    activation_modules: str | None = setting(
        None,
        "Which modules to measure: name patterns separated by commas (`*.mlp.down_proj,lm_head`). The blocks, the embedding "
        "and the head by default. A module is measured where it is called, the head also where TRL uses its weight without "
        "calling it. A pattern none of whose modules runs is reported.",
    )
    attention_steps: int = setting(
        0,
        "Measure attention scores and entropies, routers and the log-sum-exp of the head every this many steps, which takes "
        "additional computation. 0 disables it.",
        at_least=0,
    )
    weight_check_steps: int = setting(
        100,
        "Check weights and optimizer state for NaN and inf, and whether weights still change, every this many steps. With 0 "
        "they are checked only before a checkpoint is saved.",
        at_least=0,
    )
    full_metrics: bool = setting(
        False,
        "Log every metric in every row, also those of each module. Otherwise a row shows the counters that are not zero, and "
        "`metrics.jsonl` has the others.",
    )

    def __post_init__(self):
        check_settings({field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def acts(self) -> bool:
        """Whether the guard may change what the step does."""
        return self.mode == "act"


@dataclass(frozen=True)
class Setting:
    """One declared setting: reads a value from text and checks it. See [`setting`] for the meaning of the fields."""

    name: str  # in `Policy`, without `nanguard_`
    annotation: object  # its type, or a union of its type and `None`
    default: object
    help: str
    choices: tuple[str, ...]
    at_least: int | None
    above: float | None
    at_most: float

    @property
    def value_type(self) -> type:
        return (get_args(self.annotation) or (self.annotation,))[0]

    @property
    def is_optional(self) -> bool:
        """Whether `None` is allowed."""
        return type(None) in get_args(self.annotation)

    @property
    def default_text(self) -> str:
        """The default as it is written in Python."""
        return f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)

    @property
    def bounds(self) -> str:
        """The bounds in words, e.g. `"above 0, at most 40"`."""
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most}
        return ", ".join(f"{word} {value:g}" for word, value in bounds.items() if value not in (None, LARGEST))

    def read(self, value: object, spelling: str) -> object:
        """Returns a value from a command line, an environment variable or YAML in the type of the setting, checked."""
        converted = self.convert(value)
        self.check(converted, spelling)
        return converted

    def convert(self, value: object) -> object:
        """Returns a value in the type of the setting, or unchanged if it cannot be converted."""
        if value is False and "off" in self.choices:
            return "off"  # YAML reads a bare off as False
        if not isinstance(value, str):
            return value
        word = value.strip().lower()
        if self.is_optional and word in ("none", "null"):
            return None
        if self.value_type is bool:
            return TRUTHS.get(word, value)
        try:
            return self.value_type(value)
        except ValueError:
            return value

    def check(self, value: object, spelling: str) -> None:
        """Raises an [`ArgumentError`] if a value is not allowed. `spelling` is the name of the setting as the user wrote it."""
        if not self._allows(value):
            raise ArgumentError(f"{spelling} must be {self._expectation()}, got {format_value(value)}.")

    def _allows(self, value: object) -> bool:
        if value is None:
            return self.is_optional
        if self.value_type is bool or isinstance(value, bool):
            return self.value_type is bool and isinstance(value, bool)
        if self.value_type is str:
            names = value.split(",") if isinstance(value, str) else [""]
            return value in self.choices if self.choices else all(map(str.strip, names))
        if not isinstance(value, (int, float)) or (self.value_type is int and not isinstance(value, int)):
            return False
        is_above = self.above is None or value > self.above  # false for NaN
        return is_above and (self.at_least is None or value >= self.at_least) and value <= self.at_most

    def _expectation(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        texts = {
            bool: "True or False",
            str: "names separated by commas",
            int: "an integer of",
            float: "a finite number",
        }
        bounds = self.bounds.replace(", ", " and ")
        return " ".join(filter(None, [texts[self.value_type], bounds, "or None" if self.is_optional else ""]))


SETTINGS = {f.name: Setting(f.name, f.type, f.default, **f.metadata) for f in fields(Policy)}


def check_settings(settings: Mapping[str, object], prefix: str = "") -> None:
    """Checks settings by name and raises an [`ArgumentError`] that names the first bad one and what is allowed.

    The prefix is what the user's spelling of the names begins with.
    """
    for name, value in settings.items():
        SETTINGS[name].check(value, f"{prefix}{name}")
    if settings.get("skip_grad_norm") is not None and settings.get("mode") == "observe":
        raise ArgumentError(
            f"{prefix}skip_grad_norm was set to {settings['skip_grad_norm']!r} while {prefix}mode is 'observe', which "
            f"never skips. Set {prefix}mode='act' or leave {prefix}skip_grad_norm out."
        )


def format_parameters(prefix: str = "") -> str:
    """Returns all settings as the parameter list of a docstring."""
    lines = ["", "", "    Parameters:"]
    for each in SETTINGS.values():
        default = "" if each.default is None else f", defaults to `{each.default_text}`"
        lines.append(f"        {prefix}{each.name} (`{each.value_type.__name__}`, *optional*{default}):")
        lines += textwrap.wrap(each.help, 108, initial_indent=" " * 12, subsequent_indent=" " * 12)
    return "\n".join([*lines, "    "])


Policy.__doc__ = f"{Policy.__doc__}{format_parameters()}"
