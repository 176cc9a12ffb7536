"""Losses: against float64 references in every dtype, over extreme logits, masks and nothing at all."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_nanguard import ArgumentError
from hf_nanguard.core.losses import (
    bounded_loss,
    clamp_weight,
    distillation_loss,
    dtype_eps,
    masked_cross_entropy,
    normalized_mse,
    soft_cap,
)
from hf_nanguard.testing import INF, NAN, OperationCounter

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EDGE = 65504.0
LOGIT = st.one_of(
    st.floats(-1e4, 1e4, width=16),
    st.floats(-8, 8, width=16),
    st.sampled_from([0.0, EDGE, -EDGE, -INF, -INF]),
)
SETTINGS = settings(deadline=None, max_examples=120)


@st.composite
def tables(draw, num_tables=1):
    """Logits of a few tokens in some dtype."""
    vocabulary = draw(st.integers(2, 6))
    number = draw(st.integers(1, 4))
    row = st.lists(LOGIT, min_size=vocabulary, max_size=vocabulary)
    dtype = draw(st.sampled_from(DTYPES))
    found = [draw(st.lists(row, min_size=number, max_size=number)) for _ in range(num_tables)]
    return [torch.tensor(rows, dtype=torch.float64).to(dtype).requires_grad_() for rows in found]


def gradient(loss, *inputs):
    found = torch.autograd.grad(loss, inputs)
    return found[0] if len(found) == 1 else found


def assert_near(ours, reference, dtype=None):
    """Within the rounding of float32 for values, and of their dtype for gradients; equal where not finite."""
    limits = torch.finfo(dtype or torch.float32)
    rtol, atol = (2e-5, 1e-5) if dtype in (None, torch.float32) else (2 * limits.eps, 2 * limits.tiny + 1e-7)
    torch.testing.assert_close(ours.double(), reference.double(), rtol=rtol, atol=atol, equal_nan=True)


# ---- cross-entropy ----


def reference_cross_entropy(rows, labels):
    """Entry by entry, in float64, only the rows that count."""
    losses, slopes = [], []
    counted = [label for label in labels if label != -100]
    for row, label in zip(rows.detach().double(), labels, strict=True):
        slope = torch.zeros_like(row)
        if label != -100:
            losses.append(row.logsumexp(-1) - row[label])
            slope = row.softmax(-1)
            slope[label] -= 1
        slopes.append(slope / max(1, len(counted)))
    total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
    return total / max(1, len(counted)), torch.stack(slopes)


@SETTINGS
@given(tables(), st.data())
def test_cross_entropy_is_that_of_float64(table, data):
    [logits] = table
    possible = [
        [-100, *(i for i, value in enumerate(row) if value > -INF)] for row in logits.tolist()
    ]  # a masked token is no label
    labels = [data.draw(st.sampled_from(ids)) for ids in possible]
    chunk_size = data.draw(st.sampled_from([None, 1, 3]))
    loss = masked_cross_entropy(logits, torch.tensor(labels), chunk_size=chunk_size)
    value, slope = reference_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert_near(loss, value)
    found = gradient(loss, logits)
    assert found.dtype == logits.dtype
    assert_near(found, slope, logits.dtype)
    for row, label in zip(found.tolist(), labels, strict=True):
        assert label == -100 or row[label] <= 0
        assert all(entry >= 0 for i, entry in enumerate(row) if i != label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_is_that_of_torch(dtype):
    logits = (5 * torch.randn(3, 7, 50, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, 50, (3, 7))
    labels[1, 2:] = -100
    theirs = F.cross_entropy(logits.view(-1, 50), labels.view(-1))
    for chunk_size in (None, 4):
        ours = masked_cross_entropy(logits, labels, chunk_size=chunk_size)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient(ours, logits), torch.autograd.grad(theirs, logits, retain_graph=True)[0])


def test_gradients_are_those_of_finite_differences():
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 5, dtype=torch.float64)
    labels = torch.tensor([1, -100, 4, 0])
    assert torch.autograd.gradcheck(lambda x: 3 * masked_cross_entropy(x, labels, chunk_size=3), logits)
    assert torch.autograd.gradcheck(lambda x: 3 * distillation_loss(x, teacher, 1.5, labels != -100), logits)
    assert torch.autograd.gradcheck(lambda x: soft_cap(x, 0.7), logits)
    assert torch.autograd.gradcheck(lambda x: bounded_loss(x.exp(), 1.3), logits)
    assert torch.autograd.gradcheck(lambda x: normalized_mse(x, teacher, labels), logits)


def test_second_derivatives_are_those_of_finite_differences():
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 5, dtype=torch.float64)
    labels = torch.tensor([1, -100, 4, 0])
    assert torch.autograd.gradgradcheck(lambda x: 3 * masked_cross_entropy(x, labels, chunk_size=3), logits)
    assert torch.autograd.gradgradcheck(
        lambda x: 3 * distillation_loss(x, teacher, 1.5, labels != -100, chunk_size=3), logits
    )
    assert torch.autograd.gradgradcheck(lambda x: soft_cap(x, 0.7), logits)


def test_a_gradient_penalty_is_that_of_torch():
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    inputs, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([1, -100, 4, 0])
    found = []
    for loss_fn in (masked_cross_entropy, F.cross_entropy):
        [slope] = torch.autograd.grad(loss_fn((inputs @ weight).tanh(), labels), weight, create_graph=True)
        found.append(gradient(slope.square().sum(), weight))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0)])
def test_no_label_is_zero_with_a_graph(dtype, num_items):
    logits = torch.full((2, 3, 4), NAN, dtype=dtype, requires_grad=True)
    loss = masked_cross_entropy(logits, torch.full((2, 3), -100), num_items=num_items)
    assert loss.item() == 0.0
    assert torch.equal(gradient(loss, logits), torch.zeros_like(logits))
    empty = torch.zeros(0, 4, dtype=dtype, requires_grad=True)
    loss = masked_cross_entropy(empty, torch.zeros(0, dtype=torch.long), num_items=num_items)
    assert loss.item() == 0.0
    assert gradient(loss, empty).shape == (0, 4)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_ignored_position_holds_has_no_say(bad, dtype):
    logits = torch.randn(4, 6).to(dtype)
    labels = torch.tensor([3, -100, 0, -100])
    clean = logits.clone().requires_grad_()
    logits[1] = bad
    logits[3, 2] = bad
    sick = logits.requires_grad_()
    first, second = masked_cross_entropy(clean, labels), masked_cross_entropy(sick, labels)
    assert torch.equal(first, second)
    assert torch.equal(gradient(first, clean), gradient(second, sick))
    assert not gradient(masked_cross_entropy(sick, labels), sick)[[1, 3]].any()


def test_what_is_bad_and_counts_stays_visible():
    labels = torch.tensor([1])
    assert masked_cross_entropy(torch.tensor([[0.0, NAN]]), labels).isnan()
    assert masked_cross_entropy(torch.tensor([[0.0, -INF]]), labels).item() == INF
    assert masked_cross_entropy(torch.tensor([[INF, 0.0]]), labels).isnan()


def test_the_sum_is_divided_by_the_given_number():
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, -100, 2, 3, 4])
    mean = masked_cross_entropy(logits, labels)
    for number in (20, torch.tensor(20)):
        torch.testing.assert_close(masked_cross_entropy(logits, labels, num_items=number), mean * 5 / 20)
    torch.testing.assert_close(masked_cross_entropy(logits, labels.clamp(min=0), ignore_index=0), F.cross_entropy(
        logits, labels.clamp(min=0), ignore_index=0))  # fmt: skip


def test_large_equal_logits_keep_their_digits():
    logits = torch.full((1, 2), 60000.0, requires_grad=True)
    loss = masked_cross_entropy(logits, torch.tensor([0]))
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert gradient(loss, logits).tolist() == [[-0.5, 0.5]]


@pytest.mark.parametrize("call", [
    lambda logits, labels: masked_cross_entropy(logits, labels),
    lambda logits, labels: distillation_loss(logits, logits.detach() + 1, mask=labels != -100),
])  # fmt: skip
def test_half_logits_are_never_float32_as_a_whole(call):
    logits = torch.randn(4096, 2048, dtype=torch.bfloat16, requires_grad=True)  # twice a chunk
    labels = torch.randint(0, 2048, (4096,))
    with Sizes() as sizes:
        call(logits, labels).backward()
    assert sizes.largest[torch.float32] < logits.numel()


class Sizes(OperationCounter):
    """Keeps the largest number of elements of any result, by dtype."""

    def __enter__(self):
        self.largest: dict[torch.dtype, int] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor):
                self.largest[each.dtype] = max(self.largest.get(each.dtype, 0), each.numel())
        return result


def test_nothing_is_read():
    logits = torch.randn(8, 5, requires_grad=True)
    labels = torch.tensor([0, 1, -100, 2, 3, 4, 0, -100])
    with OperationCounter() as count:
        loss = masked_cross_entropy(soft_cap(logits, 30.0), labels, chunk_size=3, num_items=torch.tensor(6))
        loss = loss + distillation_loss(logits, logits.detach() * 2, mask=labels != -100)
        loss = loss + clamp_weight(torch.tensor(INF)) * normalized_mse(logits, logits.detach() + 1, labels != -100)
        bounded_loss(loss, 6.0).backward()
    assert count.reads == []


# ---- distillation ----


def reference_divergence(student, teacher, temperature, counted):
    """`T^2 * mean KL` in float64, entry by entry, with the documented value of a forbidden token."""
    total, number = 0.0, 0
    slopes = torch.zeros(student.shape, dtype=torch.float64)
    for i, (ours, theirs) in enumerate(zip(student.detach().double(), teacher.detach().double(), strict=True)):
        if not counted[i] or (ours == -INF).all() or (theirs == -INF).all():
            continue
        number += 1
        log_q, log_p = (ours / temperature).log_softmax(-1), (theirs / temperature).log_softmax(-1)
        for p, q in zip(log_p.tolist(), log_q.tolist(), strict=True):
            if math.exp(p) > 0:
                total += math.exp(p) * (p - (-131072.0 if q == -INF else q))
        slopes[i] = log_q.exp() - log_p.exp()
    number = max(1, number)
    return torch.tensor(temperature**2 * total / number, dtype=torch.float64), slopes * temperature / number


@SETTINGS
@given(tables(2), st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0]), st.data())
def test_distillation_is_that_of_float64(pair, temperature, data):
    student, teacher = pair
    counted = data.draw(st.lists(st.booleans(), min_size=len(student), max_size=len(student)))
    chunk_size = data.draw(st.sampled_from([None, 1, 3]))
    loss = distillation_loss(student, teacher, temperature, torch.tensor(counted), chunk_size=chunk_size)
    value, slope = reference_divergence(student, teacher, temperature, counted)
    assert loss.isfinite()
    assert loss >= 0
    assert_near(loss, value)
    found = gradient(loss, student)
    assert_near(found, slope, student.dtype)
    assert (found.double().abs() <= temperature * (1 + 1e-2)).all()


def test_distillation_is_that_of_torch():
    student, teacher = torch.randn(3, 5, 40, requires_grad=True), torch.randn(3, 5, 40)
    scaled = [F.log_softmax(logits / 1.5, -1) for logits in (student, teacher)]
    theirs = 1.5**2 * F.kl_div(*scaled, log_target=True, reduction="sum") / 15
    ours = distillation_loss(student, teacher, 1.5, chunk_size=4)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient(ours, student), gradient(theirs, student))


def test_large_logits_keep_their_digits_at_any_temperature():
    student, teacher = torch.tensor([[0.0, -3.0, 1.0]]), torch.tensor([[0.0, 0.0, 2.0]])
    near, far = (
        distillation_loss((student + offset).requires_grad_(), teacher + offset, temperature=1.5)
        for offset in (0, 60000)
    )
    assert torch.equal(near, far)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_token_to_distil_is_zero_with_a_graph(dtype):
    student = torch.full((2, 3), NAN, dtype=dtype, requires_grad=True)
    teacher = torch.full((2, 3), NAN, dtype=dtype)
    loss = distillation_loss(student, teacher, mask=torch.zeros(2))
    assert loss.item() == 0.0
    assert torch.equal(gradient(loss, student), torch.zeros_like(student))
    masked = torch.full((2, 3), -INF, dtype=dtype, requires_grad=True)
    for pair in (
        (masked, torch.zeros_like(masked)),
        (torch.zeros_like(masked).detach().requires_grad_(), masked.detach()),
    ):
        loss = distillation_loss(*pair)
        assert loss.item() == 0.0
        assert torch.equal(gradient(loss, pair[0]), torch.zeros_like(pair[0]))


def test_masks_at_the_teacher_and_at_the_student():
    teacher = torch.tensor([[0.0, 0.0, -INF]])
    student = torch.tensor([[0.0, 0.0, -INF]], requires_grad=True)
    assert distillation_loss(student, teacher).item() == 0.0
    barred = torch.tensor([[0.0, -INF, 0.0]], requires_grad=True)
    loss = distillation_loss(barred, teacher, temperature=1.0)
    # half the teacher's mass lies on a token that the student cannot choose
    assert loss.item() == pytest.approx(
        0.5 * (math.log(0.5) - math.log(0.5)) + 0.5 * (math.log(0.5) + 131072.0), rel=1e-6
    )
    assert gradient(loss, barred).tolist() == [[0.0, -0.5, 0.5]]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("side", [0, 1])
def test_bad_logits_stay_visible_where_they_count(bad, side):
    pair = [torch.randn(2, 4), torch.randn(2, 4)]
    pair[side][1, 2] = bad
    assert not distillation_loss(*pair).isfinite()
    assert distillation_loss(*pair, mask=torch.tensor([True, False])).isfinite()


def test_the_teacher_gets_no_gradient():
    student, teacher = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    distillation_loss(student, teacher).backward()
    assert teacher.grad is None
    assert student.grad.any()


def test_a_halved_student_learns_from_a_float32_teacher():
    student = (50 * torch.randn(3, 9)).half().requires_grad_()
    teacher = 50 * torch.randn(3, 9)
    wide = student.detach().double().requires_grad_()
    assert_near(
        gradient(distillation_loss(student, teacher), student),
        gradient(distillation_loss(wide, teacher.double()), wide),
        torch.float16,
    )


# ---- normalised MSE ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 100.0, 6e4])
def test_normalized_mse_is_that_of_float64(dtype, scale):
    target = (scale * torch.rand(4, 6, 3)).to(dtype)
    prediction = (scale * torch.rand(4, 6, 3)).to(dtype).requires_grad_()
    mask = torch.rand(4, 6) > 0.3
    wide = prediction.detach().double().requires_grad_()
    errors = (wide - target.double())[mask].square().mean()
    expected = errors / target.double()[mask].square().mean()
    loss = normalized_mse(prediction, target, mask)
    assert_near(loss, expected)
    assert_near(gradient(loss, prediction), gradient(expected, wide), dtype)


def test_scale_cancels_up_to_the_edge_of_float32():
    prediction, target = torch.rand(50), torch.rand(50)
    once = normalized_mse(prediction, target)
    torch.testing.assert_close(normalized_mse(1e30 * prediction, 1e30 * target), once)
    torch.testing.assert_close(normalized_mse(8 * prediction, 8 * target), once)
    assert normalized_mse(torch.zeros(50), target).item() == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_target_without_energy_gives_no_scale(dtype):
    prediction = torch.full((3, 4), 0.5, dtype=dtype, requires_grad=True)
    loss = normalized_mse(prediction, torch.zeros(3, 4, dtype=dtype))
    assert loss.item() == 0.25
    assert gradient(loss, prediction).float().tolist() == [[pytest.approx(2 * 0.5 / 12, rel=1e-2)] * 4] * 3
    faint = torch.full((3, 4), 1e-3)
    assert normalized_mse(torch.zeros(3, 4), faint, eps=1e-4).item() == pytest.approx(1e-6)
    assert normalized_mse(torch.zeros(3, 4), faint, eps=1e-8).item() == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_masked_entries_have_no_say(bad):
    prediction, target, mask = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([1, 0, 1])
    clean = normalized_mse(prediction[[0, 2]], target[[0, 2]])
    prediction[1], target[1] = bad, bad
    prediction.requires_grad_()
    loss = normalized_mse(prediction, target, mask)
    torch.testing.assert_close(loss, clean)
    found = gradient(loss, prediction)
    assert found.isfinite().all()
    assert not found[1].any()
    nothing = normalized_mse(prediction, target, torch.zeros(3))
    assert nothing.item() == 0.0
    assert not gradient(nothing, prediction).any()
    assert not normalized_mse(prediction, target).isfinite()
    empty = torch.zeros(0, 4, requires_grad=True)
    for directions in (False, True):
        assert normalized_mse(empty, torch.zeros(0, 4), directions=directions).item() == 0.0


@pytest.mark.parametrize("mask", [True, False])
def test_one_number_may_be_masked(mask):
    prediction = torch.tensor(1.0, requires_grad=True)
    assert normalized_mse(prediction, torch.tensor(2.0), torch.tensor(mask)).item() == (0.25 if mask else 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 6e4])
def test_directions_cost_two_less_two_cosines(dtype, scale):
    target = torch.randn(4, 6, 3).to(dtype)
    prediction = (scale * torch.randn(4, 6, 3)).clamp(-EDGE, EDGE).to(dtype).requires_grad_()
    mask = torch.rand(4, 6) > 0.3
    wide = prediction.detach().double().requires_grad_()
    expected = (2 - 2 * F.cosine_similarity(wide, target.double(), dim=-1))[mask].mean()
    loss = normalized_mse(prediction, target, mask, directions=True)
    assert_near(loss, expected)
    assert_near(gradient(loss, prediction), gradient(expected, wide), dtype)


def test_directions_are_those_of_any_length():
    prediction, target = torch.randn(5, 4), torch.randn(5, 4)
    once = normalized_mse(prediction, target, directions=True)
    for ours, theirs in ((1e30, 1.0), (1.0, 1e-6), (1e30, 1e30)):
        torch.testing.assert_close(normalized_mse(ours * prediction, theirs * target, directions=True), once)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_vector_without_direction_keeps_a_small_gradient(bad):
    prediction = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1e-9, 0.0]], requires_grad=True)
    loss = normalized_mse(prediction, torch.tensor([[0.0, 2.0], [6.0, 8.0], [0.0, 5.0]]), directions=True)
    assert loss.item() == pytest.approx(2 / 3)
    assert gradient(loss, prediction).abs().max() <= 1
    sick = torch.tensor([[bad, 1.0], [3.0, 4.0]], requires_grad=True)
    assert normalized_mse(sick, torch.ones(2, 2), directions=True).isnan()
    loss = normalized_mse(sick, torch.ones(2, 2), torch.tensor([0, 1]), directions=True)
    assert loss.isfinite()
    assert gradient(loss, sick).isfinite().all()


# ---- bounds ----


@SETTINGS
@given(st.floats(-(2.0**100), 2.0**127, width=32), st.sampled_from([0.5, 6.0, 100.0]))
def test_a_bounded_loss_keeps_a_gradient(value, bound):
    loss = torch.tensor(value, requires_grad=True)
    bounded = bounded_loss(loss, bound)
    slope = gradient(bounded, loss).item()
    if value <= bound:
        assert (bounded.item(), slope) == (loss.item(), 1.0)
    else:
        assert bounded.item() == pytest.approx(bound * (1 + math.log(value) - math.log(bound)), rel=1e-5)
        assert bounded.item() < 100 * max(bound, 1.0)
        assert 0 < slope <= 1
        assert slope == pytest.approx(bound / value, rel=1e-5, abs=1e-44)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bounded_loss_is_monotone_and_has_no_corner(dtype):
    losses = torch.tensor([0.0, 1.0, 5.0, 6.0, 7.0, 50.0, 1e3, 6e4]).to(dtype)
    bounded = bounded_loss(losses, 6.0)
    assert bounded.dtype == dtype
    assert torch.equal(bounded[:4], losses[:4])
    assert (bounded.diff() > 0).all()
    near = torch.tensor([6.0, 6.0 + 1e-5], requires_grad=True)
    assert gradient(bounded_loss(near, 6.0).sum(), near).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bound_hides_nothing(value):
    bounded = bounded_loss(torch.tensor(value), 6.0)
    assert bounded.isnan() if math.isnan(value) else bounded.item() == value


def test_weights_are_clamped_from_above():
    weights = torch.tensor([0.0, 1.5, 100.0, 101.0, 1e30, INF, -2.0])
    assert clamp_weight(weights).tolist() == [0.0, 1.5, 100.0, 100.0, 100.0, 100.0, -2.0]
    assert clamp_weight(weights.half(), max=5.0).tolist() == [0.0, 1.5, 5.0, 5.0, 5.0, 5.0, -2.0]
    assert clamp_weight(torch.tensor(NAN)).isnan()


@SETTINGS
@given(st.lists(st.floats(-EDGE, EDGE, width=16), min_size=2, max_size=8), st.sampled_from(DTYPES))
def test_a_soft_cap_bounds_keeps_order_and_slope(values, dtype):
    logits = torch.tensor(sorted(values)).to(dtype).requires_grad_()
    capped = soft_cap(logits, 30.0)
    wide = logits.detach().double()
    assert capped.dtype == dtype
    assert (capped.abs() <= 30).all()
    assert (capped.diff() >= 0).all()
    assert_near(capped, 30 * torch.tanh(wide / 30), dtype)
    assert_near(gradient(capped.sum(), logits), 1 / torch.cosh(wide / 30).square(), dtype)


def test_a_soft_cap_keeps_the_gradient_that_a_clamp_kills():
    logits = torch.tensor([-600.0, -40.0, 7.0, 40.0, 600.0], requires_grad=True)
    assert (gradient(soft_cap(logits, 30.0).sum(), logits) > 0).all()
    assert gradient(logits.clamp(-5, 5).sum(), logits).tolist() == [0.0] * 5
    distinct = soft_cap(torch.linspace(-150, 150, 60), 30.0)
    assert (distinct.diff() > 0).all()


def test_a_soft_cap_leaves_masks_and_faults():
    logits = torch.tensor([-INF, NAN, INF, 0.0], requires_grad=True)
    capped = soft_cap(logits, 5.0)
    assert capped[0] == -INF
    assert capped[1].isnan()
    assert capped[2] == INF
    assert gradient(capped[3] + capped[0], logits).tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_an_epsilon_is_not_zero_in_its_dtype(dtype):
    for wanted in (1e-8, 1e-3):
        eps = torch.tensor(dtype_eps(dtype, wanted), dtype=dtype)
        assert eps >= torch.finfo(dtype).tiny
        assert (1 / eps).isfinite()
        assert eps.item() == pytest.approx(max(wanted, 2.0**-14 if dtype == torch.float16 else 0.0), rel=1e-2)
    assert torch.tensor(1e-8, dtype=torch.float16) == 0, "this is why"


# ---- wrong arguments ----


@pytest.mark.parametrize(("call", "words"), [
    (lambda: masked_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 2).long()), "labels must have the shape"),
    (lambda: masked_cross_entropy(torch.zeros(2, 4), torch.zeros(2).long(), chunk_size=0), "chunk_size must be"),
    (lambda: distillation_loss(torch.zeros(2, 4), torch.zeros(2, 5)), "the same shape"),
    (lambda: distillation_loss(torch.zeros(2, 4), torch.zeros(2, 4), mask=torch.ones(3)), "mask must have"),
    (lambda: distillation_loss(torch.zeros(2, 4), torch.zeros(2, 4), temperature=0.0), "temperature must be"),
    (lambda: normalized_mse(torch.zeros(2), torch.zeros(3)), "the same shape"),
    (lambda: normalized_mse(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3)), "mask must have"),
    (lambda: bounded_loss(torch.zeros(()), 0.0), "bound must be positive"),
    (lambda: clamp_weight(torch.zeros(()), INF), "max must be positive"),
    (lambda: soft_cap(torch.zeros(()), -1.0), "cap must be positive"),
])  # fmt: skip
def test_wrong_arguments_are_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
