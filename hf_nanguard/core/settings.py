"""The settings of the guard."""

import math
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError

CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("act", "observe", "off"),
    "on_nonfinite": ("drop", "skip", "repair", "floor", "halt"),
    "on_loss_error": ("raise", "drop"),
    "on_bad_input": ("drop", "drop_samples", "repair", "halt"),
    "on_spike": ("observe", "clip", "skip"),
    "on_halt": ("raise", "stop"),
    "bundle_weights": ("none", "trainable", "all"),
    "logits_mode": ("repair", "always", "off"),
    "on_bad_reward": ("unscorable", "halt"),
}
SWITCHES = ("autopsy", "bundle_text", "full_metrics")
AT_LEAST: dict[str, int] = {
    "max_bad_steps": 1, "max_autopsies": 1, "stall_steps": 0, "activation_steps": 0, "attention_steps": 0,
    "weight_check_steps": 0,
}  # fmt: skip
POSITIVE = (
    "skip_grad_norm", "loss_floor", "autopsy_seconds", "logits_clip_value", "logits_min_prob", "min_temperature",
    "ratio_bound",
)  # fmt: skip
AT_MOST = {"ratio_bound": 40.0}  # beyond, the square of its exponential is more than float32 holds
OPTIONAL = ("skip_grad_norm", "ratio_bound")
PATTERNS = ("activation_modules",)


def check_settings(settings: dict[str, Any], prefix: str = "") -> None:
    """Checks settings by name and raises an [`ArgumentError`] that names the first bad one and the way out.

    Args:
        settings (`dict[str, Any]`):
            Names (without `prefix`) and values.
        prefix (`str`, *optional*, defaults to `""`):
            What the user's spelling of the names begins with.
    """
    for name, value in settings.items():
        spelled = f"{prefix}{name}"
        if name in CHOICES and value not in CHOICES[name]:
            hint = " Rewinding needs snapshots, which this version does not have." if value == "rewind" else ""
            raise ArgumentError(f"{spelled} must be one of {', '.join(CHOICES[name])}, got {value!r}.{hint}")
        if name in SWITCHES and not isinstance(value, bool):
            raise ArgumentError(f"{spelled} must be True or False, got {value!r}.")
        if name in AT_LEAST and (isinstance(value, bool) or not isinstance(value, int) or value < AT_LEAST[name]):
            raise ArgumentError(f"{spelled} must be an integer of at least {AT_LEAST[name]}, got {value!r}.")
        if (
            name in PATTERNS
            and value is not None
            and not (isinstance(value, str) and all(map(str.strip, value.split(","))))
        ):
            raise ArgumentError(f"{spelled} must be patterns of module names separated by commas, got {value!r}.")
        if name in POSITIVE and not (value is None and name in OPTIONAL):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ArgumentError(f"{spelled} must be a number, got {value!r}.")
            if not (math.isfinite(value) and value > 0):
                raise ArgumentError(f"{spelled} must be a finite number above 0, got {value!r}.")
            if value > AT_MOST.get(name, math.inf):
                raise ArgumentError(f"{spelled} must be a number of at most {AT_MOST[name]:g}, got {value!r}.")
    if settings.get("skip_grad_norm") is not None and settings.get("mode") == "observe":
        raise ArgumentError(
            f"{prefix}skip_grad_norm was set to {settings['skip_grad_norm']!r} while {prefix}mode is 'observe', which "
            f"never skips. Set {prefix}mode='act' or leave {prefix}skip_grad_norm out."
        )


@dataclass(frozen=True)
class Policy:
    """What the guard does about what it sees.

    Args:
        mode (`str`, *optional*, defaults to `"act"`):
            `"act"`, `"observe"` (events only, nothing is changed) or `"off"`.
        on_nonfinite (`str`, *optional*, defaults to `"drop"`):
            `"drop"`: redo the group without the culprit micro-batches, skip the step if none is left. `"skip"`: the
            whole step. `"repair"`: bad gradient entries zeroed, the rest steps. `"floor"`: as drop, with `loss_floor`
            in the log for the bad one. `"halt"`.
        on_loss_error (`str`, *optional*, defaults to `"raise"`):
            `"raise"` or `"drop"`: an exception inside the loss.
        on_bad_input (`str`, *optional*, defaults to `"drop"`):
            `"drop"` the micro-batch, `"drop_samples"` (only the bad ones, where the batch can be taken apart),
            `"repair"` (fill and go on) or `"halt"`: labels or inputs that cannot be trained on.
        on_spike (`str`, *optional*, defaults to `"observe"`):
            `"observe"`, `"clip"` (to the threshold of the statistics) or `"skip"`: a norm out of line with the past.
        on_halt (`str`, *optional*, defaults to `"raise"`):
            `"raise"` a `NonFiniteError` or `"stop"` the run cleanly.
        skip_grad_norm (`float`, *optional*):
            Fixed pre-clip norm above which a step is skipped.
        loss_floor (`float`, *optional*, defaults to `1e-6`):
            What `on_nonfinite="floor"` shows in the log for a dropped micro-batch.
        max_bad_steps (`int`, *optional*, defaults to `10`):
            Bad steps in a row after which the run halts.
        autopsy (`bool`, *optional*, defaults to `True`):
            Whether a bad micro-batch is examined: where its bad number was born, whose data it was, what would help.
        max_autopsies (`int`, *optional*, defaults to `5`):
            How many different faults of a run are examined.
        autopsy_seconds (`float`, *optional*, defaults to `60.0`):
            How long one examination may go on once it knows the origin.
        bundle_weights (`str`, *optional*, defaults to `"none"`):
            Which weights a bundle holds: `"none"`, `"trainable"` or `"all"`.
        bundle_text (`bool`, *optional*, defaults to `True`):
            Whether a bundle holds decoded text.
        logits_mode (`str`, *optional*, defaults to `"repair"`):
            What is done about scores before sampling: `"repair"` those that are not finite, bound them `"always"`, `"off"`.
        logits_clip_value, logits_min_prob (`float`, *optional*, default to `30.0` and `1e-8`):
            The bounds of `"always"`.
        min_temperature (`float`, *optional*, defaults to `0.1`):
            The lowest temperature an online trainer samples and scores with.
        on_bad_reward (`str`, *optional*, defaults to `"unscorable"`):
            A reward that is no finite number: its completion becomes `"unscorable"`, or `"halt"`.
        ratio_bound (`float`, *optional*, defaults to `20.0`):
            How large a log-ratio of policies may be before its exponential is taken; `None` for no bound.
        stall_steps (`int`, *optional*, defaults to `20`):
            Steps in a row without a learning signal after which that is told; 0 for never.
        activation_steps (`int`, *optional*, defaults to `50`):
            How often the outputs of modules are measured, and the headroom of their dtype forecast; 0 for never.
        activation_modules (`str`, *optional*):
            Which modules: a pattern of their names as `fnmatch` has it, several separated by commas. The blocks of the
            model, its embedding and its head by default.
        attention_steps (`int`, *optional*, defaults to `0`):
            How often attention scores and entropies, routers and the head's log-sum-exp are measured, which takes
            further arithmetic; 0 for never.
        weight_check_steps (`int`, *optional*, defaults to `100`):
            How often weights and optimizer state are checked, and whether weights still move; 0 for never but before a
            checkpoint is saved.
        full_metrics (`bool`, *optional*, defaults to `False`):
            Whether the log gets a curve for every module and not only for the worst.
    """

    mode: str = "act"
    on_nonfinite: str = "drop"
    on_loss_error: str = "raise"
    on_bad_input: str = "drop"
    on_spike: str = "observe"
    on_halt: str = "raise"
    skip_grad_norm: float | None = None
    loss_floor: float = 1e-6
    max_bad_steps: int = 10
    autopsy: bool = True
    max_autopsies: int = 5
    autopsy_seconds: float = 60.0
    bundle_weights: str = "none"
    bundle_text: bool = True
    logits_mode: str = "repair"
    logits_clip_value: float = 30.0
    logits_min_prob: float = 1e-8
    min_temperature: float = 0.1
    on_bad_reward: str = "unscorable"
    ratio_bound: float | None = 20.0
    stall_steps: int = 20
    activation_steps: int = 50
    activation_modules: str | None = None
    attention_steps: int = 0
    weight_check_steps: int = 100
    full_metrics: bool = False

    def __post_init__(self):
        check_settings(vars(self))

    @property
    def acts(self) -> bool:
        """Whether the guard may change what the step does."""
        return self.mode == "act"
