"""Weights and optimizer state: the planted tensor, and no other, is named, by one read as long as nothing is bad."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.weights import WeightMonitor, check_state, find_bad_weights, format_finding
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.decision import Escalation
from hf_nanguard.core.step.rewind_to_snapshot import Recovery
from hf_nanguard.testing import INF, NAN, OperationCounter

OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


class HaltingMonitor(WeightMonitor):
    """Halts at what it finds, as a run without snapshots does."""

    def check_before_save(self, step: int) -> Any:
        failure = super().check_before_save(step)
        recovery = Recovery(Policy(), self.journal, Escalation(1), lambda: False)
        return None if failure is None else recovery.resolve(failure, step)


class Net(nn.Module):
    """An embedding of which batches use the first half only, BatchNorm, a frozen mask and a mask that is not saved."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.table = nn.Embedding(12, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 12)
        self.mask = nn.Parameter(torch.full((12,), -INF), requires_grad=False)
        self.register_buffer("causal", torch.full((2, 2), NAN), persistent=False)
        self.register_buffer("allowed", torch.tensor([0.0, -INF]))
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(self.table(ids))).float(), ids)


def train(model: nn.Module, optimizer: Any, num_steps: int, monitor: WeightMonitor | None = None) -> str | None:
    """The loop anybody would write; ends at a reason to halt."""
    for step in range(num_steps):
        ids = torch.arange(step, step + 5) % 6
        optimizer.zero_grad()
        model(ids).backward()
        if monitor is not None:
            monitor.before_update(step)
        optimizer.step()
        if monitor is not None and (reason := monitor.after_update(step)) is not None:
            return reason
    return None


def make(name: str = "adamw", dtype: torch.dtype = torch.float32) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net(dtype)
    return model, OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


def watch(model: nn.Module, optimizer: Any, **settings: Any) -> tuple[WeightMonitor, list[dict]]:
    events: list[dict] = []
    ranks = Ranks(alone=True)
    return HaltingMonitor(
        model, Journal(ranks, events.append), optimizer=optimizer, **{"every_n_steps": 100, **settings}
    ), events


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_healthy_runs_are_silent_and_bit_identical(name):
    num_steps = 200 if name in ("adamw", "fused", "momentum", "adafactor") else 40
    ends = []
    for guarded in (False, True):
        model, optimizer = make(name)
        monitor, events = watch(model, optimizer, every_n_steps=1)
        assert train(model, optimizer, num_steps, monitor if guarded else None) is None
        assert events == []
        ends.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # LBFGS of torch 2.8
def test_lbfgs_is_looked_into():
    model, _ = make()
    optimizer = torch.optim.LBFGS([model.head.weight, model.head.bias], lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(6))
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert check_state(model, optimizer) is None
    optimizer.state[model.head.weight]["old_dirs"][1][7] = NAN
    finding = check_state(model, optimizer)
    assert finding is not None
    assert (finding.parameter, finding.state, finding.rows) == ("head.weight", "old_dirs.1", (7,))


@pytest.mark.parametrize(("value", "kind"), [(NAN, "nan"), (INF, "inf"), (-INF, "inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bad_weight_is_named_with_its_rows(value, kind, dtype):
    model, optimizer = make("momentum", dtype)
    train(model, optimizer, 2)
    model.head.weight.data[[2, 5], 1] = value
    model.head.weight.data[5, 3] = value
    finding = check_state(model, optimizer)
    assert finding is not None
    assert (finding.parameter, finding.state, finding.kind) == ("head.weight", None, kind)
    assert (finding.num_bad, finding.num_entries, finding.rows) == (3, 48, (2, 5))
    assert finding.bad == {"head.weight": kind}


STATES = [
    ("adamw", "exp_avg"), ("adamw", "exp_avg_sq"), ("fused", "exp_avg"), ("amsgrad", "max_exp_avg_sq"),
    ("momentum", "momentum_buffer"), ("adafactor", "row_var"), ("adafactor", "col_var"), ("rmsprop", "square_avg"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key"), STATES)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_state_is_named_while_the_weight_is_finite(name, key, value):
    model, optimizer = make(name)
    train(model, optimizer, 3)
    planted = optimizer.state[model.head.weight][key]
    planted.view(-1)[1] = value
    finding = check_state(model, optimizer)
    assert finding is not None
    assert (finding.parameter, finding.state, finding.num_bad) == ("head.weight", key, 1)
    assert finding.rows == (0 if key != "row_var" else 1,)
    assert finding.update is not None
    assert finding.update.cause == "optimizer_state"
    assert ("never move again" in finding.update.message) == (value == INF and key.endswith(("_avg_sq", "square_avg")))


@pytest.mark.parametrize("key", ["step", "master"])
def test_scalars_and_master_copies_are_looked_at(key):
    model, optimizer = make()
    train(model, optimizer, 2)
    optimizer.state[model.head.bias]["master"] = model.head.bias.detach().double()
    assert check_state(model, optimizer) is None
    optimizer.state[model.head.bias][key].fill_(NAN)
    finding = check_state(model, optimizer)
    assert finding is not None
    assert (finding.parameter, finding.state) == ("head.bias", key)


def test_what_is_no_float_is_passed_by():
    model, optimizer = make("sgd")
    optimizer.state[model.head.weight] = {
        "state1": torch.zeros(48, dtype=torch.uint8), "codes": torch.full((4,), NAN).to(torch.float8_e4m3fn),
        "momentum_buffer": None, "count": 3, "found": {"absmax": torch.ones(2)},
    }  # fmt: skip
    assert check_state(model, optimizer) is None
    optimizer.state[model.head.weight]["found"]["absmax"][1] = INF
    finding = check_state(model, optimizer)
    assert finding is not None
    assert finding.bad == {"head.weight/found.absmax": "inf"}


def test_buffers_that_are_saved_may_be_inf_but_not_nan():
    model, optimizer = make()
    train(model, optimizer, 2)
    model.norm.running_var[1] = INF
    assert check_state(model, optimizer) is None
    model.norm.running_mean[2] = NAN
    finding = check_state(model, optimizer)
    assert finding is not None
    assert (finding.parameter, finding.rows, finding.is_buffer) == ("norm.running_mean", (2,), True)
    assert format_finding(finding).startswith("buffer norm.running_mean contains NaN in 1 of 4 entries")


def test_frozen_weights_are_left_alone_until_they_are_trained():
    model, optimizer = make()
    assert check_state(model, optimizer) is None
    model.mask.requires_grad_(True)
    finding = check_state(model, optimizer)
    assert finding is not None
    assert finding.parameter == "mask"


def test_master_weights_only_the_optimizer_knows():
    model, _ = make()
    copies = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor([1.0, NAN]))]
    finding = check_state(model, torch.optim.SGD(copies, lr=0.1))
    assert finding is not None
    assert finding.parameter == "parameter 1 of group 0"


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_one_read_and_a_handful_of_ops(name):
    model, optimizer = make(name)
    train(model, optimizer, 2)
    monitor, _ = watch(model, optimizer, every_n_steps=10)
    with OperationCounter() as counted:
        assert monitor.after_update(5) is None
    assert counted.ops == []
    with OperationCounter() as counted:
        assert monitor.after_update(9) is None
    assert len(counted.reads) == 1
    assert counted.ops.count("aten._foreach_norm.Scalar") == 2  # what must be finite, and buffers
    assert len(counted.ops) <= 8
    with OperationCounter() as counted:
        assert monitor.check_before_save(3) is None
    assert len(counted.reads) == 1


def test_off_means_only_before_a_save():
    model, optimizer = make()
    monitor, events = watch(model, optimizer, every_n_steps=0)
    model.head.weight.data[0] = NAN
    assert train(model, optimizer, 3, monitor) is None
    assert events == []
    reason = monitor.check_before_save(3)
    assert reason is not None
    assert [(e["signal"], e["action"], e["step"]) for e in events] == [("param_nonfinite", "halted", 3)]


def test_eps_underflow_in_float16_halts_with_cause_and_remedy():
    model, optimizer = make("adamw", torch.float16)
    model.head.weight.register_hook(
        lambda gradient: torch.full_like(gradient, 1e-4).index_fill(0, torch.tensor([3]), 1.0)
    )
    monitor, events = watch(model, optimizer, every_n_steps=1)
    reason = train(model, optimizer, 5, monitor)
    assert reason is not None
    (event,) = [e for e in events if e["culprit"]["parameter"] == "head.weight"] or events
    assert (event["signal"], event["action"], event["step"]) == ("param_nonfinite", "halted", 0)
    assert event["cause"] == "adam_eps_underflow"
    assert event["culprit"]["phase"] == "optimizer"
    assert event["values"]["eps"] == 1e-8
    assert {r["name"]: r["works"] for r in event["remedies"]}["larger_eps"]
    assert event["culprit"]["parameter"] in reason
    assert "larger_eps (eps 0.0001" in reason


@pytest.mark.parametrize(
    ("name", "rate", "culprit"), [("fused", 1e7, "table.weight"), ("momentum", 6e4, "head.weight")]
)
def test_a_learning_rate_that_is_too_high_halts(name, rate, culprit):
    model, optimizer = make(name, torch.float16)
    model.head.weight.register_hook(lambda gradient: gradient * 100)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = rate
    monitor, events = watch(model, optimizer, every_n_steps=1)
    reason = train(model, optimizer, 5, monitor)
    assert reason is not None
    assert "smaller_lr" in reason or "learning rate" in reason
    (event,) = events
    assert (event["signal"], event["cause"], event["step"]) == ("param_nonfinite", "lr_too_high", 0)
    assert event["culprit"]["parameter"] == culprit


@pytest.mark.parametrize("moves", [True, False])
def test_a_nan_moment_of_a_row_no_batch_uses(moves):
    """With the next update the weight is bad as well; before it only the moment is."""
    model, optimizer = make()
    train(model, optimizer, 3)
    optimizer.state[model.table.weight]["exp_avg"][9] = NAN
    monitor, events = watch(model, optimizer, every_n_steps=1)
    reason = train(model, optimizer, 3, monitor) if moves else monitor.check_before_save(3)
    (event,) = events
    assert event["signal"] == ("param_nonfinite" if moves else "optimizer_nonfinite")
    assert (event["cause"], event["culprit"]["phase"]) == ("optimizer_state", "optimizer")
    assert event["culprit"]["parameter"] == "table.weight"
    assert (event["values"]["rows"], event["values"]["num_bad"], event["values"]["kind"]) == ([9], 4, "nan")
    assert {r["name"]: r["works"] for r in event["remedies"]} == {"reset_state": True}
    assert reason is not None
    for part in ("table.weight", "row 9", "exp_avg", "reset_state"):
        assert part in reason


def test_a_weight_ruined_by_nobody_known():
    model, optimizer = make("momentum")
    train(model, optimizer, 2)
    model.head.bias.data[4] = NAN
    monitor, events = watch(model, optimizer)
    reason = monitor.check_before_save(2)
    assert reason == "Training was halted at step 2: parameter head.bias contains NaN in 1 of 12 entries (row 4)."
    (event,) = events
    assert (event["cause"], event["culprit"]["phase"], event["remedies"]) == ("param_nonfinite", "parameter", [])


def test_observed_once_a_tensor():
    model, optimizer = make("momentum")
    train(model, optimizer, 2)
    monitor, events = watch(model, optimizer, acts=False)
    model.head.bias.data[4] = NAN
    assert [monitor.check_before_save(step) for step in range(3)] == [None] * 3
    assert [(e["step"], e["action"]) for e in events] == [(0, "observed")]
    optimizer.state[model.head.weight]["momentum_buffer"][2] = NAN
    assert [monitor.check_before_save(step) for step in range(3, 6)] == [None] * 3
    assert [(e["step"], e["action"]) for e in events] == [(0, "observed"), (3, "observed")]
    assert events[1]["values"]["bad_tensors"] == {"head.bias": "nan", "head.weight/momentum_buffer": "nan"}


def test_a_halt_is_not_written_twice():
    model, optimizer = make()
    model.head.bias.data[4] = NAN
    monitor, events = watch(model, optimizer)
    assert monitor.check_before_save(1) is not None
    assert monitor.check_before_save(1) is not None
    assert len(events) == 1


class Together(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: dict):
        super().__init__(alone=True)
        self.rank, self.size, self.barrier, self.board = rank, size, barrier, board
        self.num_calls = {"any": 0, "gather": 0}

    def any(self, fact: bool) -> bool:
        self.num_calls["any"] += 1
        return any(self._exchange(fact))

    def gather(self, fact: Any) -> list[Any]:
        self.num_calls["gather"] += 1
        return self._exchange(fact)

    def _exchange(self, fact: Any) -> list[Any]:
        self.board[self.rank] = fact
        self.barrier.wait(20)
        found = [self.board[rank] for rank in range(self.size)]
        self.barrier.wait(20)
        return found


@pytest.mark.parametrize("plants", [{}, {0: "weight"}, {1: "weight"}, {0: "moment", 1: "weight"}, {1: "moment"}])
def test_ranks_decide_alike_and_rank_0_tells(plants):
    barrier, board = threading.Barrier(2), {}
    reasons: dict[int, Any] = {}
    events: dict[int, list[dict]] = {0: [], 1: []}
    ranks = [Together(rank, 2, barrier, board) for rank in range(2)]
    made = [make() for _ in range(2)]
    for rank, (model, optimizer) in enumerate(made):
        train(model, optimizer, 2)
        if plants.get(rank) == "weight":
            model.head.bias.data[rank] = NAN
        if plants.get(rank) == "moment":
            optimizer.state[model.head.weight]["exp_avg"][3] = NAN

    def check(rank: int) -> None:
        model, optimizer = made[rank]
        monitor = HaltingMonitor(model, Journal(ranks[rank], events[rank].append), 100, optimizer=optimizer)
        reasons[rank] = monitor.check_before_save(7)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [each.num_calls for each in ranks] == [{"any": 1, "gather": 1 if plants else 0}] * 2
    assert reasons[0] == reasons[1]
    assert (reasons[0] is not None) == bool(plants)
    assert events[1] == []
    if plants:
        culprit = next((rank for rank, plant in plants.items() if plant == "weight"), next(iter(plants)))
        (event,) = events[0]
        assert event["rank"] == culprit
        named = "head.bias" if plants[culprit] == "weight" else "head.weight"
        assert event["culprit"]["parameter"] == named


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_huge_finite_numbers_whose_norm_overflows_are_sound(dtype):
    weights = nn.Parameter(torch.full((9,), torch.finfo(dtype).max, dtype=dtype))
    assert not torch.linalg.vector_norm(weights).isfinite(), "the 2-norm must overflow, or this shows nothing"
    assert check_state(nn.ParameterDict({"huge": weights})) is None
    weights.data[4] = NAN
    finding = check_state(nn.ParameterDict({"huge": weights}))
    assert finding is not None
    assert finding.rows == (4,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_no_place_hides_a_bad_number(dtype):
    for size in (1, 7, 8, 9, 31, 33, 64, 1000):
        for place in {0, size // 2, size - 1}:
            for value in (NAN, INF, -INF):
                weights = nn.Parameter(torch.zeros(size, dtype=dtype))
                assert check_state(nn.ParameterDict({"w": weights})) is None
                weights.data[place] = value
                finding = check_state(nn.ParameterDict({"w": weights}))
                assert finding is not None
                assert finding.rows == (place,)


def test_a_tensor_made_of_others_is_taken_apart():
    """Optimizers with 8-bit state wrap codes and scales into one."""
    model, optimizer = make("sgd")
    optimizer.state[model.head.bias]["exp_avg"] = TwoTensor(torch.ones(12), torch.ones(12))
    assert check_state(model, optimizer) is None
    optimizer.state[model.head.bias]["exp_avg"].b[5] = NAN
    finding = check_state(model, optimizer)
    assert finding is not None
    assert (finding.parameter, finding.state, finding.rows) == ("head.bias", "exp_avg.b", (5,))


def test_a_buffer_that_was_nan_before_the_run_is_left_alone():
    model = Net()
    model.register_buffer("unused", torch.tensor([NAN, 1.0]))
    optimizer = torch.optim.AdamW(model.parameters())
    events = []
    monitor = HaltingMonitor(model, Journal(Ranks(), events.append), 1, optimizer=optimizer)
    assert train(model, optimizer, 3, monitor) is None
    assert events == []
    model.norm.running_var[2] = NAN
    assert "buffer norm.running_var contains NaN" in train(model, optimizer, 3, monitor)


def test_weights_that_make_a_model_useless_and_masks_that_do_not():
    model = Net()
    assert find_bad_weights(model) == {}
    model.scale = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)  # there is no norm for it
    model.head.bias.data[0] = INF
    model.mask.data[1] = NAN
    assert find_bad_weights(model) == {"mask": "nan", "head.bias": "inf"}
