"""The settings of the guard, as TrainingArguments extensions that HfArgumentParser, TrlParser and YAML can fill."""

from dataclasses import dataclass, field, fields

from transformers import TrainingArguments

from ...core.settings import POSITIVE, Policy, check_settings

PREFIX = "nanguard_"


def is_number(text: str) -> bool:
    """Returns whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass
class GuardArguments:
    """What the guard does. The defaults act on what is bad and change nothing else.

    Parameters:
        nanguard_mode (`str`, *optional*, defaults to `"act"`):
            `"act"`, `"observe"` (events only, the run goes as stock) or `"off"`.
        nanguard_on_nonfinite (`str`, *optional*, defaults to `"drop"`):
            What happens when loss or gradients are not finite. `"drop"` redoes the accumulation group without the
            culprit micro-batches and skips the step if none is left; `"skip"` skips the whole step; `"repair"` zeroes
            the bad gradient entries before clipping and lets the rest step; `"floor"` is drop with
            `nanguard_loss_floor` in the log for the bad one; `"halt"` ends the run.
        nanguard_loss_floor (`float`, *optional*, defaults to `1e-6`):
            What `"floor"` shows.
        nanguard_on_loss_error (`str`, *optional*, defaults to `"raise"`):
            An exception inside the loss: `"raise"` it, or `"drop"` the micro-batch on its rank, in lockstep.
        nanguard_on_bad_input (`str`, *optional*, defaults to `"drop"`):
            Labels all masked or out of the vocabulary, ids out of the embedding, non-finite inputs: `"drop"` the
            micro-batch, `"drop_samples"` (only the bad ones, where the batch can be taken apart), `"repair"` (fill) or
            `"halt"`.
        nanguard_skip_grad_norm (`float`, *optional*):
            Pre-clip gradient norm above which a step is skipped.
        nanguard_on_spike (`str`, *optional*, defaults to `"observe"`):
            A norm far out of line with the recent past: `"observe"`, `"clip"` it to the threshold, or `"skip"`.
        nanguard_max_bad_steps (`int`, *optional*, defaults to `10`):
            Bad steps in a row after which the run halts.
        nanguard_on_halt (`str`, *optional*, defaults to `"raise"`):
            A halt saves the last good state and then `"raise"`s `NonFiniteError`, or `"stop"`s the run cleanly.
        nanguard_autopsy (`bool`, *optional*, defaults to `True`):
            Whether a bad micro-batch is run again to find where its bad number was born, whose data it was and what
            would help.
        nanguard_max_autopsies (`int`, *optional*, defaults to `5`):
            How many different faults of a run are examined.
        nanguard_autopsy_seconds (`float`, *optional*, defaults to `60.0`):
            How long an examination may go on once it knows the origin.
        nanguard_bundle_weights (`str`, *optional*, defaults to `"none"`):
            Which weights a bundle holds: `"none"`, `"trainable"` or `"all"`.
        nanguard_bundle_text (`bool`, *optional*, defaults to `True`):
            Whether log, events and bundle may show decoded text of the samples to blame.
        nanguard_logits_mode (`str`, *optional*, defaults to `"repair"`):
            Scores right before tokens are drawn: `"repair"` rows that are not finite, bound every row `"always"`, or
            `"off"`.
        nanguard_logits_clip_value (`float`, *optional*, defaults to `30.0`):
            `"always"` bounds scores to twice this below the largest of the row.
        nanguard_logits_min_prob (`float`, *optional*, defaults to `1e-8`):
            `"always"` gives every token that is not masked at least this probability.
        nanguard_min_temperature (`float`, *optional*, defaults to `0.1`):
            The lowest temperature of an online trainer; applied once, to its `temperature`.
        nanguard_on_bad_reward (`str`, *optional*, defaults to `"unscorable"`):
            A reward that is NaN, infinite or no number, a reward function that raises: the completion becomes
            `"unscorable"`, or `"halt"` the run.
        nanguard_ratio_bound (`float`, *optional*, defaults to `20.0`):
            How large a policy's log-ratio, or that of the KL term, may be before its exponential is taken.
        nanguard_stall_steps (`int`, *optional*, defaults to `20`):
            Steps in a row with nothing to learn from after which that is told: equal rewards, zero gradients, labels
            nearly all masked, constant inputs; 0 for never.
        nanguard_activation_steps (`int`, *optional*, defaults to `50`):
            How often the outputs of modules are measured and the headroom of their dtype is forecast; 0 for never.
        nanguard_activation_modules (`str`, *optional*):
            Which modules: patterns of their names, separated by commas (`"*.mlp.down_proj,lm_head"`). Blocks, embedding
            and head by default.
        nanguard_attention_steps (`int`, *optional*, defaults to `0`):
            How often attention scores and entropies, routers and the head's log-sum-exp are measured; 0 for never.
        nanguard_weight_check_steps (`int`, *optional*, defaults to `100`):
            How often weights and optimizer state are checked, and whether weights move; 0 for never but before a save.
        nanguard_full_metrics (`bool`, *optional*, defaults to `False`):
            Whether the log gets a curve for every module, not only for the worst.
    """

    nanguard_mode: str = field(default="act", metadata={"help": "act, observe (events only) or off."})
    nanguard_on_nonfinite: str = field(
        default="drop",
        metadata={
            "help": "Non-finite loss or gradients: drop (redo the group without the culprits), skip (the whole step), "
            "repair (zero the bad gradient entries), floor (as drop, with the loss floor in the log) or halt."
        },
    )
    nanguard_loss_floor: float = field(
        default=1e-6, metadata={"help": "What nanguard_on_nonfinite=floor shows in the log for a dropped micro-batch."}
    )
    nanguard_on_loss_error: str = field(
        default="raise", metadata={"help": "An exception inside the loss: raise, or drop the micro-batch in lockstep."}
    )
    nanguard_on_bad_input: str = field(
        default="drop",
        metadata={
            "help": "Labels or inputs that cannot be trained on: drop the micro-batch, drop_samples (only the bad ones), "
            "repair (fill) or halt."
        },
    )
    nanguard_skip_grad_norm: float | None = field(
        default=None, metadata={"help": "Pre-clip gradient norm above which a step is skipped. Off by default."}
    )
    nanguard_on_spike: str = field(
        default="observe", metadata={"help": "A gradient norm out of line with the recent past: observe, clip or skip."}
    )
    nanguard_max_bad_steps: int = field(default=10, metadata={"help": "Bad steps in a row after which the run halts."})
    nanguard_on_halt: str = field(
        default="raise",
        metadata={
            "help": "A halt saves the last good state, then raises NonFiniteError (raise) or ends cleanly (stop)."
        },
    )

    nanguard_autopsy: bool = field(
        default=True,
        metadata={"help": "Run a bad micro-batch again to find where its bad number was born and what would help."},
    )
    nanguard_max_autopsies: int = field(
        default=5, metadata={"help": "How many different faults of a run are examined."}
    )
    nanguard_autopsy_seconds: float = field(
        default=60.0, metadata={"help": "How long an examination may go on once it knows the origin."}
    )
    nanguard_bundle_weights: str = field(
        default="none", metadata={"help": "Which weights a bundle holds: none, trainable or all."}
    )
    nanguard_bundle_text: bool = field(
        default=True, metadata={"help": "Whether log, events and bundle may show decoded text of samples."}
    )

    nanguard_logits_mode: str = field(
        default="repair", metadata={"help": "Scores before sampling: repair bad rows, bound always, or off."}
    )
    nanguard_logits_clip_value: float = field(
        default=30.0,
        metadata={"help": "nanguard_logits_mode=always bounds scores to twice this below the row's largest."},
    )
    nanguard_logits_min_prob: float = field(
        default=1e-8, metadata={"help": "nanguard_logits_mode=always gives unmasked tokens at least this probability."}
    )
    nanguard_min_temperature: float = field(
        default=0.1, metadata={"help": "The lowest temperature of an online trainer, applied once."}
    )
    nanguard_on_bad_reward: str = field(
        default="unscorable", metadata={"help": "A reward that is no finite number: unscorable completion, or halt."}
    )
    nanguard_ratio_bound: float | None = field(
        default=20.0,
        metadata={"help": "Largest log-ratio of policies whose exponential is taken, also in the KL term."},
    )
    nanguard_stall_steps: int = field(
        default=20, metadata={"help": "Steps in a row without a learning signal after which that is told; 0 for never."}
    )

    nanguard_activation_steps: int = field(
        default=50,
        metadata={"help": "How often outputs of modules are measured, their headroom forecast; 0 for never."},
    )
    nanguard_activation_modules: str | None = field(
        default=None, metadata={"help": "Which modules: patterns of names, separated by commas. Blocks by default."}
    )
    nanguard_attention_steps: int = field(
        default=0, metadata={"help": "How often attention, routers and the head are measured; 0 for never."}
    )
    nanguard_weight_check_steps: int = field(
        default=100,
        metadata={"help": "How often weights and optimizer state are checked; 0 for never but before a save."},
    )
    nanguard_full_metrics: bool = field(
        default=False, metadata={"help": "A curve for every module in the log, not only for the worst."}
    )

    def __post_init__(self):
        if self.nanguard_mode is False:
            self.nanguard_mode = "off"  # how YAML reads a bare off
        for name in (f"{PREFIX}{name}" for name in POSITIVE):
            value = getattr(self, name)
            if isinstance(value, str) and is_number(value):
                setattr(self, name, float(value))  # YAML reads 1e-6 as text
        check_settings(self._settings(), PREFIX)
        if isinstance(self, TrainingArguments):
            super().__post_init__()  # type: ignore[misc] # the host's, next in line

    def _settings(self) -> dict:
        return {f.name.removeprefix(PREFIX): getattr(self, f.name) for f in fields(GuardArguments)}

    def policy(self) -> Policy:
        """Returns the settings as the core knows them."""
        return Policy(**self._settings())


@dataclass
class GuardedTrainingArguments(GuardArguments, TrainingArguments):
    """[`~transformers.TrainingArguments`] with the settings of the guard; all other defaults are the host's."""


def find_guard_arguments(guard: GuardArguments | None, args: TrainingArguments) -> GuardArguments:
    """Returns the guard's settings: given by themselves, else part of the training arguments, else the defaults."""
    if guard is not None:
        return guard
    return args if isinstance(args, GuardArguments) else GuardArguments()
