"""Rules about reinforcement learning and preference losses: sampling, groups, KL."""

from .finding import Finding, Rule, error, note, warning
from .run_facts import Facts


def check_temperature(facts: Facts) -> Finding | None:
    """Sampling must explore, and must stay the policy's."""
    value = facts.temperature
    if not facts.is_online or 0.1 <= value <= 1.5:
        return None
    if value <= 0:
        return error(f"temperature is {value:g}.", "Logits are divided by it.", "Set temperature: 1.0.")
    if value < 0.1:
        why = f"Logits are multiplied by {1 / value:.0f}: all completions of a prompt become equal, and their advantages 0."
    else:
        why = "Completions become close to random, and most of them get the lowest reward."
    return warning(f"temperature is {value:g}.", why, "Set temperature: 1.0, or 0.7 for less variety.")


def check_group_size(facts: Facts) -> Finding | None:
    """A group needs at least two completions to compare."""
    size = facts.num_generations
    if not facts.is_online or size >= 4 or (facts.task == "rloo" and size >= 2):
        return None
    if size < 2:
        why = "An advantage is the difference to the other completions of the prompt, and there is none."
        return error(f"num_generations is {size}.", why, "Set num_generations: 8.")
    why = f"The baseline of a completion is the mean of {size}, so it is mostly noise."
    return note(f"num_generations is {size}.", why, "Set num_generations: 8 if memory allows.")


def check_group_divides(facts: Facts) -> Finding | None:
    """A generation batch holds whole groups."""
    size, group = facts.generation_batch_size, facts.num_generations
    world = facts.world_size
    if size is None:
        if None in (facts.batch_size, facts.accumulation_steps):
            return None
        size = facts.batch_size * facts.accumulation_steps * (world or 1)
    if not facts.is_online or group < 2 or size % group == 0:
        return None
    what = f"A generation batch of {size} cannot be divided into groups of num_generations={group}."
    per_step = "per_device_train_batch_size x processes x gradient_accumulation_steps"
    why = f"TRL generates whole groups only and refuses to start unless {per_step} is a multiple of num_generations."
    change = f"Set gradient_accumulation_steps or per_device_train_batch_size so that the product is {-(-size // group) * group}."
    if world is None:  # a launcher may start any number of processes
        change += " Or start it on as many processes as make it a multiple."
    return (warning if world is None else error)(what, why, change)


def check_beta(facts: Facts) -> Finding | None:
    """The weight of the KL term, or the sharpness of a preference loss."""
    beta = facts.beta
    if facts.is_online:
        if beta < 0:
            return error(
                f"beta is {beta:g}.",
                "A negative KL weight rewards distance from the reference.",
                "Set beta: 0.0 to 0.04.",
            )
        if beta > 0.5:
            why = "The KL term then outweighs advantages, which are about 1, and the policy stays at the reference."
            return warning(f"beta is {beta:g}.", why, "Set beta: 0.0 to 0.04.")
    elif facts.task in ("dpo", "kto"):
        if beta <= 0:
            why = "The loss is a function of beta times the log-ratio, so it is constant."
            return error(f"beta is {beta:g}.", why, "Set beta: 0.1.")
        if beta > 1:
            why = "The sigmoid of beta times the log-ratio saturates after a few steps, and gradients vanish."
            return warning(f"beta is {beta:g}.", why, "Set beta: 0.1 to 0.5.")
    return None


def check_kl(facts: Facts) -> Finding | None:
    """Several updates on the same completions without a KL term rest on the clipped ratio alone."""
    if not facts.is_online or facts.beta != 0 or facts.num_iterations <= 4:
        return None
    why = f"The same completions are used {facts.num_iterations} times, and only the clipped ratio keeps the policy near them."
    return note(
        f"num_iterations is {facts.num_iterations} without a KL term (beta is 0).",
        why,
        "Set beta: 0.01 to 0.04, or fewer iterations.",
    )


def check_completion_length(facts: Facts) -> Finding | None:
    """Completions must fit into the model."""
    if facts.max_completion_length < facts.max_positions:
        return None
    what = f"max_completion_length is {facts.max_completion_length}, and the model has {facts.max_positions} positions."
    return warning(
        what,
        "Prompt and completion together exceed what the model was trained for.",
        f"Set max_completion_length below {facts.max_positions}.",
    )


ONLINE_RULES = (
    Rule("temperature", "hyperparameters", "sampling temperature", ("temperature", "task"), check_temperature),
    Rule("group-size", "hyperparameters", "completions per prompt", ("num_generations", "task"), check_group_size,
         "https://arxiv.org/abs/2402.03300"),
    Rule("group-divides", "hyperparameters", "whole groups in a generation batch", ("num_generations", "task"), check_group_divides),
    Rule("beta", "hyperparameters", "beta", ("beta", "task"), check_beta, "https://arxiv.org/abs/2305.18290"),
    Rule("kl-term", "hyperparameters", "KL term", ("beta", "num_iterations", "task"), check_kl),
    Rule("completion-length", "hyperparameters", "length of completions", ("max_completion_length", "max_positions"), check_completion_length),
)  # fmt: skip
