"""The sampling guard as a logits processor of vLLM, which is imported only when the processor is used.

Pass it to the engine by class or by name, or register it under the entry point group `vllm.logits_processors`:

    LLM(model, logits_processors=["hf_nanguard.hf.generation.vllm_processor:VllmStabilityLogitsProcessor"])

It implements the documented V1 interface (`vllm.v1.sample.logits_processor.LogitsProcessor`). **It was tested only against
a stand-in of that interface, never in vLLM itself** or on a GPU. Newer engines with the second model runner have another
interface and need `VLLM_USE_V2_MODEL_RUNNER=0`, and vLLM accepts no custom processor together with speculative decoding.
The engine runs in a process of its own, so the trainer does not learn which completions had non-finite scores. An error of the
processor leaves the scores of that step as they are.
"""

from typing import Any

from torch import Tensor

from ...boundary import Boundary
from ...core.logits import Tally, can_read_in_place, repair_scores
from ...errors import ArgumentError

NAME = "VllmStabilityLogitsProcessor"


def _find_end_id(vllm_config: Any) -> Any:
    """Returns the token that ends a sequence; `None` if the model has none."""
    ids = getattr(vllm_config.model_config.hf_config, "eos_token_id", None)
    return ids[0] if isinstance(ids, (list, tuple)) and ids else ids


def __getattr__(name: str) -> type:
    """Builds the processor class, a subclass of vLLM's own, on first use."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from vllm.v1.sample.logits_processor import LogitsProcessor
    except ImportError as error:
        raise ArgumentError(
            f"{NAME} needs vLLM with its V1 logits processors, and importing them failed ({error}). Install vllm, or "
            "generate with transformers."
        ) from error

    class VllmStabilityLogitsProcessor(LogitsProcessor):
        """Masks NaN and +inf, and ends a sequence without a finite score; finite rows stay as they are."""

        def __init__(self, vllm_config: object, device: object, is_pin_memory: bool):
            self.boundary = Boundary()
            self.end_id = self.boundary.call("logits", _find_end_id, vllm_config) or 0
            self.tally = Tally()

        @classmethod
        def validate_params(cls, sampling_params: object) -> None:
            """Accepts all requests."""

        def apply(self, logits: Tensor) -> Tensor:
            """Repairs the scores of one step, on a device in place; nothing is read."""
            return self.boundary.call("logits", self._repair, logits, otherwise=lambda scores: scores)

        def _repair(self, logits: Tensor) -> Tensor:
            fixed, maxima = repair_scores(logits, self.end_id, in_place=not can_read_in_place(logits))
            if maxima is not None:
                self.tally.add(maxima)
            return fixed

        def is_argmax_invariant(self) -> bool:
            """Returns `False`: greedy requests need the repair as well."""
            return False

        def update_state(self, batch_update: object) -> None:
            """Does nothing: there is no state per request."""

    VllmStabilityLogitsProcessor.__qualname__ = NAME  # so that a pickled class is found here again
    globals()[NAME] = VllmStabilityLogitsProcessor
    return VllmStabilityLogitsProcessor
