"""What a model accepts in a batch: the sizes of its vocabularies, and the labels its loss takes."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ...own_fields import own_fields
from ..compat.model_config import without_adapter
from ..compat.own_loss import is_library_code, is_library_module

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
    "image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id", "audio_token_index",
)  # fmt: skip

POSITIONS = ("position_embeddings", "wpe", "embed_positions")  # learned ones: BERT, GPT-2, OPT and their kin


@dataclass(frozen=True)
class Limits:
    """What a batch may contain. Only what goes straight into a model and a loss of the hosts is judged."""

    num_labels: int | None = None  # labels are 0 to this, exclusive, and -100; None if their meaning is not known
    token_labels: bool = False  # labels are tokens of a sequence, so that all of them may be masked
    shifted: bool = False  # position 0 of the labels is never a target
    num_ids: int | None = None  # input ids are 0 to this, exclusive; None if not known
    num_types: int | None = None  # token types are 0 to this, exclusive; None if not known
    num_positions: int | None = None  # tokens that a sequence may have at most; None if not known, or not limited
    placeholders: tuple[int, ...] = ()  # ids that the model replaces before it embeds them
    is_regression: bool = False  # whether a classifier has one label, which makes it a regression
    known: bool = True  # whether model and loss are the hosts' own code

    def num_rows(self, field: str) -> int | None:
        """Returns how many rows the embedding of a field of ids has, `None` if that is not known."""
        return self.num_types if field == "token_type_ids" else self.num_ids


UNKNOWN = Limits(known=False)
"""Labels and ids may mean anything: nothing is judged."""


def find_limits(model: nn.Module, shifted: bool, own_loss: bool = False) -> Limits:
    """Returns the limits of a model without DDP wrapper, or of the base model of a PEFT model; what cannot be known is `None`
    and is not checked.

    `shifted` says whether its loss shifts the labels by one, `own_loss` whether the user's code may change or use the labels.
    """
    base = without_adapter(model) if is_library_code(type(model)) else model
    if own_loss or not isinstance(base, PreTrainedModel) or not _is_hosts(base, model):
        return UNKNOWN
    config = base.config
    names = {cls.__name__ for cls in type(base).__mro__}
    embedding = _find_embedding(base)
    num_labels, token_labels, is_regression = None, False, False
    if any(names.intersection(mapping.values()) for mapping in TOKEN_LABELS):
        num_labels, token_labels = _rows(base.get_output_embeddings) or _rows(base.get_input_embeddings), True
    elif any(names.intersection(mapping.values()) for mapping in CLASS_LABELS):
        regression = config.num_labels == 1 or config.problem_type in ("regression", "multi_label_classification")
        num_labels = None if regression else config.num_labels
        is_regression = config.num_labels == 1 and config.problem_type is None
    known = config.to_dict()
    placeholders = tuple(known[key] for key in PLACEHOLDER_IDS if isinstance(known.get(key), int))
    types, positions = _find_named(base, "token_type_embeddings"), _find_named(base, *POSITIONS)
    num_ids, num_types, num_positions = (
        None if each is None else each.num_embeddings for each in (embedding, types, positions)
    )
    return Limits(num_labels, token_labels, shifted, num_ids, num_types, num_positions, placeholders, is_regression)


def _is_hosts(base: PreTrainedModel, model: nn.Module) -> bool:
    loss = own_fields(base).get("_loss_function", find_limits)  # what was set in place of the loss of its class
    return is_library_code(loss) and all(map(is_library_module, (base, model)))


def _find_named(base: PreTrainedModel, *names: str) -> nn.Embedding | None:
    """Returns the only embedding with one of these names, like [`_find_embedding`]: of token types, or of learned positions."""
    found = [module for name, module in base.named_modules() if name.rpartition(".")[2] in names]
    return _if_reached(base, found[0]) if len(found) == 1 else None


def _find_embedding(base: PreTrainedModel) -> nn.Embedding | None:
    """Returns the input embedding if the ids of a batch reach it through the hosts' modules alone."""
    return _if_reached(base, _call(base.get_input_embeddings))


def _if_reached(base: PreTrainedModel, embedding: object) -> nn.Embedding | None:
    if not isinstance(embedding, nn.Embedding):
        return None
    name = next((name for name, module in base.named_modules() if module is embedding), None)
    if name is None:
        return None
    parts = name.split(".")
    above = [base.get_submodule(".".join(parts[:length])) for length in range(len(parts) + 1)]
    return embedding if all(is_library_code(type(m)) and is_library_module(m) for m in above) else None


def _call(get_embeddings: Callable[[], object]) -> object:
    try:
        return get_embeddings()
    except (NotImplementedError, AttributeError):  # what transformers raises for a model without token embeddings
        return None


def _rows(get_embeddings: Callable[[], object]) -> int | None:
    module = _call(get_embeddings)
    weight = dict(module.named_parameters(recurse=False)).get("weight") if isinstance(module, nn.Module) else None
    return None if weight is None or weight.ndim != 2 else weight.shape[0]
