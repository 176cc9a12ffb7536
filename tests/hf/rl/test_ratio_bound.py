"""Log-ratios and KL gaps beyond the bound cost their own position's gradient and nothing else; in range nothing changes."""

import itertools
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from hf_nanguard.core.finite import read_host
from hf_nanguard.core.journal import Journal
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.core.rerun.micro_batch import AccumulationGroup
from hf_nanguard.hf.rl.ratio_bound import RatioBound
from hf_nanguard.hf.rl.ratio_overflow import RatioOverflow
from hf_nanguard.testing import OperationCounter

from ...models import text_rows, tiny_llama, tiny_tokenizer
from ...reference import tensors_of
from ...trainers import build, common_arguments, reward_length

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
WEIGHTED = ("cispo", "vespo")  # a detached weight times the log-prob: finite in stock, too
LEVELS = ("token", "sequence")
INF, NAN = math.inf, math.nan
ACTIVE, PADDED, TOOL = (1, 2), (1, 5), (1, 1)  # row 1 has five tokens, of which the second is a tool's


class Bounding:
    """What the guarded trainers do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ratio_bound = make_bound()

    def _compute_loss(self, model, inputs):
        with self.ratio_bound.around_loss(inputs) as bounded:
            return super()._compute_loss(model, bounded)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return self.ratio_bound.on_log_probs(super()._get_per_token_logps_and_entropies(*args, **kwargs))


class Leaf:
    """A trainer whose policy's log-probs are given, so that the gradient of each position can be seen."""

    leaf = None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if self.leaf is None:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.modes = torch._C._len_torch_function_stack()
        return self.leaf * 1.0, self.entropies * 1.0, None


class Stock(Leaf, GRPOTrainer):
    pass


class Bounded(Bounding, Stock):
    pass


@pytest.fixture
def pair(built):
    built[1].ratio_bound = make_bound()
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ratio")
    trainers = [build("grpo", folder, cls, guard=False) for cls in (Stock, Bounded)]
    for trainer in trainers:
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
    return trainers


def set_up(trainer, loss="grpo", level="token", beta=0.0, bias=False, delta=None, off_policy=None, quantile=1.0):
    trainer.loss_type, trainer.importance_sampling_level, trainer.beta = loss, level, beta
    trainer.args.use_bias_correction_kl, trainer.args.delta = bias, delta
    trainer.off_policy_mask_threshold, trainer.top_entropy_quantile = off_policy, quantile
    trainer.epsilon_high = 5.0 if loss == "cispo" else 0.2


def make_inputs(spread=6.0, tool=True, old=True, sign=None):
    """Log-probs and inputs for four completions of six tokens, with log-ratios and gaps of every size in range."""
    torch.manual_seed(5)
    policy = -torch.rand(4, 6) * 12
    log_ratio, gap = ((torch.randn(4, 6) * spread).clamp(-19.9, 19.9) for _ in range(2))
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 5:], mask[2, 3:] = 0, 0
    ids = torch.ones(4, 6, dtype=torch.long)
    advantages = torch.tensor([1.0, -1.5, 0.7, -0.2]) if sign is None else sign * torch.tensor([1.0, 1.5, 0.7, 0.2])
    inputs = {"prompt_ids": ids[:, :2], "prompt_mask": ids[:, :2], "completion_ids": ids, "completion_mask": mask,
              "advantages": advantages, "num_items_in_batch": mask.sum(), "ref_per_token_logps": policy + gap}  # fmt: skip
    if tool:
        inputs["tool_mask"] = torch.ones_like(mask)
        inputs["tool_mask"][TOOL] = 0
    if old:
        inputs["old_per_token_logps"] = policy - log_ratio
    return policy, inputs


def run(trainer, policy, inputs, entropies=None):
    """Returns the loss, its gradient at every position, and the metrics."""
    trainer.leaf = policy.clone().requires_grad_()
    trainer.entropies = torch.linspace(0.1, 3.0, 24).view(4, 6) if entropies is None else entropies
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert trainer.modes == 0  # the model's forward runs as in stock
    return loss.detach(), trainer.leaf.grad, dict(trainer._metrics["train"])


def replaced(inputs, name, place, value):
    tensor = inputs[name].clone()
    tensor[place] = value
    return {**inputs, name: tensor}


def with_ratio(policy, inputs, value, place=ACTIVE):
    return replaced(inputs, "old_per_token_logps", place, policy[place] - value)


def with_gap(policy, inputs, value, place=ACTIVE):
    return replaced(inputs, "ref_per_token_logps", place, policy[place] + value)


def make_bound(bound=20.0):
    journal = Journal(Ranks())
    return RatioBound(bound, RatioOverflow(journal), journal.boundary)


def read_counts(bound):
    """Returns how many values of each term were bounded since the last call, read as at the end of a step."""
    group = AccumulationGroup(None)
    bound.overflow.add_readings(group, 0)
    group.take_notes(read_host(group.notes))
    return bound.overflow.take_counts()


def num_bounded(bound):
    """Returns how many values were bounded since the last call, `None` if there was nothing to bound."""
    counts = read_counts(bound)
    return sum(counts.values()) if counts else None


def others(gradient, place=ACTIVE):
    gradient = gradient.clone()
    gradient[place] = 0
    return gradient


def is_finite(result):
    metrics = itertools.chain.from_iterable(result[2].values())
    return all(map(math.isfinite, metrics)) and bool(result[0].isfinite() & result[1].isfinite().all())


def assert_same(ours, theirs):
    """Loss, gradients and metrics are bit-identical."""
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert ours[2] == theirs[2]


# ---- in range ----


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_in_range_every_loss_is_bit_identical(loss, level, pair):
    kls, masks = ((0.0, False), (0.1, False), (0.1, True)), ((None, 1.0), (None, 0.4), (0.5, 1.0), (0.5, 0.4))
    deltas = (None,) if loss in ("cispo", "sapo", "vespo") else (None, 3.0)  # the others do not use it
    flags = itertools.product(kls, deltas, masks, (False, True), (False, True))
    for (beta, bias), delta, (off_policy, quantile), tool, old in flags:
        policy, inputs = make_inputs(tool=tool, old=old)
        for trainer in pair:
            set_up(trainer, loss, level, beta, bias, delta, off_policy, quantile)
        stock, bounded = (run(trainer, policy, inputs) for trainer in pair)
        assert_same(bounded, stock)
        assert num_bounded(pair[1].ratio_bound) == 0.0


def make_run(kind, cls, folder, **overrides):
    if kind == "grpo":
        return build("grpo", folder, cls, guard=False, max_steps=3, **overrides)
    dataset = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(48)])
    config = {"rloo": RLOOConfig, "gmpo": GMPOConfig}[kind]
    arguments = {**common_arguments(folder, max_steps=3), "num_generations": 2, "max_completion_length": 4}
    lora = overrides.pop("lora", False)
    args = config(**arguments, **overrides)
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"])) if lora else tiny_llama()
    return cls(model, reward_length, args=args, train_dataset=dataset, processing_class=tiny_tokenizer())


def subclass(kind):
    host = {"grpo": GRPOTrainer, "rloo": RLOOTrainer, "gmpo": GMPOTrainer}[kind]
    return host, type("Bounded", (Bounding, host), {})


RUNS = {
    "default": ("grpo", {}),
    "lora, kl, old": ("grpo", {"lora": True, "beta": 0.1, "num_iterations": 2, "use_bias_correction_kl": True}),
    "bf16, checkpointing, sequence": (
        "grpo",
        {"bf16": True, "gradient_checkpointing": True, "importance_sampling_level": "sequence", "steps_per_generation": 6},
    ),
    "rloo": ("rloo", {"num_iterations": 2, "beta": 0.0}),
    "gmpo": ("gmpo", {"beta": 0.1, "num_iterations": 2, "lora": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_is_bit_identical(name, tmp_path):
    kind, overrides = RUNS[name]
    tensors, rows = [], []
    for cls in subclass(kind):
        trainer = make_run(kind, cls, tmp_path, **overrides)
        trainer.train()
        tensors.append(tensors_of(trainer))
        timed = ("runtime", "per_second", "step_time")
        rows.append([{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history])
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4
    assert num_bounded(trainer.ratio_bound) == (None if name == "default" else 0.0)  # on policy there is no ratio


# ---- beyond ----


@pytest.mark.parametrize("place", [ACTIVE, TOOL])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "sapo"])
def test_stock_breaks(loss, place, pair):
    """What this module is for; once TRL bounds by itself it can go."""
    policy, inputs = make_inputs(sign=1)
    set_up(pair[0], loss)
    stock = run(pair[0], policy, with_ratio(policy, inputs, 200.0, place))
    assert stock[0].isfinite() or place == TOOL
    assert stock[1].isnan().sum() == 1


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", [200.0, -200.0, INF, -INF, 20.5, -20.5])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_token_ratio_beyond_costs_only_its_own_gradient(loss, value, sign, pair):
    policy, inputs = make_inputs(spread=0.5, sign=sign)
    for trainer in pair:
        set_up(trainer, loss)
    planted = with_ratio(policy, inputs, value)
    bounded = run(pair[1], policy, planted)
    assert is_finite(bounded)
    assert read_counts(pair[1].ratio_bound) == {"ratio": 1}
    own = bounded[1][ACTIVE].item()
    if loss in WEIGHTED:
        torch.testing.assert_close(bounded[1], run(pair[0], policy, planted)[1], rtol=1e-6, atol=1e-8)
    else:
        healthy = run(pair[0], policy, with_ratio(policy, inputs, 0.0))[1]
        assert torch.equal(others(bounded[1]), others(healthy))
        assert own == 0 if value > 0 else (own * sign <= 0 and abs(own) < 1e-8)


@pytest.mark.parametrize("place", [PADDED, TOOL])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_masked_does_not_matter(loss, level, place, pair):
    for trainer in pair:
        set_up(trainer, loss, level, beta=0.1, bias=True)
    for sign in (1, -1):
        policy, inputs = make_inputs(spread=0.5, sign=sign)
        benign = with_gap(policy, with_ratio(policy, inputs, 0.0, place), 0.0, place)
        healthy = run(pair[0], policy, benign)
        for value in (200.0, -200.0, INF, -INF, NAN):
            planted = with_gap(policy, with_ratio(policy, inputs, value, place), -value, place)
            assert_same(run(pair[1], policy, planted), healthy)
            nonfinite, entropies = policy.clone(), torch.linspace(0.1, 3.0, 24).view(4, 6)
            nonfinite[place], entropies[place] = value, value
            assert_same(run(pair[1], nonfinite, benign, entropies), healthy)
    assert num_bounded(pair[1].ratio_bound) == 0.0


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", [200.0, -200.0, INF, -INF])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_sequence_is_bounded_by_its_mean(loss, value, sign, pair):
    policy, inputs = make_inputs(spread=0.5, sign=sign)
    for trainer in pair:
        set_up(trainer, loss, "sequence")
    planted = with_ratio(policy, inputs, value)  # a mean of about 50 over four active tokens
    bounded = run(pair[1], policy, planted)
    assert is_finite(bounded)
    assert read_counts(pair[1].ratio_bound) == {"ratio": 1}
    row = ACTIVE[0]
    if loss in WEIGHTED:
        torch.testing.assert_close(bounded[1], run(pair[0], policy, planted)[1], rtol=1e-6, atol=1e-8)
    else:
        healthy = run(pair[0], policy, with_ratio(policy, inputs, 0.0))[1]
        assert torch.equal(others(bounded[1], row), others(healthy, row))
        own = bounded[1][row]
        assert (own == 0).all() if value > 0 else ((own * sign <= 0) & (own.abs() < 1e-8)).all()


def test_a_token_beyond_in_a_sequence_in_range_is_left_alone(pair):
    policy, inputs = make_inputs(spread=0.5)
    for trainer in pair:
        set_up(trainer, "grpo", "sequence")
    planted = with_ratio(policy, inputs, 40.0)
    stock, bounded = (run(trainer, policy, planted) for trainer in pair)
    assert_same(bounded, stock)
    assert stock[1][ACTIVE] != 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("value", [200.0, INF, 20.5])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_gap_above_the_bound_has_no_gradient(loss, level, value, bias, pair):
    policy, inputs = make_inputs(spread=0.5)
    for trainer in pair:
        set_up(trainer, loss, level, beta=0.1, bias=bias)
    bounded = run(pair[1], policy, with_gap(policy, inputs, value))
    assert is_finite(bounded)
    assert read_counts(pair[1].ratio_bound) == {"ratio": 0, "kl": 1}
    healthy = run(pair[0], policy, with_gap(policy, inputs, 0.0))[1]  # no gap, no KL, and no gradient of it
    torch.testing.assert_close(bounded[1], healthy, rtol=1e-6, atol=1e-9)
    if not (bias and level == "sequence"):  # there the KL of a token moves its whole sequence
        assert torch.equal(others(bounded[1]), others(healthy))
    kl = policy.double() * 0 + (inputs["ref_per_token_logps"] - policy).double()
    kl[ACTIVE] = 20.0
    kl = kl.exp() - kl - 1
    if bias:
        log_ratio = (policy - inputs["old_per_token_logps"]).double()
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        mean = ((log_ratio * mask).sum(-1) / mask.sum(-1)).unsqueeze(1)
        kl = kl * (log_ratio if level == "token" else mean).exp()
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    assert bounded[2]["kl"] == [pytest.approx(((kl * mask).sum() / mask.sum()).item(), rel=1e-5)]


@pytest.mark.parametrize("value", [-20.5, -200.0, -INF])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_gap_below_the_bound_keeps_its_pull(loss, value, pair):
    policy, inputs = make_inputs(spread=0.5)
    for trainer in pair:
        set_up(trainer, loss, beta=0.1)
    bounded = run(pair[1], policy, with_gap(policy, inputs, value))
    assert is_finite(bounded)
    stock = run(pair[0], policy, with_gap(policy, inputs, max(value, -1000.0)))  # finite there
    torch.testing.assert_close(bounded[1], stock[1], rtol=1e-6, atol=0)
    assert torch.equal(others(bounded[1]), others(stock[1]))


def test_no_pull_of_the_kl_is_multiplied_by_a_bounded_ratio(pair):
    policy, inputs = make_inputs(spread=0.5, sign=-1)
    set_up(pair[1], beta=0.1, bias=True)
    bounded = run(pair[1], policy, with_gap(policy, with_ratio(policy, inputs, 200.0), 1.0))
    assert is_finite(bounded)
    assert bounded[1][ACTIVE] == 0
    assert read_counts(pair[1].ratio_bound) == {"ratio": 1, "kl": 0}


def test_a_nonfinite_policy_is_not_hidden(pair):
    policy, inputs = make_inputs(spread=0.5)
    policy[ACTIVE] = NAN
    set_up(pair[1], beta=0.1)
    bounded = run(pair[1], policy, inputs)
    assert bounded[0].isnan()
    assert num_bounded(pair[1].ratio_bound) == 0.0


def test_off_policy_and_entropy_masks_take_it(pair):
    policy, inputs = make_inputs(spread=0.5, sign=-1)
    set_up(pair[1], beta=0.1, delta=3.0, off_policy=0.5, quantile=0.4)
    for value in (200.0, -200.0, INF, -INF):
        assert is_finite(run(pair[1], policy, with_ratio(policy, inputs, value)))


@pytest.mark.parametrize("kind", ["rloo", "gmpo"])
def test_other_trainers(kind, tmp_path):
    host = {"rloo": RLOOTrainer, "gmpo": GMPOTrainer}[kind]
    stock, bounded = (
        make_run(kind, type(host.__name__, bases, {}), tmp_path, beta=0.0) for bases in ((Leaf, host), (Bounding, Leaf, host))
    )  # fmt: skip
    for trainer in (stock, bounded):
        trainer.current_gradient_accumulation_steps = 1
    policy, inputs = make_inputs(spread=0.5, tool=False, sign=-1)
    inputs["old_logps"] = (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)
    place = ACTIVE if kind == "gmpo" else 1
    name = "old_per_token_logps" if kind == "gmpo" else "old_logps"
    healthy = run(stock, policy, inputs)[1]
    for trainer in (stock, bounded):
        result = run(trainer, policy, replaced(inputs, name, place, -1e4))
        assert is_finite(result) == (trainer is bounded)
    assert torch.equal(others(result[1], 1), others(healthy, 1))
    assert read_counts(bounded.ratio_bound)["ratio"] == 1
    if kind == "rloo":
        assert (result[1][1] == 0).all()


class Overflowing:
    """Plants a log-ratio of 200 at the first token of every batch of the second step."""

    def _compute_loss(self, model, inputs):
        if self.state.global_step == 1:
            inputs = {**inputs, "advantages": inputs["advantages"].abs() + 1}
            inputs = replaced(inputs, "old_per_token_logps", (0, 0), inputs["old_per_token_logps"][0, 0] - 200.0)
        return super()._compute_loss(model, inputs)


def test_a_run_survives(tmp_path):
    stock, bounded = (type("T", (Overflowing, cls), {}) for cls in subclass("grpo"))
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        make_run("grpo", stock, tmp_path, num_iterations=2).train()
    trainer = make_run("grpo", bounded, tmp_path, num_iterations=2)
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert read_counts(trainer.ratio_bound) == {"ratio": 3}


def test_evaluation_is_bounded_too(pair):
    policy, inputs = make_inputs(spread=0.5, sign=-1)
    inputs = with_gap(policy, with_ratio(policy, inputs, 200.0), 200.0)
    losses = []
    for trainer in pair:
        set_up(trainer, beta=0.1)
        trainer.leaf, trainer.entropies = policy, policy
        trainer.model.eval()
        with torch.no_grad():
            losses.append(trainer._compute_loss(trainer.model, inputs))
        trainer.model.train()
    assert not losses[0].isfinite()
    assert losses[1].isfinite()


# ---- manners ----


@pytest.mark.parametrize(("beta", "bias", "old", "most"), [
    (0.0, False, False, 0), (0.0, False, True, 14), (0.1, False, True, 26), (0.1, True, True, 30),
])  # fmt: skip
def test_it_reads_nothing_and_costs_what_it_says(beta, bias, old, most, pair):
    policy, inputs = make_inputs(spread=0.5, tool=False, old=old)
    inputs = inputs if beta else {k: v for k, v in inputs.items() if k != "ref_per_token_logps"}
    counts = []
    for trainer in pair:
        set_up(trainer, beta=beta, bias=bias)
        run(trainer, policy, inputs)
        with OperationCounter() as count:
            run(trainer, policy, inputs)
        counts.append(count)
    assert counts[1].num_reads == counts[0].num_reads
    extra = {op: n - counts[0].op_counts[op] for op, n in counts[1].op_counts.items() if n != counts[0].op_counts[op]}
    free = sum(extra.get(f"aten.{op}.default", 0) for op in ("detach", "view", "alias"))
    assert min(most, 1) <= counts[1].num_ops - counts[0].num_ops - free <= most, extra
    with OperationCounter() as count:
        assert num_bounded(pair[1].ratio_bound) == (0.0 if old else None)
    assert count.num_reads == (1 if old else 0)


def test_held_inputs_are_left_alone_and_can_be_run_again(pair):
    policy, inputs = make_inputs(spread=0.5)
    inputs = with_gap(policy, with_ratio(policy, inputs, NAN, PADDED), 200.0)
    held, versions = dict(inputs), [value._version for value in inputs.values()]
    set_up(pair[1], beta=0.1)
    first, again = (run(pair[1], policy, inputs) for _ in range(2))
    assert_same(again, first)
    assert held.keys() == inputs.keys()
    assert all(held[name] is inputs[name] for name in held)
    assert versions == [value._version for value in inputs.values()]
    assert read_counts(pair[1].ratio_bound) == {"ratio": 0, "kl": 2}


def test_counts_can_be_held_back_and_are_taken_once(pair):
    bound = make_bound()
    assert num_bounded(bound) is None
    policy, inputs = make_inputs(spread=0.5)
    inputs = with_ratio(policy, with_ratio(policy, inputs, 200.0), -30.0, (0, 0))
    set_up(pair[0])
    for counted in (False, True):
        with bound.around_loss(inputs, counted=counted) as bounded:
            pair[0].leaf, pair[0].entropies = policy, policy
            show = pair[0]._get_per_token_logps_and_entropies
            pair[0]._get_per_token_logps_and_entropies = lambda *a, show=show, **k: bound.on_log_probs(show(*a, **k))
            pair[0]._compute_loss(pair[0].model, bounded)
            del pair[0]._get_per_token_logps_and_entropies
    assert num_bounded(bound) == 2.0
    assert num_bounded(bound) is None


def test_an_error_in_the_loss_leaves_nothing_behind(pair):
    policy, inputs = make_inputs()
    set_up(pair[1], loss="unknown")
    with pytest.raises(ValueError, match="Unknown loss type"):
        run(pair[1], policy, inputs)
    assert torch._C._len_torch_function_stack() == 0
    result = (policy, None, None)
    assert pair[1].ratio_bound.on_log_probs(result) is result  # scoring completions, outside of a loss


def test_the_bound_is_a_setting(pair):
    policy, inputs = make_inputs(spread=0.5, sign=-1)
    set_up(pair[1])
    pair[1].ratio_bound = make_bound(3.0)
    assert run(pair[1], policy, with_ratio(policy, inputs, 3.5))[1][ACTIVE] == 0
    assert num_bounded(pair[1].ratio_bound) == 1.0
