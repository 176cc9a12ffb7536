"""Lower bounds of the memory that a run needs on its device, from the sizes of its model and batch.

Counted is only what is there for certain at the same time:

- weights, gradients of what is trained, and the state of the optimizer;
- activations that the backward pass needs of every token and layer of width h and inner width f: with gradient checkpointing the input
  of each layer (h); without, the inputs of both norms, the attention's queries and both halves of the inner layer (3h + 2f), and
  where the weights are trained also the inputs of their products (2h more);
- float32 logits of every token and entry of the vocabulary, if the plain Trainer computes the loss of a causal model.

Not counted: buffers of kernels, fragments, temporary copies, the longer-lived of them in optimizers, images, generation, and
everything of sharded models. A batch is taken at its longest (`max_length`, or `max_completion_length` for online trainers).
"""

from .hyperparameter_rules import find_size
from .run_facts import Facts

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS = {"adam": 2, "lion": 1, "sgd": 0, "adafactor": 0}  # that an optimizer keeps of each weight
ROWS = {"dpo": 2, "reward": 2, "orpo": 2, "cpo": 2, "simpo": 2}  # sequences of one row of the data


def estimate_memory(facts: Facts) -> Facts:
    """Returns these facts with the sizes that follow from them; what is measured already stays."""
    size = find_size(facts)
    weights = facts.weight_bytes
    if weights is None and size is not None:
        weights = int(
            size * (facts.quantization_bits / 8 if facts.quantization_bits else BYTES.get(facts.model_dtype or "", 2))
        )
    trained = facts.trainable_bytes
    if trained is None and weights is not None and facts.adapter is not None:
        trained = 0 if facts.is_adapter else weights  # of an adapter nothing for certain
    state = facts.optimizer_bytes
    if state is None and trained is not None:
        state = find_optimizer_bytes(facts.optimizer, trained)
    return facts.update(
        Facts.of(
            weight_bytes=weights,
            trainable_bytes=trained,
            optimizer_bytes=state,
            activation_bytes=find_activation_bytes(facts),
        )
    )


def find_optimizer_bytes(optimizer: str | None, trained: int) -> int | None:
    """Returns the size of an optimizer's state, `None` for one that is not known."""
    name = optimizer or ""
    moments = next((count for kind, count in MOMENTS.items() if kind in name), None)
    return None if moments is None else int(moments * trained / (4 if "8bit" in name else 1))


def find_activation_bytes(facts: Facts) -> int | None:
    """Returns a lower bound of the activations of one micro-batch."""
    length = facts.max_completion_length if facts.is_online else facts.max_length
    if None in (facts.hidden_size, facts.num_layers, facts.batch_size, length):
        return None
    tokens = facts.batch_size * length * ROWS.get(facts.task or "", 1)
    is_half = facts.mixed_precision in ("bf16", "fp16") or facts.model_dtype in ("bfloat16", "float16")
    width, inner = facts.hidden_size, facts.intermediate_size or 0
    per_token = width if facts.gradient_checkpointing else (3 if facts.is_adapter else 5) * width + 2 * inner
    layers = tokens * facts.num_layers * per_token * (2 if is_half else 4)
    has_logits = facts.task == "trainer" and facts.is_causal and facts.head_rows
    return layers + (tokens * facts.head_rows * 4 if has_logits else 0)
