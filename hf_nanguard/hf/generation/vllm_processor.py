"""The sampling guard as a logits processor of vLLM, for those who ask for it; vLLM is imported only when it is used.

Give it to the engine by class or by name, or register it under the entry point group `vllm.logits_processors`:

    LLM(model, logits_processors=["hf_nanguard.hf.generation.vllm_processor:VllmStabilityLogitsProcessor"])

It follows the V1 interface (`vllm.v1.sample.logits_processor.LogitsProcessor`) as documented. **It was tested against a
stand-in of that interface only, never run in vLLM itself**, nor on a GPU. Newer engines with their second model runner
have another interface and need `VLLM_USE_V2_MODEL_RUNNER=0`, and vLLM takes no custom processor together with
speculative decoding. The engine lives in a process of its own, so the trainer is not told which completion was sick.
"""

from typing import Any

from torch import Tensor

from ...core.logits import Tally, can_look, repair_scores
from ...errors import ArgumentError

NAME = "VllmStabilityLogitsProcessor"


def __getattr__(name: str) -> type:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    built = build_processor()
    globals()[NAME] = built
    return built


def build_processor() -> type:
    """Returns the processor class, a subclass of vLLM's own.

    Raises:
        ArgumentError: If vLLM is not installed or has no such interface.
    """
    try:
        from vllm.v1.sample.logits_processor import LogitsProcessor
    except ImportError as error:
        raise ArgumentError(
            f"{NAME} needs vLLM with its V1 logits processors, and importing them failed ({error}). Install vllm, or "
            "generate with transformers."
        ) from error

    class VllmStabilityLogitsProcessor(LogitsProcessor):
        """Masks NaN and +inf, and ends a sequence in whose scores nothing is left; healthy rows stay as they are.

        Args:
            vllm_config (`VllmConfig`), device (`torch.device`), is_pin_memory (`bool`):
                As vLLM hands them over.
        """

        def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
            ids = getattr(vllm_config.model_config.hf_config, "eos_token_id", None)
            self.end_id = (ids[0] if isinstance(ids, (list, tuple)) and ids else ids) or 0
            self.tally = Tally()

        @classmethod
        def validate_params(cls, sampling_params: Any) -> None:
            """Takes all requests."""

        def apply(self, logits: Tensor) -> Tensor:
            """Repairs the scores of one step, in place where nothing else needs them; nothing is read."""
            fixed, top, left = repair_scores(logits, self.end_id, in_place=not can_look(logits))
            if top is not None and left is not None:
                self.tally.add(top, left)
            return fixed

        def is_argmax_invariant(self) -> bool:
            """Greedy requests need the repair as well."""
            return False

        def update_state(self, batch_update: Any) -> None:
            """Has no state of single requests."""

    VllmStabilityLogitsProcessor.__qualname__ = NAME  # so that a pickled class finds its way back here
    return VllmStabilityLogitsProcessor
