"""What the trace sees, what it does not disturb, and what it survives."""

import gc
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_nanguard.core.autopsy.trace.memory import first_places, measure
from hf_nanguard.core.autopsy.trace.origin import find_origin
from hf_nanguard.core.autopsy.trace.trace import Trace
from hf_nanguard.core.vocabulary import Cause
from tests.architectures import BY_NAME

from ..matrix import NAN, culprit_line, find_in

INF = float("inf")


class Net(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, middle=lambda h: h, size=4):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size)
        self.middle = middle

    def forward(self, x):
        return self.second(self.middle(self.first(x)))


def find(model, x=None, loss=None, **inputs):
    x = torch.ones(3, 4) if x is None else x
    return find_in(model, loss or (lambda: model(x).sum()), {"x": x, **inputs})[0]


@contextmanager
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def filled_memory():
    """Fills what `torch.empty` returns with NaN, so that garbage is the same every time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---- extents and places ----


@pytest.mark.parametrize(("value", "kind"), [(1.0, "finite"), (INF, "inf"), (-INF, "inf"), (NAN, "nan")])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2]
)
def test_measure_is_exact(value, kind, dtype):
    tensor = torch.ones(3, 4)
    tensor[1, 2] = value
    assert measure(tensor.to(dtype)).kind == kind


def test_measure_takes_what_has_no_plain_memory():
    assert measure(torch.tensor([1, 2])).kind == "finite"
    assert measure(torch.zeros(0)).kind == "finite"
    assert measure(torch.tensor([[0.0, NAN]]).to_sparse()).kind == "nan"
    assert measure(torch.full((2,), NAN, device="meta")).kind == "finite"


def test_measure_takes_nested_and_compressed_tensors():
    with _quiet():
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])], layout=torch.jagged)
        rows = torch.tensor([[0.0, INF]]).to_sparse_csr()
    assert measure(jagged).kind == "nan"
    assert measure(rows).kind == "inf"


def test_positions_of_a_matrix_are_its_bad_rows():
    tensor = torch.zeros(4, 3)
    tensor[2, 1] = tensor[2, 2] = NAN
    assert first_places(~tensor.isfinite()) == [(2, 1)]
    assert first_places(~torch.stack([torch.zeros(4, 3), tensor]).isfinite()) == [(1, 2)]
    assert first_places(~tensor[2].isfinite()) == [(1,), (2,)]


# ---- it disturbs nothing ----


def gradients_of(model, inputs, traced):
    torch.manual_seed(3)
    model.zero_grad()
    loss = None

    def run():
        nonlocal loss
        loss = model(**inputs).loss
        loss.backward()

    if traced:
        with Trace(model, inputs).recording():
            run()
    else:
        run()
    return [loss.detach(), torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["llama", "mixtral", "wav2vec2"])
def test_results_are_bit_identical(name):
    architecture = BY_NAME[name]
    model, inputs = architecture.build(), architecture.inputs()
    plain = [tensor.clone() for tensor in gradients_of(model, inputs, traced=False)]
    traced = gradients_of(model, inputs, traced=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def test_no_tensor_is_kept_alive():
    seen = []

    def middle(h):
        bad = torch.log(h * 0)
        seen.extend(weakref.ref(tensor) for tensor in (h, bad))
        return bad

    model = Net(middle)
    trace = Trace(model, {})
    with trace.recording():
        model(torch.ones(3, 4)).sum().backward()
    model.zero_grad()
    gc.collect()
    assert trace.memory.writes
    assert [ref() for ref in seen] == [None, None]


def test_the_module_class_is_as_before_also_after_an_error():
    original = nn.Module.__call__

    def fail(h):
        raise ValueError("planted error")

    trace = Trace(model := Net(fail))
    with pytest.raises(ValueError, match="planted error"), trace.recording():
        model(torch.ones(3, 4))
    assert nn.Module.__call__ is original
    assert trace.stack == []


def test_modules_are_right_after_an_error_that_was_caught():
    class Brittle(nn.Module):
        def forward(self, h):
            raise ValueError

    class Outer(Net):
        def __init__(self):
            super().__init__()
            self.brittle = Brittle()

        def forward(self, x):
            try:
                self.brittle(x)
            except ValueError:
                x = self.first(x) * NAN  # culprit
            return self.second(x)

    origin = find(Outer())
    assert (origin.module, origin.op, origin.source) == ("", "aten.mul.Tensor", culprit_line(Outer.forward))


# ---- memory: views, partial writes, buffers ----


def in_place_on_view(h):
    h = h * 1
    h[:, 1].mul_(0).log_()  # culprit
    return h


def in_place(h):
    h = h.abs()
    h.mul_(0).log_()  # culprit
    return h


def written_through_a_view(h):
    whole = torch.zeros(6, 4)
    whole[3:] = h / 0  # culprit
    return whole[3:]


def out_variant(h):
    result = torch.empty(3, 4)
    torch.log(h.detach() * 0, out=result)  # culprit
    return h + result


def out_into_its_input(h):
    result = (h * 0).detach().log()  # culprit
    torch.add(result, 1.0, out=result)
    return h + result


def expanded(h):
    scale = (h.sum() * 0).log()  # culprit
    return h + scale.expand(3, 4)


def foreach(h):
    first, second = torch._foreach_log([h.detach() * 0 + 1, h.detach() * 0])  # culprit
    return h + first + second


def multiple_outputs(h):
    values, _ = (h / 0).sort(-1)  # culprit
    return values


def through_complex(h):
    spectrum = torch.fft.fft(h / 0)  # culprit
    return torch.fft.ifft(spectrum).real


def overwritten_garbage(h):
    buffer = h.new_zeros(3, 4)
    buffer[0] = NAN
    buffer[0] = 1.0
    buffer[1] = (h[1] * 0).log()  # culprit
    return h + buffer


def rewritten_whole(h):
    buffer = torch.full((3, 4), NAN)
    buffer.copy_(h.detach())
    return h + (buffer * 0).log()  # culprit


def repaired_in_part(h):
    values = (h.detach() * torch.tensor([[0.0], [1.0], [1.0]])).abs().log()
    values[0] = 0.0
    return h + values / (values * 0)  # culprit


def index_put_into_empty(h):
    buffer = torch.empty(3, 4)
    for row in range(3):
        buffer.index_put_((torch.tensor([row]),), (h.detach()[row] * row / row)[None])  # culprit
    return h + buffer


def beside_a_bad_one_in_a_list(h):
    unused = h.detach() * 0 / 0
    _, second = torch._foreach_log([unused, h.detach() * 0])  # culprit
    return h + second


def two_kinds_in_one_buffer(h):
    buffer = torch.zeros(3, 4)
    buffer[0] = h.detach()[0] * 0 / 0  # culprit
    buffer[1] = (h.detach()[1] * 0).log()
    return h + buffer


@pytest.mark.parametrize(
    ("middle", "op"),
    [
        (in_place_on_view, "aten.log_.default"), (in_place, "aten.log_.default"),
        (written_through_a_view, "aten.div.Tensor"), (out_variant, "aten.log.out"),
        (out_into_its_input, "aten.log.default"), (expanded, "aten.log.default"),
        (foreach, "aten._foreach_log.default"), (multiple_outputs, "aten.div.Tensor"),
        (through_complex, "aten.div.Tensor"), (overwritten_garbage, "aten.log.default"),
        (rewritten_whole, "aten.log.default"), (index_put_into_empty, "aten.div.Tensor"),
        (beside_a_bad_one_in_a_list, "aten._foreach_log.default"), (two_kinds_in_one_buffer, "aten.div.Tensor"),
        (repaired_in_part, "aten.div.Tensor"),
    ],
)  # fmt: skip
def test_values_are_followed_through_memory(middle, op):
    with filled_memory():
        origin = find(Net(middle))
    assert (origin.op, origin.source, origin.module) == (op, culprit_line(middle), "")
    assert origin.cause in (Cause.LOG_OF_ZERO, Cause.DIV_BY_ZERO)


def test_a_buffer_filled_chunk_by_chunk_is_healthy_and_its_bad_chunk_is_named():
    def chunked(h):
        buffer = torch.empty(3, 4)
        for row in range(3):
            buffer[row] = h.detach()[row]
        return h + buffer

    def bad_chunk(h):
        buffer = torch.empty(3, 4)
        for row in range(3):
            buffer[row] = (h.detach()[row].abs() * (row - 1)).abs().log()  # culprit
        return h + buffer

    with filled_memory():
        assert find(Net(chunked)) is None
        origin = find(Net(bad_chunk))
    assert (origin.op, origin.source) == ("aten.log.default", culprit_line(bad_chunk))
    assert origin.positions == ((0,), (1,), (2,), (3,))


def test_unwritten_memory_is_named():
    def unwritten(h):
        return h + torch.empty(3, 4)  # culprit

    with filled_memory():
        origin = find(Net(unwritten))
    assert (origin.cause, origin.source) == (Cause.UNINITIALISED_WEIGHT, culprit_line(unwritten))


# ---- ways to run ----


def bad_block(h):
    return h + (h * 0).abs().sqrt()  # culprit


class Block(nn.Module):
    def forward(self, h):
        return bad_block(h)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("as_module", [True, False])
def test_gradient_checkpointing(reentrant, as_module):
    model = Net()
    model.block = Block()
    model.middle = lambda h: checkpoint(model.block if as_module else bad_block, h, use_reentrant=reentrant)
    origin = find(model)
    assert (origin.phase, origin.op, origin.node) == ("backward", "aten.div.Tensor", "SqrtBackward0")
    assert (origin.source, origin.module) == (culprit_line(bad_block), "block" if as_module else "")
    assert origin.cause is Cause.SQRT_AT_ZERO


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_forward_fault_is_a_forward_fault(reentrant):
    def overflow(h):
        return h + torch.exp(h * 0 + 1000) * 0  # culprit

    model = Net()
    model.middle = lambda h: checkpoint(overflow, h, use_reentrant=reentrant)
    origin = find(model)
    assert (origin.phase, origin.op, origin.node) == ("forward", "aten.exp.default", None)
    assert origin.source == culprit_line(overflow)


def test_the_model_itself_checkpoints():
    architecture = BY_NAME["llama"]
    model, inputs = architecture.build(), architecture.inputs()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: bad_block(output))
    origin, _ = find_in(model, lambda: model(**inputs).loss, inputs)
    assert (origin.module, origin.source) == ("model.layers.1.mlp", culprit_line(bad_block))


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_submodule_runs_eagerly(in_place):
    model = Net()
    model.block = Block()
    compiled = model.block
    if in_place:
        model.block.compile(backend="eager")
    else:
        compiled = torch.compile(model.block, backend="eager")
    model.middle = lambda h: compiled(h)
    with torch.compiler.set_stance("force_eager"):
        origin = find(model)
    assert (origin.module, origin.source) == ("block", culprit_line(bad_block))


def test_autocast():
    def overflow(h):
        return h * 3e38 * 10  # culprit

    model = Net(overflow)
    with torch.autocast("cpu", torch.bfloat16):
        origin = find(model)
    assert (origin.cause, origin.dtype, origin.source) == (Cause.BF16_OVERFLOW, "bfloat16", culprit_line(overflow))
    model = Net()
    model.second.weight.data[0, 0] = NAN
    with torch.autocast("cpu", torch.bfloat16):
        origin = find(model)
    assert (origin.leaf, origin.module, origin.num_bad) == ("second.weight", "second", 1)


def test_sparse_embedding_gradient():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4, sparse=True)

        def forward(self, ids):
            h = self.table(ids)
            return (h * 0).abs().sqrt()  # culprit

    origin = find(Table(), torch.tensor([1, 3]))
    assert (origin.cause, origin.source) == (Cause.SQRT_AT_ZERO, culprit_line(Table.forward))


def test_module_called_twice_and_shared_weight():
    class Twice(Net):
        def __init__(self):
            super().__init__()
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.first(self.first(x)) + self.second(x)

    model = Twice()
    assert find(model) is None
    model.first.weight.data[1, 1] = NAN
    origin = find(model)
    assert (origin.leaf, origin.module) == ("first.weight", "first")


def test_lora():
    from peft import LoraConfig, get_peft_model

    architecture = BY_NAME["llama"]
    model = get_peft_model(architecture.build(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    inputs = architecture.inputs()
    assert find_in(model, lambda: model(**inputs).loss, inputs)[0] is None
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default"
    model.get_submodule(name).weight.data[0, 0] = NAN
    origin, _ = find_in(model, lambda: model(**inputs).loss, inputs)
    assert (origin.leaf, origin.module) == (f"{name}.weight", name)


def test_nested_tensors_do_no_harm():
    def nested(h):
        with _quiet():
            rows = torch.nested.as_nested_tensor([h[0], h[1, :2]], layout=torch.jagged)
        return h + rows.sin().values().sum() + (h * 0).log()  # culprit

    origin = find(Net(nested))
    assert origin.source == culprit_line(nested)


def test_tensors_that_wrap_others():
    from torch.testing._internal.two_tensor import TwoTensor

    def wrapped(h):
        pair = TwoTensor(h.detach().clone(), h.detach().clone())
        bad = (pair * 0).log()  # culprit
        return h + bad.a

    origin = find(Net(wrapped))
    assert (origin.op, origin.source, origin.cause) == ("aten.log.default", culprit_line(wrapped), Cause.LOG_OF_ZERO)


def test_operators_of_higher_order_are_seen_as_one():
    from torch.nn.attention.flex_attention import flex_attention

    def attend(h):
        q = h.detach().reshape(1, 1, 3, 4)
        with _quiet():
            return h + flex_attention(q, q, q * scale).reshape(3, 4)  # culprit

    with torch.compiler.set_stance("force_eager"):
        scale = 1.0
        assert find(Net(attend)) is None
        scale = INF
        origin = find(Net(attend))
    assert (origin.op, origin.source) == ("aten.mul.Tensor", culprit_line(attend))


def test_gradients_of_gradients():
    def penalty(h):
        x = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad((x * 0).abs().sqrt().sum(), x, create_graph=True)  # culprit
        return h + slope

    def twice(h):
        return h + torch.autograd.grad((h.abs() * 0).pow(1.5).sum(), h, create_graph=True)[0]  # culprit

    for middle in (penalty, twice):
        origin = find(Net(middle))
        assert (origin.phase, origin.source) == ("backward", culprit_line(middle))


def test_custom_function_forward():
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return (h * 0).log()  # culprit

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    origin = find(Net(Root.apply))
    assert (origin.phase, origin.source) == ("forward", culprit_line(Root.forward))


def test_tensor_held_by_a_module_is_a_leaf():
    model = Net()
    model.scale = torch.tensor([1.0, NAN, 1.0, 1.0])
    model.middle = lambda h: h * model.scale
    origin = find(model)
    assert (origin.leaf, origin.num_bad, origin.phase) == ("scale", 1, "parameter")


def test_weights_of_a_module_beside_the_model_have_names():
    """A teacher, a reference, a reward model: the loss calls it, the model does not hold it."""
    model, teacher = Net(), nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)).requires_grad_(False)
    teacher[0].weight[3] = NAN
    origin = find(model, loss=lambda: (model(torch.ones(3, 4)) - teacher(torch.tensor([0, 3, 1]))).square().sum())
    assert (origin.parameter, origin.num_bad) == ("Sequential.0.weight", 4)
    assert (origin.cause, origin.module) == (Cause.UNINITIALISED_WEIGHT, None)


def test_a_wrapper_changes_no_name():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model = Net()
    model.scale = nn.Parameter(torch.tensor([1.0, NAN, 1.0, 1.0]))
    model.middle = lambda h: h * model.scale
    wrapper = Wrapper(model)
    assert find(model, loss=lambda: wrapper(torch.ones(3, 4)).sum()).parameter == "scale"


def test_leaves_that_share_memory_are_told_apart():
    both = torch.zeros(6, 4)
    both[4, 1] = NAN
    first, second = both[:3], both[3:]
    model = Net()
    origin = find(model, first, loss=lambda: (model(first) + model(second)).sum(), other=second)
    assert (origin.leaf, origin.positions) == ("other", ((1, 1),))


def test_memory_is_filled_by_the_helper():
    with filled_memory():
        assert torch.empty(3, 4).isnan().all()


def test_clipping_is_no_origin():
    def find_clipped(model):
        def run():
            loss = model(torch.ones(3, 4)).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), INF)  # the coefficient is inf, and then clamped
            return loss.detach()

        return find_origin(run, model, lambda: [(n, p.grad) for n, p in model.named_parameters()], {})

    assert find_clipped(Net()) is None
    assert find_clipped(Net(bad_block)).source == culprit_line(bad_block)


def test_healthy_norms_at_zero():
    def norms(h):
        x = h * 0
        return h + x.norm(dim=-1, keepdim=True) + torch.linalg.norm(x) + torch.cdist(x, x).sum() + F.normalize(x)

    assert find(Net(norms)) is None
