"""Rules about the optimizer: learning rate, schedule, clipping, Adam."""

import math
import re

from .finding import Finding, Rule, error, note, warning
from .run_facts import Facts

# Highest learning rates of an Adam optimizer that are in use for pretrained models, by kind of training.
RATES = {
    "full": 5e-4,
    "large": 2e-4,
    "lora": 2e-3,
    "preference": 1e-4,
    "preference lora": 1e-3,
    "online": 5e-5,
    "online lora": 5e-4,
}
USUAL = {"full": "1e-5 to 1e-4", "large": "5e-6 to 5e-5", "lora": "1e-4 to 5e-4", "preference": "5e-7 to 5e-6",
         "preference lora": "5e-6 to 5e-5", "online": "1e-6 to 1e-5", "online lora": "5e-6 to 1e-4"}  # fmt: skip
FROM_SCRATCH = 0.05
LARGE_MODEL, SMALL_MODEL = 1e9, 2e8
WARM_UP_FREE = {"full": 1e-4, "lora": 1e-3}  # rates up to these are in use without a warm-up
HIGHEST_NORM = 10.0
HIGHEST_DECAY = 1.0


def check_rate(facts: Facts) -> Finding | None:
    """The learning rate must be a positive number, within what the method takes."""
    rate = facts.learning_rate
    if not (0 < rate < math.inf):
        why = "The weights would not move." if rate == 0 else "No optimizer takes it."
        return error(f"learning_rate is {rate:g}.", why, "Set a learning rate above 0, e.g. 2.0e-5.")
    if not facts.uses_adam:
        return None
    if facts.is_pretrained is False:
        return _judge_rate(facts, "a model trained from scratch", FROM_SCRATCH, "1e-4 to 5e-3")
    if facts.is_pretrained is None or (facts.is_adapter and facts.adapter != "lora"):
        return None
    method = find_method(facts)
    limit = 1e-3 if method == "full" and (find_size(facts) or SMALL_MODEL) < SMALL_MODEL else RATES[method]
    return _judge_rate(facts, _describe(facts, method), limit, USUAL[method])


def _judge_rate(facts: Facts, method: str, limit: float, usual: str) -> Finding | None:
    if facts.learning_rate <= limit:
        return None
    ratio = facts.learning_rate / limit
    what = f"learning_rate is {facts.learning_rate:g}, too high for {method}."
    why = (
        f"Each Adam step moves every weight by about the learning rate. Usual here is {usual}; this is "
        + (f"{ratio:.0f} times" if ratio >= 2 else "above")
        + f" the highest rate in use ({limit:g}), where losses diverge."
    )
    return (error if ratio >= 10 else warning)(
        what, why, f"Set learning_rate to {usual.split(' to ')[0]} to {usual.split(' to ')[1]}."
    )


def check_low_rate(facts: Facts) -> Finding | None:
    """LoRA needs a higher rate than full fine-tuning."""
    if facts.adapter != "lora" or facts.is_online or facts.is_preference or not 0 < facts.learning_rate < 1e-5:
        return None
    why = f"Adapters start at zero and need about ten times the rate of full fine-tuning: {USUAL['lora']}."
    return note(f"learning_rate is {facts.learning_rate:g} for LoRA.", why, "Set learning_rate: 2.0e-4.")


def find_method(facts: Facts) -> str:
    """Returns the kind of training by which a learning rate is judged, a key of `RATES`."""
    kind = "online" if facts.is_online else "preference" if facts.is_preference else ""
    if facts.is_adapter:
        return f"{kind} lora".strip()
    return kind or ("large" if (find_size(facts) or 0) >= LARGE_MODEL else "full")


def find_size(facts: Facts) -> float | None:
    """Returns the number of parameters, read from the model's name (`Qwen2.5-7B`) if nothing else is known."""
    if facts.parameters is not None:
        return facts.parameters
    found = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)([bm])(?![a-z])", (facts.model_name or "").lower())
    return float(found[1]) * {"b": 1e9, "m": 1e6}[found[2]] if found else None


def _describe(facts: Facts, method: str) -> str:
    size = find_size(facts)
    named = {"full": "full fine-tuning", "large": "full fine-tuning", "lora": "LoRA", "online": "reinforcement learning",
             "online lora": "reinforcement learning with LoRA", "preference": f"{facts.task} of all weights",
             "preference lora": f"{facts.task} with LoRA"}[method]  # fmt: skip
    return named + (f" of {size / 1e9:.2g} billion parameters" if size and method == "large" else "")


def check_clipping(facts: Facts) -> Finding | None:
    """Clipping must be on, and low enough to do something."""
    norm = facts.max_grad_norm
    if norm is not None and 0 < norm <= HIGHEST_NORM:
        return None
    what = f"max_grad_norm is {norm:g}." if norm else "Gradient clipping is off (max_grad_norm is 0)."
    why = "One bad batch can then change the weights by any amount." if not norm else (
        "Usual gradient norms of a language model are 0.1 to 10, so nothing is ever clipped, and one bad batch can change the "
        "weights by any amount."
    )  # fmt: skip
    if norm is not None and norm < 0:
        return error(what, "A negative bound turns every gradient around.", "Set max_grad_norm: 1.0.")
    is_gentle = not facts.uses_adam or facts.is_pretrained is False
    return (note if is_gentle else warning)(what, why, "Set max_grad_norm: 1.0.")


def check_warmup(facts: Facts) -> Finding | None:
    """A large rate needs a warm-up."""
    limit = WARM_UP_FREE["lora" if facts.is_adapter else "full"]
    if facts.warmup_steps or not facts.uses_adam or facts.learning_rate <= limit or check_rate(facts):
        return None  # a rate that is too high is what to change first
    what = f"There is no warm-up, and learning_rate is {facts.learning_rate:g}."
    why = "Adam's first steps are as long as later ones, while its estimate of the gradients' size rests on one batch."
    finding = warning if facts.is_pretrained and facts.adapter in (None, "none", "lora") else note
    return finding(what, why, "Set warmup_steps to 3 to 10 % of all steps, e.g. warmup_steps: 0.05.")


def check_long_warmup(facts: Facts) -> Finding | None:
    """A warm-up as long as the run never reaches the rate."""
    if facts.max_steps <= 0 or facts.warmup_steps < 1 or facts.warmup_steps < facts.max_steps:
        return None
    what = f"warmup_steps is {facts.warmup_steps:g}, and max_steps is {facts.max_steps}."
    reached = facts.learning_rate * facts.max_steps / facts.warmup_steps
    why = f"The run ends before the warm-up: the learning rate never exceeds {reached:.2g}."
    is_short = facts.max_steps < 50  # a trial run of a configuration
    return (note if is_short else warning)(what, why, f"Set warmup_steps to at most {max(facts.max_steps // 10, 1)}.")


def check_betas(facts: Facts) -> Finding | None:
    """Adam's betas must be below 1, the second above the first."""
    beta1, beta2 = facts.adam_beta1, facts.adam_beta2
    if not facts.uses_adam:
        return None
    what = f"adam_beta1 is {beta1:g} and adam_beta2 is {beta2:g}."
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        return error(what, "Both must be at least 0 and below 1.", "Set adam_beta1: 0.9 and adam_beta2: 0.999.")
    if beta1 > beta2 or beta2 < 0.8:
        why = "The size of the gradients is averaged over fewer steps than their direction, so single batches make large steps."
        return warning(what, why, "Set adam_beta1: 0.9 and adam_beta2: 0.95 to 0.999. They may be swapped.")
    if beta2 > 0.9999:
        why = f"The size of the gradients is averaged over {1 / (1 - beta2):,.0f} steps, so a spike shortens steps for that long."
        return warning(what, why, "Set adam_beta2: 0.999.")
    return None


def check_weight_decay(facts: Facts) -> Finding | None:
    """Weight decay must not outweigh what is learned."""
    decay = facts.weight_decay
    if decay <= HIGHEST_DECAY or not facts.uses_adam:
        return None
    what = f"weight_decay is {decay:g}."
    why = f"Each step of Adam then takes {decay:g} times as much off a weight of 1 as it adds. Usual are 0 to 0.1."
    return warning(what, why, "Set weight_decay: 0.01, or 0.0 for adapters.")


def check_resume(facts: Facts) -> Finding | None:
    """A resumed run keeps the learning rate of its checkpoint."""
    asked, seen = facts.learning_rate, facts.resumed_rate
    is_past_warmup = facts.resumed_step is not None and facts.resumed_step > 2 * (facts.warmup_steps or 0)
    if seen <= asked * 1.001 and not (is_past_warmup and seen < asked / 2):
        return None
    what = f"learning_rate is {asked:g}, but the checkpoint to resume from has trained with {seen:g}."
    why = "The Trainer restores optimizer and schedule from the checkpoint, and with them its learning rate: yours has no effect."
    change = "Load the weights of the checkpoint as the model and train without resume_from_checkpoint, or keep the old rate."
    return warning(what, why, change)


OPTIMIZER_RULES = (
    Rule("learning-rate", "hyperparameters", "learning rate for this kind of training", ("learning_rate", "optimizer"), check_rate),
    Rule("low-learning-rate", "hyperparameters", "learning rate of adapters", ("learning_rate", "adapter"), check_low_rate,
         "https://thinkingmachines.ai/blog/lora/"),
    Rule("clipping", "hyperparameters", "gradient clipping", ("max_grad_norm",), check_clipping, "https://arxiv.org/abs/1211.5063"),
    Rule("warm-up", "hyperparameters", "warm-up", ("warmup_steps", "learning_rate", "optimizer"), check_warmup,
         "https://arxiv.org/abs/1908.03265"),
    Rule("long-warm-up", "hyperparameters", "length of the warm-up", ("warmup_steps", "max_steps", "learning_rate"), check_long_warmup),
    Rule("adam-betas", "hyperparameters", "Adam's betas", ("adam_beta1", "adam_beta2", "optimizer"), check_betas),
    Rule("weight-decay", "hyperparameters", "weight decay", ("weight_decay", "optimizer"), check_weight_decay, "https://arxiv.org/abs/1711.05101"),
    Rule("resumed-rate", "hyperparameters", "learning rate of a resumed run", ("resumed_rate", "learning_rate"), check_resume),
)  # fmt: skip
