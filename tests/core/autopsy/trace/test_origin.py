"""The walk from a poisoned result: it ends at what made the bad number, and passes by what is merely not finite."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_nanguard.core.autopsy.trace.origin import find_origin
from hf_nanguard.core.vocabulary import Cause
from tests.architectures import BATCH, BY_NAME

from ..matrix import BRAIN, HALF, INF, NAN, culprit_line, find_in, run_planted
from .test_trace import Net, filled_memory, find

# ---- what is healthy ----


def masked_scores(h):
    return h + h * h.masked_fill(torch.eye(3, 4) > 0, -INF).softmax(-1)


def added_mask(h):
    return h + h * (h + torch.full((3, 4), -INF).triu(1)).softmax(-1)


def logarithm_as_mask(h):
    return h + h * (h + torch.eye(3, 4).log()).softmax(-1)


def replaced_branch(h):
    return h + torch.where(h.detach() > 1e9, h.detach().mul(0).log(), h)


def bucket_of_a_logarithm(h):
    return h + (torch.arange(4).float() / 4).log().clamp(min=-8).long()


def overflow_that_saturates(h):
    return h * torch.tanh((h * 0 + 1e15) ** 3)


def nan_replaced(h):
    return h + (h.detach() * 0).div(0).nan_to_num()


BENIGN = (masked_scores, added_mask, logarithm_as_mask, replaced_branch, bucket_of_a_logarithm, nan_replaced,
          overflow_that_saturates)  # fmt: skip


def fault(h):
    return h + (h * 0).abs().sqrt()  # culprit


@pytest.mark.parametrize("benign", BENIGN)
def test_benign_values_are_not_blamed(benign):
    assert find(Net(benign)) is None
    for order in (lambda h: fault(benign(h)), lambda h: benign(fault(h))):
        origin = find(Net(order))
        assert (origin.source, origin.cause) == (culprit_line(fault), Cause.SQRT_AT_ZERO)


def test_cube_of_gelu_in_half_is_healthy():
    architecture = BY_NAME["gpt2"]
    model, inputs = architecture.build(HALF), architecture.inputs(HALF)
    model.get_submodule(architecture.linear).bias.data[3] = 100  # 100 ** 3 is more than float16 holds
    origin, loss = find_in(model, lambda: model(**inputs).loss, inputs)
    assert origin is None
    assert math.isfinite(loss)


@pytest.mark.parametrize(("name", "fault"), [("gpt2", "matmul_fp16"), ("t5", "log_zero"), ("wav2vec2", "norm_by_hand")])
def test_benign_values_of_models_are_not_blamed_beside_a_fault(name, fault):
    assert run_planted(BY_NAME[name], fault) == []  # gelu's cube, the buckets' log(0), the second output of CTC


def test_a_row_that_attends_to_nothing_is_healthy_under_sdpa():
    architecture = BY_NAME["llama"]
    model, inputs = architecture.build(attention="sdpa"), architecture.inputs()
    mask = torch.full((BATCH, 1, 8, 8), -INF).triu(1)
    mask[1, 0, 2] = -INF
    inputs["attention_mask"] = mask
    assert find_in(model, lambda: model(**inputs).loss, inputs)[0] is None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN])
def test_left_padding_with_the_lowest_number_is_healthy(attention, dtype):
    architecture = BY_NAME["llama"]
    model, inputs = architecture.build(dtype, attention), architecture.inputs()
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    assert find_in(model, lambda: model(**inputs).loss, inputs)[0] is None


def test_t5_clamps_its_own_overflow_unless_dropout_makes_nan_of_it():
    def overflow(module, args, output):
        return output + 6e4 + 6e4  # culprit

    architecture = BY_NAME["t5"]
    model, inputs = architecture.build(HALF), architecture.inputs(HALF)
    model.get_submodule("encoder.block.0.layer.1.DenseReluDense").register_forward_hook(overflow)
    origin, _ = find_in(model, lambda: model(**inputs).loss, inputs)
    assert (origin.source, origin.cause) == (culprit_line(overflow), Cause.FP16_OVERFLOW)
    model.eval()
    assert find_in(model, lambda: model(**inputs).loss, inputs)[0] is None


def test_chunks_of_trl_in_unwritten_memory_are_healthy_and_pass_a_fault_on():
    kernel = pytest.importorskip("trl.kernels.chunked_logprob", reason="older TRL has no chunks")

    def strike(module, args, output):
        return (output * scale / scale,)  # culprit

    def loss():
        hidden = model.model(**inputs).last_hidden_state.flatten(0, 1)
        hidden = strike(None, None, hidden)[0]
        outputs = kernel.ChunkedLogProbFunction.apply(hidden, model.lm_head.weight, None, targets, 1.0, 24)
        return -(outputs[0] * weights).sum() + 0.1 * outputs[1].sum()

    architecture = BY_NAME["llama"]
    model, inputs = architecture.build(), architecture.inputs()
    targets = inputs.pop("labels").flatten().clamp(min=0)
    weights, scale = torch.ones(24), torch.ones(24, 1)
    with filled_memory():
        assert find_in(model, loss, inputs)[0] is None
        scale[10] = 0
        origin, _ = find_in(model, loss, inputs)
        assert (origin.source, origin.cause) == (culprit_line(strike), Cause.DIV_BY_ZERO)
        assert origin.positions == ((10, 0),)
        scale[10] = 1
        weights[10] = NAN
        origin, _ = find_in(model, loss, {**inputs, "weights": weights})
        assert (origin.leaf, origin.positions) == ("weights", ((10,),))
        weights[10] = 1
        model.lm_head.weight.data[7, 3] = NAN
        origin, _ = find_in(model, loss, inputs)
        assert (origin.leaf, origin.num_bad) == ("lm_head.weight", 1)


# ---- what is told ----


def test_infinite_mask_given_as_input_is_no_culprit_but_a_nan_in_it_is():
    model, x = Net(), torch.ones(3, 4)
    mask = torch.zeros(3, 4)
    mask[1] = -INF

    def loss():
        return (model(x) + mask).softmax(-1).sum()

    origin = find(model, x, loss, attention_mask=mask)
    assert (origin.cause, origin.leaf, origin.positions) == (Cause.MASKED_ROW_SOFTMAX, None, ((1, 0),))
    mask[1] = 0
    mask[2, 1] = NAN
    origin = find(model, x, loss, attention_mask=mask)
    assert (origin.cause, origin.leaf, origin.positions) == (Cause.INPUT_NONFINITE, "attention_mask", ((2, 1),))


def test_overflow_beside_a_mask_is_no_mask():
    def masked_then_added(h):
        scores = h * 0 + 6e4
        masked = scores.masked_fill(torch.eye(3, 4) > 0, -INF)
        masked = masked + scores  # culprit
        return h * masked.softmax(-1)

    def masked_then_doubled(h):
        masked = (h * 0 + 6e4).masked_fill(torch.eye(3, 4) > 0, -INF)
        masked = masked * 2  # culprit
        return h * masked.softmax(-1)

    for middle in (masked_then_added, masked_then_doubled):
        origin = find(Net(middle).to(HALF), torch.ones(3, 4, dtype=HALF))
        assert (origin.source, origin.cause) == (culprit_line(middle), Cause.FP16_OVERFLOW)


def test_a_mask_that_is_added_up_is_a_fault():
    model, x = Net(), torch.ones(3, 4)

    def smoothed():
        log_probabilities = model(x).masked_fill(torch.eye(3, 4) > 0, -INF).log_softmax(-1)
        smooth = log_probabilities.mean(-1)  # culprit
        return 0.1 * -smooth.mean() + 1.0

    def forbidden_label():
        logits = model(x).masked_fill(torch.eye(3, 4) > 0, -INF)
        return 2 * F.cross_entropy(logits, torch.tensor([0, 2, 3]))  # culprit

    def entropy():
        log_probabilities = model(x).masked_fill(torch.eye(3, 4) > 0, -INF).log_softmax(-1)
        return (log_probabilities.exp() * log_probabilities).sum(-1).mean()  # culprit

    ops = {smoothed: "aten.mean.dim", forbidden_label: "aten.nll_loss_forward.default", entropy: "aten.mul.Tensor"}
    for loss, op in ops.items():
        origin = find(model, x, loss)
        assert (origin.op, origin.source, origin.phase) == (op, culprit_line(loss), "loss")


def test_target_too_long_for_ctc():
    architecture = BY_NAME["wav2vec2"]
    model, inputs = architecture.build(), architecture.inputs()
    inputs["labels"] = torch.randint(1, 20, (BATCH, 120))
    origin, loss = find_in(model, lambda: model(**inputs).loss, inputs)
    assert loss == INF
    assert (origin.op, origin.phase, origin.positions) == ("aten._ctc_loss.Tensor", "loss", ((0,), (1,), (2,)))


def test_phases():
    class WithLoss(Net):
        def forward(self, x):
            return mean_loss(super().forward(x))

    def mean_loss(h):
        return (h * 0).log().mean()

    model, x = Net(), torch.ones(3, 4)
    assert find(Net(lambda h: (h * 0).log())).phase == "forward"
    assert find(model, x, lambda: (model(x) * 0).log().sum()).phase == "loss"
    assert find(WithLoss()).phase == "loss"
    assert find(Net(fault)).phase == "backward"
    assert find(model, x * NAN).phase == "input"


def test_loss_outside_the_model_has_no_module_and_a_loss_module_is_no_module_of_it():
    model, x = Net(), torch.ones(3, 4)
    criterion = nn.CrossEntropyLoss()
    target = torch.full((3,), -100)

    def loss():
        return criterion(model(x), target)  # culprit

    origin = find(model, x, loss)
    assert (origin.module, origin.source, origin.phase) == (None, culprit_line(loss), "loss")
    assert origin.cause is Cause.ALL_LABELS_MASKED


def test_limits_and_largest_are_told():
    origin = find(Net(lambda h: (h * 0 + 6e4) * 2).to(HALF), torch.ones(3, 4, dtype=HALF))
    assert (origin.largest, origin.limit, origin.dtype) == (6e4, 65504.0, "float16")
    assert origin.kind == "inf"


def test_text_is_the_line():
    origin = find(Net(fault))
    assert origin.text == "return h + (h * 0).abs().sqrt()  # culprit"


def test_the_earlier_of_two_faults_is_named():
    def two(h):
        h = h + (h.detach() * 0).log()  # culprit
        return h + (h.detach() * 0 - 1).sqrt()

    assert find(Net(two)).source == culprit_line(two)


def test_fault_of_the_forward_is_named_before_what_it_does_to_the_backward():
    def unseen(h):
        extra = torch.exp(h * 0 + 1000)  # culprit
        return h + torch.minimum(extra, h)

    origin = find(Net(unseen))
    assert (origin.op, origin.phase, origin.source) == ("aten.exp.default", "forward", culprit_line(unseen))


def test_gradient_of_a_leaf_no_operator_wrote_is_told_by_its_reader():
    model, x = Net(), torch.ones(3, 4)
    weights = torch.tensor([1.0, INF, 1.0, 1.0])

    def loss():
        return (model(x) * weights).mean()  # culprit

    origin = find(model, x, loss)
    assert (origin.op, origin.source, origin.cause) == ("aten.mul.Tensor", culprit_line(loss), Cause.UNKNOWN)
    assert origin.outside
    origin = find(model, x, loss, weights=weights)
    assert not origin.outside
    assert (origin.phase, origin.leaf, origin.positions) == ("input", "weights", ((1,),))


def test_signature_tells_faults_apart_but_not_batches():
    long, short = torch.ones(5, 4), torch.ones(2, 4)
    assert find(Net(fault), long).signature == find(Net(fault), short).signature
    assert find(Net(fault)).signature != find(Net(lambda h: fault(h * 1).log())).signature


def test_hook_on_a_parameter_gradient():
    model = Net()

    def spoil(gradient):
        return gradient * NAN  # culprit

    model.second.weight.register_hook(spoil)
    origin = find(model)
    assert (origin.phase, origin.source, origin.op) == ("backward", culprit_line(spoil), "aten.mul.Tensor")


def test_overflow_of_attention_scores_is_named_in_both_kinds_of_attention():
    architecture = BY_NAME["llama"]
    for attention in ("eager", "sdpa"):
        model, inputs = architecture.build(HALF, attention), architecture.inputs(HALF)
        for name in ("q_proj", "k_proj"):
            weight = model.get_submodule(f"model.layers.1.self_attn.{name}").weight
            weight.data.copy_(torch.randn(weight.shape).sign() * 400)
        origin, loss = find_in(model, lambda m=model, i=inputs: m(**i).loss, inputs)
        assert origin is None or (origin.module, origin.cause) == ("model.layers.1.self_attn", Cause.FP16_OVERFLOW)
        assert origin is not None or math.isfinite(loss)
        assert attention == "sdpa" or origin is not None


def test_loss_without_a_model_inside():
    model = Net()
    origin = find_origin(lambda: torch.tensor(NAN), model, lambda: [], {})
    assert (origin.op, origin.cause) == ("aten.lift_fresh.default", Cause.UNKNOWN)


def test_cross_entropy_of_a_nan_logit_names_the_logit_not_the_loss():
    def half_way(h):
        return h / (h.detach() * 0)  # culprit

    model, x = Net(half_way), torch.ones(3, 4)
    origin = find(model, x, lambda: F.cross_entropy(model(x), torch.tensor([0, 1, 2])))
    assert origin.source == culprit_line(half_way)


def test_batch_norm_writes_its_statistics_without_saying_so():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    x = torch.ones(3, 4)
    x[1, 2] = INF
    origin = find_origin(lambda: model(x).sum(), model, lambda: [], {"x": x})
    assert (origin.phase, origin.leaf, origin.positions) == ("input", "x", ((1, 2),))


def test_class_weights_that_sum_up_to_nothing():
    model = Net()
    x, target = torch.ones(3, 4), torch.tensor([1, 1, 1])
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0])
    origin = find(model, x, lambda: F.cross_entropy(model(x), target, weight=weight))
    assert (origin.op, origin.cause) == ("aten.nll_loss_forward.default", Cause.DIV_BY_ZERO)
