"""Rules about memory and disk."""

from .finding import Finding, Rule, error, warning
from .run_facts import Facts

GIB = 2**30


def check_memory(facts: Facts) -> Finding | None:
    """Weights, gradients, optimizer state and activations must fit on the device, and snapshots too if that is the CPU."""
    if facts.is_sharded:
        return None
    parts = {
        "weights": facts.weight_bytes,
        "gradients": facts.trainable_bytes,
        "optimizer state": facts.optimizer_bytes or 0,
        "activations at least": facts.activation_bytes or 0,
        "snapshots of the guard": (facts.snapshot_bytes or 0) if facts.device_type == "cpu" else 0,
    }
    total = sum(parts.values())
    if total <= 0.95 * facts.device_memory:
        return None
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    what = f"The run needs at least {total / GIB:.1f} GiB, and the {facts.device_type or 'device'} has {facts.device_memory / GIB:.1f} GiB."
    change = "Train an adapter (use_peft: true), use an 8-bit optimizer, smaller batches with gradient_checkpointing, or shard the model."
    fixed = facts.weight_bytes + facts.trainable_bytes + (facts.optimizer_bytes or 0)
    return (error if fixed > facts.device_memory else warning)(
        what, f"In GiB: {shown}. Buffers, generation and fragments come on top.", change
    )


def check_disk(facts: Facts) -> Finding | None:
    """All checkpoints that will exist at once must fit on the disk."""
    needed = facts.checkpoint_bytes * facts.num_checkpoints
    if needed <= facts.disk_free:
        return None
    what = f"{facts.num_checkpoints} checkpoints need {needed / GIB:.1f} GiB, and the disk has {facts.disk_free / GIB:.1f} GiB free."
    why = (
        f"One takes {facts.checkpoint_bytes / GIB:.2f} GiB with its optimizer state. The run would fail while it saves."
    )
    change = "Set save_total_limit: 2, save_only_model: true or a larger save_steps, or choose another output_dir."
    return (error if facts.checkpoint_bytes > facts.disk_free else warning)(what, why, change)


RESOURCE_RULES = (
    Rule("memory", "resources", "memory of the device", ("weight_bytes", "trainable_bytes", "device_memory"), check_memory),
    Rule("disk", "resources", "room for checkpoints", ("checkpoint_bytes", "num_checkpoints", "disk_free"), check_disk),
)  # fmt: skip
