"""L7: a healthy step adds no host read over the stock trainer, hardly an operation, and no pass over the parameters."""

import pytest
import torch

from hf_nanguard import GradientMonitorCallback, GuardArguments

from ..trainers import KINDS, build
from .ways import WAYS, CountSteps, build_guarded


def _count(kind, tmp_path, guard, callbacks=(), extra=None, **overrides):
    counter = CountSteps()
    settings = {"max_steps": 5, "logging_steps": 100, **overrides}
    extra = {**(extra or {}), "callbacks": [*callbacks, counter]}
    trainer = build(kind, tmp_path, guard=guard, extra=extra, **settings)
    trainer.train()
    return counter.count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_no_more_host_reads_than_stock(kind, accumulation, tmp_path):
    settings = {"gradient_accumulation_steps": accumulation}
    stock = _count(kind, tmp_path / "stock", False, **settings)
    ours = _count(kind, tmp_path / "guarded", True, **settings)
    assert stock.num_reads > 0
    assert ours.num_reads <= stock.num_reads
    sampled = 4 if kind == "grpo" else 0  # tokens a completion: one reduction each, besides the bound on a step
    assert ours.num_ops <= stock.num_ops + 2 * (8 + sampled)


@pytest.mark.parametrize("policy", [{"num_iterations": 2}, {"num_iterations": 2, "beta": 0.1, "lora": True}])
def test_bounding_log_ratios_adds_no_host_read(policy, tmp_path):
    """Off policy and with log rows, where counts are read and evidence is held."""
    settings = {"logging_steps": 1, "gradient_accumulation_steps": 2, **policy}
    stock = _count("grpo", tmp_path / "stock", False, **settings)
    free, bounded = (
        _count("grpo", tmp_path / name, True, extra={"guard": GuardArguments(nanguard_ratio_bound=bound)}, **settings)
        for name, bound in (("free", None), ("bounded", 20.0))
    )
    assert bounded.reads == free.reads
    assert free.num_reads <= stock.num_reads
    assert bounded.num_ops > free.num_ops


@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_read_a_step_replaces_the_two_reads_a_micro_batch(accumulation, tmp_path):
    settings = {"gradient_accumulation_steps": accumulation}
    stock = _count("plain", tmp_path / "stock", False, **settings)
    ours = _count("plain", tmp_path / "guarded", True, **settings)
    assert stock.num_reads - ours.num_reads == 2 * (2 * accumulation - 1)


@pytest.mark.parametrize("overrides", [{}, {"max_grad_norm": 0.0}, {"lora": True}])
def test_no_pass_over_gradients_or_parameters_is_added(overrides, tmp_path):
    stock = _count("plain", tmp_path / "stock", False, **overrides)
    ours = _count("plain", tmp_path / "guarded", True, **overrides)
    passes = [op for op in stock.op_counts.keys() | ours.op_counts.keys() if "foreach" in op or "norm" in op]
    assert passes
    for op in passes:
        assert ours.op_counts[op] <= stock.op_counts[op], op


PERIODS = ("activation_steps", "attention_steps", "weight_check_steps")


@pytest.mark.parametrize("kind", KINDS)
def test_a_monitor_that_is_not_due_costs_nothing(kind, tmp_path):
    """The steps that are counted lie between those at which monitors look."""
    off = GuardArguments(**{f"nanguard_{name}": 0 for name in PERIODS})
    on = GuardArguments(**{f"nanguard_{name}": 5 for name in PERIODS})
    without, between = (
        _count(kind, tmp_path / name, True, extra={"guard": guard}) for name, guard in (("off", off), ("on", on))
    )
    assert between.op_counts == without.op_counts
    assert between.num_reads == without.num_reads


@pytest.mark.parametrize(
    ("name", "reads"), [("activation_steps", 1), ("attention_steps", 1), ("weight_check_steps", 2)]
)
def test_a_look_is_one_read(name, reads, tmp_path):
    """Weights are looked at twice: whether they are finite and whether they move."""
    guards = [GuardArguments(**{f"nanguard_{n}": period * (n == name) for n in PERIODS}) for period in (0, 1)]
    without, with_look = (
        _count("plain", tmp_path / str(i), True, extra={"guard": guard}) for i, guard in enumerate(guards)
    )
    assert with_look.num_reads - without.num_reads == 2 * reads  # two steps are counted


def test_off_is_stock(tmp_path):
    stock = _count("plain", tmp_path / "stock", False)
    counter = CountSteps()
    trainer = build(
        "plain", tmp_path / "off", max_steps=5, logging_steps=100,
        extra={"callbacks": [counter], "guard": GuardArguments(nanguard_mode="off")},
    )  # fmt: skip
    trainer.train()
    assert counter.count.op_counts == stock.op_counts


def test_a_gradient_monitor_costs_two_fused_reductions_and_one_read(tmp_path):
    stock = _count("plain", tmp_path / "stock", False)
    watched = _count("plain", tmp_path / "watched", False, callbacks=[GradientMonitorCallback()])
    assert watched.num_reads - stock.num_reads <= 2
    assert watched.num_ops - stock.num_ops <= 2 * 8
    foreach = "aten._foreach_norm.Scalar"
    assert watched.op_counts[foreach] - stock.op_counts[foreach] == 2 * 2


def test_a_model_is_not_copied(tmp_path):
    """Inputs are held by reference: no clone or copy grows with the batch or the model."""
    stock = _count("plain", tmp_path / "stock", False, gradient_accumulation_steps=4)
    ours = _count("plain", tmp_path / "guarded", True, gradient_accumulation_steps=4)
    clones = [op for op in ours.op_counts if "clone" in op or "copy" in op]
    assert sum(ours.op_counts[op] - stock.op_counts[op] for op in clones) <= 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("way", WAYS)
def test_the_console_of_a_healthy_run_has_at_most_two_more_keys_and_one_more_line(way, tmp_path, capfd, caplog):
    shown = []
    for folder in ("stock", "guarded"):
        settings = {"max_steps": 4, "logging_steps": 1}
        caplog.clear()
        trainer = (
            build("plain", tmp_path / folder, guard=False, **settings)
            if folder == "stock"
            else build_guarded(way, "plain", tmp_path / folder, **settings)
        )
        trainer.train()
        printed = capfd.readouterr()
        lines = [*printed.out.splitlines(), *printed.err.splitlines(), *caplog.messages]
        shown.append((trainer.state.log_history, lines))
    (stock_rows, stock_lines), (rows, lines) = shown
    assert len(rows) == len(stock_rows) == 5
    assert all(len(row.keys() - stock.keys()) <= 2 for row, stock in zip(rows, stock_rows, strict=True))
    assert len(stock_lines) >= 5
    assert len(lines) <= len(stock_lines) + 1
