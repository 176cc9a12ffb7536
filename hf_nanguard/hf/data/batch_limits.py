"""What a model accepts in a batch: the sizes of its vocabularies, and the labels its loss takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

IGNORED_LABEL = -100
"""The label that losses of torch and transformers leave out."""
TOKEN_LABELS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
CLASS_LABELS = (
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
)
PLACEHOLDER_IDS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)


@dataclass(frozen=True)
class Limits:
    """What a batch may contain.

    Args:
        num_labels (`int`, *optional*):
            Valid labels are 0 to this, exclusive, and -100; `None` if the meaning of labels is not known.
        token_labels (`bool`):
            Whether labels are tokens of a sequence, so that all of them may be masked.
        shifted (`bool`):
            Whether position 0 of the labels is never a target.
        num_ids (`int`, *optional*):
            Valid input ids are 0 to this, exclusive; `None` if not known.
        placeholders (`tuple[int, ...]`):
            Ids that the model replaces before it embeds them.
        ignored (`tuple[int, ...]`):
            Labels that the loss leaves out: -100, and -1 too where the loss is the user's own.
    """

    num_labels: int | None = None
    token_labels: bool = False
    shifted: bool = False
    num_ids: int | None = None
    placeholders: tuple[int, ...] = ()
    ignored: tuple[int, ...] = (IGNORED_LABEL,)


def find_limits(model: nn.Module, shifted: bool, own_loss: bool = False) -> Limits:
    """Returns the limits of a model; what cannot be known is `None` and is not checked.

    Args:
        model (`nn.Module`):
            The model, without DDP wrapper; for a PEFT model, those of its base model.
        shifted (`bool`):
            Whether its loss shifts the labels by one.
        own_loss (`bool`, *optional*, defaults to `False`):
            Whether the loss is the user's own code.
    """
    # peft is optional, so its class cannot be imported
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel):
        return Limits()
    config = base.config
    # A class of the user may replace any id before it embeds it, and ignore other labels than -100.
    own_class = not type(base).__module__.startswith("transformers.")
    names = {cls.__name__ for cls in type(base).__mro__}
    embedding = _rows(base.get_input_embeddings)
    num_labels, token_labels = None, False
    if any(names.intersection(mapping.values()) for mapping in TOKEN_LABELS):
        num_labels, token_labels = _rows(base.get_output_embeddings) or embedding, True
    elif any(names.intersection(mapping.values()) for mapping in CLASS_LABELS):
        regression = config.num_labels == 1 or config.problem_type in ("regression", "multi_label_classification")
        num_labels = None if regression else config.num_labels
    known = config.to_dict()
    placeholders = tuple(known[key] for key in PLACEHOLDER_IDS if isinstance(known.get(key), int))
    num_ids = None if own_class else embedding
    ignored = (IGNORED_LABEL, -1) if own_class or own_loss else (IGNORED_LABEL,)
    return Limits(num_labels, token_labels, shifted, num_ids, placeholders, ignored)


def _rows(get_embeddings: Callable[[], nn.Module | None]) -> int | None:
    try:
        weight = vars(get_embeddings() or nn.Identity()).get("_parameters", {}).get("weight")
    except NotImplementedError:  # what transformers raises for a model without token embeddings
        return None
    return None if weight is None or weight.ndim != 2 else weight.shape[0]
