"""Faults of the models themselves, their data and their loss: weights too large for float16, NaN in a weight, a table, an
input or a label, a row that attends to nothing, losses that overflow. What must be named is a line of the model's own
source, or a leaf."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers.integrations.moe
from torch import Tensor, nn
from torch.nn import functional as F

from hf_nanguard.core.vocabulary import Cause
from tests.architectures import BATCH, Architecture

from .matrix import BRAIN, HALF, INF, NAN, SAMPLE, SINGLE, TOKEN, Expected, compare, culprit_line, find_in, find_line

LINEAR = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}
DECODERS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral")
Case = tuple[nn.Module, dict[str, Tensor], Callable[[], Tensor], Expected]
NATIVE: dict[str, Callable[[Architecture], Case | None]] = {}


def native(case: Callable[[Architecture], Case | None]) -> Callable[[Architecture], Case | None]:
    """Registers a case; it returns `None` for an architecture it does not apply to."""
    NATIVE[case.__name__] = case
    return case


def lines_of(model: nn.Module, module: str, text: str) -> set[str]:
    """Returns the lines that hold `text` in the file of the class of a module or of its parent."""
    owners = [model.get_submodule(module), model.get_submodule(module.rpartition(".")[0]), model]
    files = {inspect.getsourcefile(type(owner)) for owner in owners}
    return set().union(*(find_line(file, text) for file in files if file))


def plain(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    return lambda: model(**inputs).loss


def run_native(architecture: Architecture, name: str) -> list[str] | None:
    """Runs a case and returns what is wrong about the answer, `None` if it does not apply."""
    case = NATIVE[name](architecture)
    if case is None:
        return None
    model, inputs, loss, expected = case
    origin, _ = find_in(model, loss, inputs)
    return compare(origin, expected, BATCH)


# ---- weights ----


def _overloaded(architecture: Architecture, dtype: torch.dtype, value: float, cause: Cause) -> Case:
    model, inputs = architecture.build(dtype), architecture.inputs(dtype)
    weight = model.get_submodule(architecture.linear).weight.data
    weight.copy_(value * torch.randn(weight.shape).sign())
    lines = lines_of(model, architecture.linear, architecture.line)
    expected = Expected(LINEAR, architecture.linear, lines, "forward", cause)
    expected.extra = {"dtype": str(dtype).removeprefix("torch."), "limit": torch.finfo(dtype).max}
    return model, inputs, plain(model, inputs), expected


@native
def linear_fp16(architecture):
    return _overloaded(architecture, HALF, 6e4, Cause.FP16_OVERFLOW)


@native
def linear_bf16(architecture):
    return _overloaded(architecture, BRAIN, 3e38, Cause.BF16_OVERFLOW)


@native
def linear_fp32(architecture):
    return _overloaded(architecture, SINGLE, 3e38, Cause.FP32_OVERFLOW)


@native
def gated_mlp_fp16(architecture):
    if architecture.gated is None:
        return None
    gate, up, module = architecture.gated
    model, inputs = architecture.build(HALF), architecture.inputs(HALF)
    for name in (gate, up):
        model.get_submodule(name).weight.data.fill_(500)
    lines = lines_of(model, module, architecture.gated_line)
    expected = Expected({"aten.mul.Tensor"}, module, lines, "forward", Cause.FP16_OVERFLOW)
    return model, inputs, plain(model, inputs), expected


@native
def nan_weight(architecture):
    model, inputs = architecture.build(), architecture.inputs()
    model.get_submodule(architecture.linear).weight.data.view(-1)[5] = NAN
    lines = lines_of(model, architecture.linear, architecture.line)
    expected = Expected(LINEAR, architecture.linear, lines, "parameter", Cause.PARAM_NONFINITE)
    expected.leaf = f"{architecture.linear}.weight"
    expected.extra = {"num_bad": 1, "kind": "nan", "parameter": expected.leaf}
    return model, inputs, plain(model, inputs), expected


@native
def embedding_row(architecture):
    if architecture.embedding is None:
        return None
    model, inputs = architecture.build(), architecture.inputs()
    table = model.get_submodule(architecture.embedding).weight
    leaf = next(name for name, parameter in model.named_parameters() if parameter is table)  # tied: by its first name
    ids = inputs[architecture.ids]
    token = ids.shape[1] - 8 + TOKEN  # the last eight are text
    table.data[ids[SAMPLE, token]] = NAN
    lines = lines_of(model, architecture.embedding, "(input_ids)")
    expected = Expected(
        {"aten.embedding.default"}, architecture.embedding, lines, "parameter", Cause.UNINITIALISED_WEIGHT,
        leaf=leaf, place=(SAMPLE, token),
    )  # fmt: skip
    expected.extra = {"num_bad": table.shape[1]}
    return model, inputs, plain(model, inputs), expected


@native
def nan_expert(architecture):
    """One entry of one expert, which only some tokens are sent to."""
    if architecture.name != "mixtral":
        return None
    model, inputs = architecture.build(), architecture.inputs()
    module = "model.layers.1.mlp.experts"
    model.get_submodule(module).gate_up_proj.data[2, 3, 4] = NAN
    lines = find_line(inspect.getsourcefile(transformers.integrations.moe), "torch.nn.functional.grouped_mm(input")
    lines |= find_line(inspect.getsourcefile(transformers.integrations.moe), "transformers.grouped_mm_fallback(input")
    # torch 2.8 has no grouped_mm, and transformers then has an operator of its own.
    expected = Expected(
        {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"},
        module,
        lines,
        "parameter",
        Cause.PARAM_NONFINITE,
    )
    expected.leaf = f"{module}.gate_up_proj"
    expected.extra = {"num_bad": 1}
    return model, inputs, plain(model, inputs), expected


# ---- data ----


@native
def nan_input(architecture):
    if architecture.field is None:
        return None
    model, inputs = architecture.build(), architecture.inputs()
    place = (SAMPLE, 2, 3, 4)[: inputs[architecture.field].ndim]
    inputs[architecture.field][place] = NAN
    expected = Expected(set(), None, set(), "input", Cause.INPUT_NONFINITE, leaf=architecture.field)
    expected.extra = {"num_bad": 1, "positions": (place,), "shape": tuple(inputs[architecture.field].shape)}
    return model, inputs, plain(model, inputs), expected


@native
def nan_embedded_input(architecture):
    if architecture.embedding is None or architecture.field is not None:
        return None
    model, inputs = architecture.build(), architecture.inputs()
    table = model.get_submodule(architecture.embedding).weight
    inputs["inputs_embeds"] = table.detach()[inputs.pop(architecture.ids)].clone()
    inputs["inputs_embeds"][SAMPLE, TOKEN, 3] = NAN
    expected = Expected(set(), None, set(), "input", Cause.INPUT_NONFINITE, leaf="inputs_embeds")
    expected.extra = {"num_bad": 1, "positions": ((SAMPLE, TOKEN, 3),)}
    return model, inputs, plain(model, inputs), expected


@native
def fully_masked_row(architecture):
    if architecture.name not in DECODERS or architecture.name == "mixtral":  # its router takes no such mask
        return None
    model, inputs = architecture.build(), architecture.inputs()
    length = inputs["input_ids"].shape[1]
    mask = torch.full((BATCH, 1, length, length), -INF).triu(1)
    mask[SAMPLE, 0, TOKEN] = -INF
    inputs["attention_mask"] = mask
    lines = lines_of(model, "model.layers.0.self_attn", "nn.functional.softmax(attn_weights, dim=-1")
    expected = Expected(
        {"aten._softmax.default"}, "model.layers.0.self_attn", lines, "forward", Cause.MASKED_ROW_SOFTMAX
    )
    expected.extra = {"positions": ((SAMPLE, 0, TOKEN), (SAMPLE, 1, TOKEN)), "shape": (BATCH, 2, length, length)}
    return model, inputs, plain(model, inputs), expected


@native
def nan_padding(architecture):
    """NaN where nobody looks: the loss is finite, the gradient is not."""
    if architecture.name not in DECODERS:
        return None
    model, inputs = architecture.build(), architecture.inputs()

    def strike(module, args, output):
        keep = inputs["attention_mask"][..., None]
        return output * keep / keep  # culprit

    model.get_submodule(architecture.block).register_forward_hook(strike)

    def loss():
        value = model(**inputs).loss
        assert math.isfinite(value.item()) or architecture.name == "mixtral"  # its router looks at every token
        return value

    expected = Expected(
        {"aten.div.Tensor"}, architecture.block, {culprit_line(strike)}, "forward", Cause.DIV_BY_ZERO,
        extra={"positions": ((2, 6), (2, 7))},
    )  # fmt: skip
    return model, inputs, loss, expected


# ---- losses ----


def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**{name: value for name, value in inputs.items() if not name.startswith("loss_")}).logits


def _in_loss(op: str, function: Callable, cause: Cause, **more: Any) -> Expected:
    return Expected({op}, None, {culprit_line(function)}, "loss", cause, **more)


@native
def all_labels_masked(architecture):
    model, inputs = architecture.build(), architecture.inputs()

    def loss():
        logits = _logits(model, inputs).flatten(0, -2)
        target = torch.full(logits.shape[:1], -100)
        return F.cross_entropy(logits, target)  # culprit

    return model, inputs, loss, _in_loss("aten.nll_loss_forward.default", loss, Cause.ALL_LABELS_MASKED)


@native
def nan_label(architecture):
    model, inputs = architecture.build(), architecture.inputs()
    inputs["loss_targets"] = torch.zeros(BATCH)
    inputs["loss_targets"][SAMPLE] = NAN

    def loss():
        values = _logits(model, inputs).flatten(1).mean(1)
        return F.mse_loss(values, inputs["loss_targets"])  # culprit

    expected = _in_loss("aten.mse_loss.default", loss, Cause.INPUT_NONFINITE, leaf="loss_targets")
    expected.phase = "input"
    expected.extra = {"positions": ((SAMPLE,),)}
    return model, inputs, loss, expected


def _log_probabilities(logits: Tensor) -> Tensor:
    """Of the first class, (batch, token)."""
    return (logits if logits.ndim == 3 else logits[:, None].expand(-1, 4, -1)).log_softmax(-1)[..., 0]


@native
def policy_ratio(architecture):
    """As in GRPO: the smaller of two terms is taken, so the loss is finite and the gradient is not."""
    model, inputs = architecture.build(), architecture.inputs()

    def loss():
        logps = _log_probabilities(_logits(model, inputs))
        old = logps.detach().clone()
        old[SAMPLE, TOKEN] -= 200
        ratio = torch.exp(logps - old)  # culprit
        clipped = torch.clamp(ratio, 0.8, 1.2)
        value = -torch.min(ratio, clipped).mean()
        assert math.isfinite(value.item())
        return value

    expected = _in_loss("aten.exp.default", loss, Cause.RATIO_OVERFLOW)
    expected.extra = {"positions": ((SAMPLE, TOKEN),)}
    return model, inputs, loss, expected


@native
def kl_term(architecture):
    model, inputs = architecture.build(), architecture.inputs()

    def loss():
        logps = _log_probabilities(_logits(model, inputs))
        ref_logps = logps.detach().clone()
        ref_logps[SAMPLE, TOKEN] += 200
        kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1  # culprit
        return kl.mean()

    expected = _in_loss("aten.exp.default", loss, Cause.KL_OVERFLOW)
    expected.extra = {"positions": ((SAMPLE, TOKEN),)}
    return model, inputs, loss, expected


@native
def masked_mean_loss(architecture):
    model, inputs = architecture.build(), architecture.inputs()

    def loss():
        logps = _log_probabilities(_logits(model, inputs))
        mask = torch.ones_like(logps, dtype=torch.long)
        mask[SAMPLE] = 0
        per_sample = (logps * mask).sum(1) / mask.sum(1)  # culprit
        return per_sample.mean()

    return model, inputs, loss, _in_loss("aten.div.Tensor", loss, Cause.DIV_BY_ZERO, extra={"positions": ((SAMPLE,),)})
