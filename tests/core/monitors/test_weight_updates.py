"""Weights that do not move: rounding, a learning rate of zero and missing gradients are told apart; healthy runs are not."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.update_sample import SAMPLE, read_sample, take_sample
from hf_nanguard.core.monitors.weight_updates import UpdateMonitor
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.testing import INF, OperationCounter

BF16 = torch.bfloat16
OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=True),
    "loop": lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False),
    "fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "tensor": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), foreach=False),
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr),
}


class Net(nn.Module):
    """An embedding, two layers and a tower that takes no part in the loss."""

    def __init__(self, dtype: torch.dtype = torch.float32, tower: bool = False):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.first = nn.Linear(16, 32)
        self.last = nn.Linear(32, 40)
        if tower:
            self.tower = nn.Linear(3, 3)
            self.dead = nn.Parameter(torch.ones(4))
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.last(torch.tanh(self.first(self.table(ids)))).float(), (ids + 1) % 40)
        return loss + 0.0 * self.dead.float().sum() if "dead" in self._parameters else loss


def batches(num_steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(num_steps):
        yield torch.randint(20, (8,), generator=generator)  # half of the table is never used


def train(
    model: nn.Module, optimizer: Any, num_steps: int, monitor: UpdateMonitor | None = None, scheduler: Any = None
) -> list[dict[str, float]]:
    """The loop anybody would write; returns the rows of its log."""
    rows = []
    for step, ids in enumerate(batches(num_steps)):
        optimizer.zero_grad()
        model(ids).backward()
        if monitor is not None:
            monitor.before_update(step)
        optimizer.step()
        if monitor is not None:
            assert monitor.after_update(step) is None
            rows.append(monitor.metrics())
        if scheduler is not None:
            scheduler.step()
    return rows


def make(
    name: str = "adamw", dtype: torch.dtype = BF16, lr: float = 1e-3, tower: bool = False, **settings: Any
) -> tuple[Net, Any, UpdateMonitor, list[dict]]:
    torch.manual_seed(0)
    model = Net(dtype, tower)
    optimizer = OPTIMIZERS[name](model.parameters(), lr)
    events: list[dict] = []
    ranks = Ranks(alone=True)
    settings = {"every_n_steps": 1, **settings}
    return (
        model,
        optimizer,
        UpdateMonitor(model, Journal(ranks, events.append), optimizer=optimizer, **settings),
        events,
    )


HEALTHY = [
    ("adamw", torch.float32, 1e-3), ("adamw", BF16, 1e-3), ("fused", BF16, 1e-3), ("sgd", BF16, 0.3),
    ("adafactor", BF16, 1e-2), ("sgd", torch.float32, 1e-2), ("adamw", torch.float32, 1e-12), ("tensor", BF16, 1e-3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "lr"), HEALTHY)
def test_healthy_runs_are_silent_and_bit_identical(name, dtype, lr):
    ends = []
    for guarded in (False, True):
        model, optimizer, monitor, events = make(name, dtype, lr, tower=True)
        train(model, optimizer, 200, monitor if guarded else None)
        assert events == []
        ends.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


ROUNDED = [
    ("adamw", BF16, 1e-8), ("adamw", BF16, 1e-6), ("loop", BF16, 1e-8), ("fused", BF16, 1e-6), ("tensor", BF16, 1e-6),
    ("sgd", BF16, 1e-5), ("fused", torch.float16, 1e-8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "lr"), ROUNDED)
def test_rounding_is_told_once_with_remedies_that_were_tried(name, dtype, lr):
    model, optimizer, monitor, events = make(name, dtype, lr)
    rows = train(model, optimizer, 12, monitor)
    assert max(row["nanguard/update_share"] for row in rows) < 0.01
    (event,) = events
    assert (event["signal"], event["action"], event["cause"]) == ("update_stalled", "observed", "rounding_stall")
    assert event["step"] == 0  # the first look
    assert event["values"]["learning_rate"] == pytest.approx(lr)
    assert event["values"]["dtype"] == str(dtype).removeprefix("torch.")
    assert event["values"]["idle_parameters"] == []
    remedies = {remedy["name"]: remedy for remedy in event["remedies"]}
    assert list(remedies) == ["float32_weights", "stochastic_rounding", "larger_lr"]
    assert all(remedy["tried"] and remedy["works"] for remedy in remedies.values())
    assert "learning rate" in event["message"]


@pytest.mark.parametrize("name", ["adamw", "fused", "sgd"])
def test_the_learning_rate_it_names_does_move_half_of_the_entries(name):
    model, optimizer, monitor, events = make(name, BF16, 1e-6)
    train(model, optimizer, 3, monitor)
    note = next(each["note"] for each in events[0]["remedies"] if each["name"] == "larger_lr")
    factor, promised = float(note.split(": ")[1].split(" times")[0]), float(note.split("moves ")[1].split("%")[0]) / 100
    assert 0.3 < promised < 0.7
    optimizer.param_groups[0]["lr"] *= factor
    (row,) = train(model, optimizer, 1, monitor)
    assert 0.25 < row["nanguard/update_share"] < 0.75


def test_what_float32_is_said_to_move_it_moves():
    model, optimizer, monitor, events = make("adamw", BF16, 1e-6)
    train(model, optimizer, 3, monitor)
    note = next(each["note"] for each in events[0]["remedies"] if each["name"] == "float32_weights")
    promised = float(note.split("moves ")[1].split("%")[0]) / 100
    model, optimizer, monitor, _ = make("adamw", torch.float32, 1e-6)
    assert train(model, optimizer, 3, monitor)[-1]["nanguard/update_share"] == pytest.approx(promised, abs=0.05)


def test_remedies_stay_untried_where_state_does_not_go_by_entries():
    model, optimizer, monitor, events = make("adafactor", BF16, 1e-8)
    train(model, optimizer, 5, monitor)
    (event,) = events
    assert event["cause"] == "rounding_stall"
    assert {each["name"] for each in event["remedies"]} == {"float32_weights", "stochastic_rounding", "larger_lr"}
    assert all((each["tried"], each["works"]) == (False, None) for each in event["remedies"])


def test_it_is_told_again_only_after_recovery():
    model, optimizer, monitor, events = make("adamw", BF16, 1e-8)
    train(model, optimizer, 10, monitor)
    assert len(events) == 1
    optimizer.param_groups[0]["lr"] = 1e-3
    train(model, optimizer, 2, monitor)
    optimizer.param_groups[0]["lr"] = 1e-8
    train(model, optimizer, 10, monitor)
    assert len(events) == 2


def test_a_checkpoint_keeps_what_was_reported():
    model, optimizer, monitor, events = make("adamw", BF16, 1e-8)
    train(model, optimizer, 2, monitor)
    assert len(events) == 1
    other = UpdateMonitor(model, monitor.journal, 1, optimizer=optimizer)
    other.load_state_dict(copy.deepcopy(monitor.state_dict()))
    assert other.state_dict() == monitor.state_dict()
    train(model, optimizer, 1, other)
    assert len(events) == 1


def test_an_optimizer_that_steps_now_and_then_is_not_judged():
    """Weights that did not change because no update was applied are not lost to rounding."""
    model, optimizer, monitor, events = make("adamw", BF16, 1e-2)
    apply, calls = optimizer.step, []
    optimizer.step = lambda: calls.append(1) or (apply() if len(calls) % 3 == 1 else None)
    rows = train(model, optimizer, 9, monitor)
    assert sum(row["nanguard/update_share"] == 0.0 for row in rows) == 6
    assert events == []


def test_warm_up_and_the_end_of_a_schedule_are_not_judged():
    """Almost all steps have a learning rate that bfloat16 swallows, by design."""
    model, optimizer, monitor, events = make("adamw", BF16, 1e-3)

    def schedule(step: int) -> float:
        return 1e-5 * step / 20 if step < 20 else 1.0 if step < 24 else 1e-5

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    rows = train(model, optimizer, 60, monitor, scheduler)
    assert sum(row["nanguard/update_share"] < 0.01 for row in rows) > 40
    assert events == []


def test_a_stall_is_reported_at_the_first_look_at_half_the_learning_rate():
    model, optimizer, monitor, events = make("adamw", BF16, 1e-7)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    train(model, optimizer, 9, monitor, scheduler)
    (event,) = events
    assert (event["signal"], event["step"], event["cause"]) == ("update_stalled", 5, "rounding_stall")


def test_the_warm_up_of_a_cycle_is_not_judged():
    """`initial_lr` of OneCycleLR is where its warm-up begins, not what it leads to."""
    model, optimizer, monitor, events = make("adamw", BF16, 1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=20, div_factor=1e5)
    rows = train(model, optimizer, 10, monitor, scheduler)
    assert rows[0]["nanguard/update_share"] < 0.01 < rows[-1]["nanguard/update_share"]
    assert events == []


@pytest.mark.parametrize("rate", [1e-8, 1e-3])
def test_weights_with_a_learning_rate_of_their_own_are_judged_on_their_own(rate):
    model, _, monitor, events = make("adamw", BF16)
    body = [*model.first.parameters(), *model.last.parameters()]
    optimizer = torch.optim.AdamW([{"params": model.table.parameters(), "lr": 1e-2}, {"params": body, "lr": rate}])
    monitor.optimizer = optimizer
    rows = train(model, optimizer, 3, monitor)
    assert min(row["nanguard/update_share"] for row in rows) > 0.01
    assert [event["values"]["learning_rate"] for event in events] == [rate] * (rate < 1e-3)


def test_a_learning_rate_that_was_set_to_zero_is_told_at_the_first_look():
    model, optimizer, monitor, events = make("adamw", BF16, 0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    train(model, optimizer, 5, monitor, scheduler)
    (event,) = events
    assert event["step"] == 0
    assert (
        event["message"]
        == "No weight changed in step 0 because the learning rate is 0 (it was set to 0). Set a learning rate."
    )


@pytest.mark.parametrize("name", ["adamw", "tensor", "sgd"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_learning_rate_of_zero_is_told_as_such(name, dtype):
    model, optimizer, monitor, events = make(name, dtype, 0.0)
    rows = train(model, optimizer, 10, monitor)
    assert {row["nanguard/update_share"] for row in rows} == {0.0}
    (event,) = events
    assert (event["signal"], event["action"], event["cause"]) == ("update_stalled", "observed", None)
    assert "the learning rate is 0 (it was set to 0)" in event["message"]
    assert event["remedies"] == []


def test_a_schedule_that_is_over_is_told_as_such():
    model, optimizer, monitor, events = make("adamw", torch.float32, 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 5))
    train(model, optimizer, 12, monitor, scheduler)
    (event,) = events
    assert event["step"] == 7  # from step 5 on it is zero
    assert "reduced it from 0.001" in event["message"]


def test_parameters_without_a_gradient_are_listed_and_no_event():
    model, optimizer, monitor, events = make("adamw", BF16, 1e-3, tower=True)
    rows = train(model, optimizer, 20, monitor)
    assert monitor.state.idle == ["dead", "tower.bias", "tower.weight"]
    assert {row["nanguard/idle_parameters"] for row in rows} == {3.0}
    assert events == []


def test_they_are_listed_beside_what_is_told():
    model, optimizer, monitor, events = make("adamw", BF16, 1e-8, tower=True)
    train(model, optimizer, 5, monitor)
    (event,) = events
    assert event["cause"] == "rounding_stall"
    assert event["values"]["idle_parameters"] == ["dead", "tower.bias", "tower.weight"]


def test_a_gradient_now_and_then_is_enough():
    model, optimizer, monitor, _ = make("adamw", BF16, 1e-3, tower=True)
    train(model, optimizer, 2, monitor)
    model.dead.register_hook(lambda gradient: gradient + 1.0)
    train(model, optimizer, 1, monitor)
    train(model, optimizer, 2, monitor)
    assert monitor.state.idle == ["tower.bias", "tower.weight"]


def test_parameters_the_optimizer_does_not_know_are_idle():
    model, _, monitor, _ = make("adamw", BF16, 1e-3)
    optimizer = torch.optim.AdamW([*model.first.parameters(), *model.last.parameters()])
    monitor.optimizer = optimizer
    train(model, optimizer, 2, monitor)
    assert monitor.state.idle == ["table.weight"]


@pytest.mark.parametrize("gradient", [0.0, INF])
def test_steps_without_a_usable_gradient_are_not_judged(gradient):
    """A loss scaler skips those with an infinity."""
    model, _, monitor, events = make("sgd", BF16, 1e-3)
    for step in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        monitor.before_update(step)
        monitor.after_update(step)
    assert events == []
    assert "nanguard/update_share" not in monitor.metrics()


def test_one_read_a_look_and_nothing_in_between():
    model, optimizer, monitor, _ = make("adamw", BF16, 1e-3, every_n_steps=50)
    train(model, optimizer, 2, monitor)
    with OperationCounter() as counted:
        monitor.before_update(3)
        monitor.after_update(3)
    assert counted.ops == []
    with OperationCounter() as counted:
        monitor.before_update(49)
    assert counted.reads == []
    optimizer.step()
    with OperationCounter() as counted:
        monitor.after_update(49)
    assert len(counted.reads) == 1
    assert monitor.metrics()["nanguard/update_share"] > 0.0
    assert monitor.metrics() == {}


def test_a_learning_rate_on_the_device_takes_no_read_of_its_own():
    model, optimizer, monitor, _ = make("tensor", BF16, 1e-3)
    train(model, optimizer, 2, monitor)
    with OperationCounter() as counted:
        monitor.before_update(3)
    assert counted.reads == []
    optimizer.step()
    with OperationCounter() as counted:
        monitor.after_update(3)
    assert len(counted.reads) == 1


def test_a_step_that_is_broken_off_leaves_nothing():
    model, optimizer, monitor, _ = make()
    train(model, optimizer, 1, monitor)
    monitor.before_update(1)
    assert monitor.sample is not None
    monitor.close()
    monitor.after_update(1)
    assert monitor.metrics() == {}


def test_shares_by_parameter():
    model, optimizer, monitor, _ = make("adamw", BF16, 1e-3, full_metrics=True)
    row = train(model, optimizer, 1, monitor)[0]
    named = [name for name, _ in model.named_parameters()]
    assert {key.removeprefix("nanguard/update_share/") for key in row} >= set(named)


@pytest.mark.parametrize("shape", [(4096, 64), (300, 300), (7, 999), (5000,), (64, 3, 3, 3), (10,)])
def test_a_sample_goes_through_all_columns(shape):
    weights = nn.Parameter(torch.zeros(shape))
    weights.grad = torch.ones(shape)
    model = nn.ParameterDict({"w": weights})
    (piece,) = take_sample(model, torch.optim.SGD(model.parameters(), lr=1.0)).pieces
    assert SAMPLE / 2.5 < piece.size <= SAMPLE or piece.size == weights.numel()
    places = torch.arange(weights.numel())[:: piece.stride]
    assert len(places) == piece.size
    assert len((places % shape[-1]).unique()) == min(shape[-1], piece.size)


def test_the_share_is_that_of_all_entries():
    """A large tensor counts for more than a small one, though as many entries of it are looked at."""
    model = nn.ParameterDict({"large": torch.ones(100_000), "small": torch.ones(100), "still": torch.ones(99_900)})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sample = take_sample(model, optimizer)
    model["large"].data.add_(1.0)
    share = read_sample(sample, Ranks(alone=True)).share(["large", "small", "still"])
    assert share == pytest.approx(0.5)


def test_entries_without_a_gradient_are_not_counted():
    model = nn.ParameterDict({"w": torch.ones(100)})
    model["w"].grad = (torch.arange(100) < 40).float()
    sample = take_sample(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model["w"].data[30:90] += 1.0
    assert read_sample(sample, Ranks(alone=True)).share(["w"]) == pytest.approx(10 / 40)


class Master(torch.optim.Optimizer):
    """Steps in float32 and stores bfloat16, as optimizers with master weights do."""

    def __init__(self, params: Any, lr: float, kahan: bool = False):
        super().__init__(params, {"lr": lr})
        self.kahan = kahan

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self.kahan:
                rest = state.setdefault("compensation", torch.zeros_like(parameter))
                exact = parameter.float() + rest.float() - self.param_groups[0]["lr"] * parameter.grad.float()
                parameter.copy_(exact)
                rest.copy_(exact - parameter.float())
            else:
                exact = state.setdefault("copy", parameter.float())
                exact.sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"])
                parameter.copy_(exact)


@pytest.mark.parametrize("kahan", [False, True])
def test_optimizers_that_keep_what_rounding_takes_are_left_alone(kahan):
    model, _, monitor, events = make("sgd", BF16)
    optimizer = Master(model.parameters(), 1e-5, kahan)
    monitor.optimizer = optimizer
    rows = train(model, optimizer, 12, monitor)
    assert rows[-1]["nanguard/update_share"] < 0.01
    assert events == []
    assert monitor.exempt == {name for name, _ in model.named_parameters()}


class Halves(Ranks):
    """Two ranks of which this is one; the other has counted the same."""

    def __init__(self) -> None:
        super().__init__(alone=True)
        self.size, self.num_gathers = 2, 0

    def gather(self, fact: Any) -> list[Any]:
        self.num_gathers += 1
        return [fact, [{"w": 10.0}, {"w": 0.0}, {"w": float("nan")}]]


def test_counts_of_shards_are_added_up_and_those_of_replicas_are_not():
    model = nn.ParameterDict({"w": torch.ones(10)})
    model["w"].grad = torch.ones(10)
    for is_sharded in (False, True):
        sample, ranks = take_sample(model, torch.optim.SGD(model.parameters(), lr=1.0)), Halves()
        assert not sample.is_sharded
        sample.is_sharded = is_sharded
        model["w"].data.add_(1.0)
        count = read_sample(sample, ranks)
        assert ranks.num_gathers == int(is_sharded)
        assert count.share(["w"]) == (0.5 if is_sharded else 1.0)
        assert count.sizes["w"] == (INF if is_sharded else 10.0)


def test_the_gradient_of_a_few_rows_is_neither_sampled_nor_idle():
    torch.manual_seed(0)
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    sample = take_sample(table, optimizer)
    assert sample.pieces == []
    assert sample.idle == set()
    assert read_sample(sample, Ranks(alone=True)).sizes == {"weight": 6.0}
