"""A reward that is no number costs its completion and nothing else; healthy rewards pass bit-identical.

The trainers here do what a guarded one does with the functions under test, and nothing more.
"""

import asyncio
import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaForSequenceClassification
from trl.trainer.utils import is_async_callable

from hf_nanguard.hf.rl.bad_rewards import MAX_KEPT, BadReward, flatten
from hf_nanguard.hf.rl.reward_values import BAD_REWARD, UNUSABLE, holds_bad_reward, mark_unscorable, zero_bad_advantages
from hf_nanguard.hf.rl.wrapped_rewards import checked_rewards
from hf_nanguard.plain_text import show
from hf_nanguard.testing import OperationCounter

from ...models import text_rows, tiny_llama, tiny_tokenizer
from ...reference import assert_same, losses_of, tensors_of
from ...trainers import build, common_arguments

NAN, INF = float("nan"), float("inf")
SIZE, GROUP = 8, 4  # completions of a generation, of a group
AT = 2  # the completion at which things go wrong
FLOAT32_MAX = float(np.finfo(np.float32).max)


# ---- functions ----


class Scorer:
    """A reward function that differs between completions, writes down what it gave, and fails once where it is asked to."""

    def __init__(self, salt, fault=None):
        self.salt, self.fault = salt, fault
        self.given, self.tokens = [], []
        self.__name__ = f"scorer_{salt}"

    def score(self, completions, completion_ids):
        self.tokens.append(completion_ids)
        self.given.append([float((sum(map(ord, text)) * self.salt) % 11) / 4 for text in completions])
        result = list(self.given[-1])
        if self.fault is None or len(self.given) > 1:
            return result
        if self.fault == "error":
            for i, text in enumerate(completions):
                if i == AT:
                    raise ValueError(f"cannot read {len(text)} characters")
        if self.fault == "length":
            return result[:-1]
        if self.fault == "kind":
            return dict(enumerate(result))
        result[AT] = self.fault
        return result

    def __call__(self, completions, completion_ids, **kwargs):
        return self.score(completions, completion_ids)


class AsyncScorer(Scorer):
    async def __call__(self, completions, completion_ids, **kwargs):
        await asyncio.sleep(0)
        return self.score(completions, completion_ids)


class Judge(LlamaForSequenceClassification):
    """A reward model whose first call gives a bad score at one completion, or fails."""

    fault = None

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        fault, self.fault = self.fault, None
        if fault == "error":
            raise RuntimeError("planted error")
        if fault == "length":
            output.logits = output.logits[:1]  # TRL would spread this one score over all completions
        elif fault is not None:
            output.logits[AT] = fault
        return output


def tiny_judge(fault=None, dtype=torch.float32):
    config = tiny_llama().config
    config.num_labels = 1
    torch.manual_seed(5)
    judge = Judge(config).to(dtype).eval()
    judge.config._name_or_path = "tiny/judge"
    judge.fault = fault
    return judge


# ---- trainers ----


class Checked:
    """What a guarded trainer does."""

    unusable = ()

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        before = list(self.reward_funcs)
        with checked_rewards(self, self.unusable, prompts, completions) as check:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        assert all(one is other for one, other in zip(before, self.reward_funcs, strict=True))
        self.checks.append((check, completions, holds_bad_reward(rewards)))
        return mark_unscorable(rewards)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.bad_advantages.append(zero_bad_advantages(output))
        self.advantages.append(output["advantages"].double().tolist())
        return output


class CheckedGRPO(Checked, trl.GRPOTrainer):
    pass


class CheckedRLOO(Checked, trl.RLOOTrainer):
    pass


def make(kind, tmp_path, functions, checked=True, **overrides):
    """Builds a GRPO or RLOO trainer with 2 groups of 4 completions a generation and 2 generations."""
    arguments = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2, "num_generations": GROUP,
        "max_completion_length": 4, "beta": 0.0, **overrides,
    }  # fmt: skip
    models = [tiny_tokenizer() if isinstance(function, nn.Module) else None for function in functions]
    extra = {"reward_funcs": list(functions), "reward_processing_classes": models}
    if kind == "grpo":
        stock = CheckedGRPO if checked else trl.GRPOTrainer
        trainer = build("grpo", tmp_path, stock, guard=False, extra=extra, **arguments)
    else:
        stock = CheckedRLOO if checked else trl.RLOOTrainer
        args = trl.RLOOConfig(**common_arguments(tmp_path, **arguments))
        dataset = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(48)])
        trainer = stock(tiny_llama(), args=args, train_dataset=dataset, processing_class=tiny_tokenizer(), **extra)
    trainer.checks, trainer.bad_advantages, trainer.advantages = [], [], []
    return trainer


# ---- advantages by hand, in float64, from the scores that are left ----


def spread(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def expected_advantages(columns, weights, bad, scale="group", aggregation="sum_then_normalize", rloo=False):
    groups = [range(first, first + GROUP) for first in range(0, SIZE, GROUP)]
    good = [[i for i in group if i not in bad] for group in groups]
    everyone = [i for group in good for i in group]
    advantages = [0.0] * SIZE
    if aggregation == "normalize_then_sum":
        total = dict.fromkeys(everyone, 0.0)
        for column, weight in zip(columns, weights, strict=True):
            for group in good:
                values = [column[i] for i in group]
                for i in group:
                    total[i] += weight * (column[i] - sum(values) / len(values)) / (spread(values) + 1e-4)
        mean = sum(total.values()) / len(total)
        for i in everyone:
            advantages[i] = (total[i] - mean) / (spread(list(total.values())) + 1e-4)
        return advantages
    total = {i: sum(w * column[i] for column, w in zip(columns, weights, strict=True)) for i in everyone}
    for group in good:
        values = [total[i] for i in group]
        for i in group:
            others = [total[j] for j in group if j != i]
            if rloo:
                advantages[i] = total[i] - sum(others) / len(others)
                continue
            divisor = {"group": spread(values), "batch": spread(list(total.values())), "none": 1.0 - 1e-4}[scale]
            advantages[i] = (total[i] - sum(values) / len(values)) / (divisor + 1e-4)
    return advantages


FAULTS = {"nan": NAN, "inf": INF, "-inf": -INF, "beyond": 1e300, "text": "1.0"}
VARIANTS = [
    ("group", "sum_then_normalize", None),
    ("batch", "sum_then_normalize", [0.5, 2.0]),
    ("none", "sum_then_normalize", [0.5, 2.0]),
    ("group", "normalize_then_sum", [0.5, 2.0]),
]


def check_generations(trainer, functions, weights, **variant):
    """Asserts that the first generation goes on without the bad completion and the second as if nothing had been."""
    for generation, bad in enumerate([{AT}, set()]):
        columns = [function.given[generation] for function in functions]
        wanted = expected_advantages(columns, weights, bad, **variant)
        assert max(wanted) - min(wanted) > 0.1
        assert trainer.advantages[generation] == pytest.approx(wanted, abs=2e-4)
    assert trainer.advantages[0][AT] == 0.0
    assert trainer.bad_advantages == [[], []]
    assert [bad for _, _, bad in trainer.checks] == [True, False]
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize(("scale", "aggregation", "weights"), VARIANTS)
@pytest.mark.parametrize("fault", ["inf", "nan"])
def test_groupmates_keep_their_baseline_in_grpo(scale, aggregation, weights, fault, tmp_path):
    functions = [Scorer(3), Scorer(5, FAULTS[fault])]
    trainer = make("grpo", tmp_path, functions, scale_rewards=scale, multi_objective_aggregation=aggregation, reward_weights=weights)  # fmt: skip
    trainer.train()
    check_generations(trainer, functions, weights or [1.0, 1.0], scale=scale, aggregation=aggregation)
    check, completions, _ = trainer.checks[0]
    [bad] = check.bad
    assert (bad.function, bad.completion, bad.kind, bad.whole) == ("scorer_5", AT, fault, False)
    assert bad.text == completions[AT]
    assert bad.prompt.split()[0].startswith("w")
    rows = [row for row in trainer.state.log_history if "rewards/scorer_5/mean" in row]
    left = [value for i, value in enumerate(functions[1].given[0]) if i != AT]
    assert rows[0]["rewards/scorer_5/mean"] == pytest.approx(sum(left) / len(left))


@pytest.mark.parametrize("fault", ["-inf", "beyond", "text"])
def test_every_kind_of_bad_entry_is_left_out(fault, tmp_path):
    functions = [Scorer(3), Scorer(5, FAULTS[fault])]
    trainer = make("grpo", tmp_path, functions)
    trainer.train()
    check_generations(trainer, functions, [1.0, 1.0])
    assert [bad.kind for bad in trainer.checks[0][0].bad] == [{"-inf": "-inf", "beyond": "inf", "text": "type"}[fault]]


@pytest.mark.parametrize("fault", ["inf", "nan"])
def test_groupmates_keep_their_baseline_in_rloo(fault, tmp_path):
    functions = [Scorer(3), AsyncScorer(5, FAULTS[fault])]
    trainer = make("rloo", tmp_path, functions, reward_weights=[0.5, 2.0])
    trainer.train()
    check_generations(trainer, functions, [0.5, 2.0], rloo=True)
    assert [(bad.function, bad.completion) for bad in trainer.checks[0][0].bad] == [("scorer_5", AT)]


@pytest.mark.parametrize("kind", [Scorer, AsyncScorer])
@pytest.mark.parametrize("fault", ["error", "length", "kind"])
def test_a_failed_call_teaches_nothing_and_the_run_goes_on(kind, fault, tmp_path):
    functions = [Scorer(3), kind(5, fault)]
    trainer = make("grpo", tmp_path, functions)
    trainer.train()
    assert trainer.advantages[0] == [0.0] * SIZE
    columns = [function.given[1] for function in functions]
    assert trainer.advantages[1] == pytest.approx(expected_advantages(columns, [1.0, 1.0], set()), abs=2e-4)
    check, completions, held_bad = trainer.checks[0]
    assert held_bad
    assert [bad.whole for bad in check.bad] == [True]
    [bad] = check.bad
    assert bad.kind == ("type" if fault == "kind" else fault)
    assert bad.completion == (AT if fault == "error" else None)
    assert bad.text == (completions[AT] if fault == "error" else None)
    assert "no completion of this call has a score" in bad.message
    if fault == "error":
        assert f"raised ValueError: cannot read {len(completions[AT])} characters (test_bad_rewards.py:" in show(
            bad.message
        )
    assert len(functions[1].given) == 2  # it was not called again
    assert trainer.checks[1][0].bad == []


@pytest.mark.parametrize("fault", [NAN, INF, -INF, "error", "length"])
def test_reward_models_are_checked(fault, tmp_path):
    scorer, judge = Scorer(3), tiny_judge(fault)
    trainer = make("grpo", tmp_path, [judge, scorer])
    trainer.train()
    check, completions, held_bad = trainer.checks[0]
    assert held_bad
    [bad] = check.bad
    assert bad.function == "judge"
    if isinstance(fault, str):
        assert (bad.kind, bad.completion, bad.whole) == (fault, None, True)
        assert trainer.advantages[0] == [0.0] * SIZE
    else:
        assert (bad.kind, bad.completion, bad.text) == (str(fault), AT, completions[AT])
        mates = [trainer.advantages[0][i] for i in range(GROUP) if i != AT]
        assert trainer.advantages[0][AT] == 0.0
        assert sum(mates) == pytest.approx(0.0, abs=1e-5)
        assert max(map(abs, mates)) > 0.1
    assert max(map(abs, trainer.advantages[1])) > 0.1
    assert trainer.checks[1][0].bad == []


def test_unusable_completions_are_marked_without_a_finding(tmp_path):
    functions = [Scorer(3), AsyncScorer(5), tiny_judge()]
    trainer = make("grpo", tmp_path, functions, max_steps=1)
    trainer.unusable = {1, 6}
    trainer.train()
    assert [i for i, advantage in enumerate(trainer.advantages[0]) if advantage == 0.0] == [1, 6]
    [(check, _, held_bad)] = trainer.checks
    assert check.bad == []
    assert not held_bad


def test_an_error_with_unusable_completions_keeps_the_two_apart(tmp_path):
    trainer = make("grpo", tmp_path, [Scorer(3, "error")], max_steps=1)
    with checked_rewards(trainer, unusable={0}) as check:
        rewards = score(trainer, ["a text"] * 3)
    assert rewards[:, 0].tolist() == [UNUSABLE, BAD_REWARD, BAD_REWARD]
    assert len(check.bad) == 1


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_healthy_run_is_bit_identical_to_stock(kind, tmp_path):
    def run(checked):
        scorers = [Scorer(3), AsyncScorer(5), Scorer(7)]

        def plain(completions, **kwargs):
            return [None if len(text) % 2 else torch.rand(()).item() for text in completions]  # draws random numbers

        def generated(completions, scale, **kwargs):
            return (np.float32(len(text)) * scale for text in completions)

        functions = [*scorers[:2], plain, partial(generated, scale=0.1), tiny_judge(dtype=torch.bfloat16)]
        weights = [1.0, 0.5, 2.0, 1.0, 3.0]
        trainer = make(kind, tmp_path / str(checked), functions, checked, reward_weights=weights)
        trainer.train()
        rows = [{k: v for k, v in row.items() if "time" not in k and "runtime" not in k and "second" not in k}
                for row in trainer.state.log_history]  # fmt: skip
        return tensors_of(trainer), losses_of(trainer), rows, [scorer.tokens for scorer in scorers[:2]], trainer

    stock, checked = run(False), run(True)
    assert_same(stock[0], checked[0])
    assert stock[1] == checked[1]
    assert stock[3] == checked[3]
    assert str(stock[2]) == str(checked[2])  # as text: NaN equals itself
    assert any("rewards/judge/mean" in row for row in checked[2])
    assert [check.bad for check, _, _ in checked[4].checks] == [[], []]


def test_without_the_guard_an_infinite_reward_gives_its_groupmates_the_largest_number(tmp_path):
    class AdvantagesOnly(CheckedGRPO):
        def _calculate_rewards(self, *args):
            return trl.GRPOTrainer._calculate_rewards(self, *args)

        def _generate_and_score_completions(self, inputs):
            output = trl.GRPOTrainer._generate_and_score_completions(self, inputs)
            self.stock = output["advantages"].tolist()
            self.found = zero_bad_advantages(output)
            self.left = output["advantages"].tolist()
            return output

    trainer = build(
        "grpo", tmp_path, AdvantagesOnly, guard=False, extra={"reward_funcs": [Scorer(3, INF)]},
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1, num_generations=GROUP,
        max_completion_length=4, scale_rewards="none",
    )  # fmt: skip
    trainer.train()
    mates = [i for i in range(GROUP) if i != AT]
    assert [trainer.stock[i] for i in mates] == [-FLOAT32_MAX] * 3
    assert trainer.found == mates
    assert trainer.left[:GROUP] == [0.0] * GROUP
    assert trainer.left[GROUP:] == trainer.stock[GROUP:]
    assert any(trainer.left[GROUP:])


# ---- the wrappers, through TRL's own `_calculate_rewards` ----


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A stock trainer whose reward functions a test replaces."""
    trainer = make("grpo", tmp_path_factory.mktemp("grpo"), [AsyncScorer(3)], checked=False)
    trainer.checks = []
    return trainer


def give(trainer, *functions):
    """Sets reward functions."""
    trainer.reward_funcs = list(functions)
    trainer.reward_func_names = [f"function_{i}" for i in range(len(functions))]
    trainer.reward_processing_classes = [None] * len(functions)


def score(trainer, completions, prompts=None):
    """Calls TRL's own scoring; returns the rewards per function."""
    prompts = ["a prompt"] * len(completions) if prompts is None else prompts
    inputs = [{"prompt": prompt} for prompt in prompts]
    return trl.GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, [[1]] * len(completions))


class Floats:
    """An object that can be read as a number, or fails to."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        if self.value is None:
            raise ZeroDivisionError
        return self.value


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
GOOD = st.one_of(
    FINITE.flatmap(lambda x: st.sampled_from([x, np.float32(x), np.float64(x), np.array(x), torch.tensor(x),
                                              torch.tensor([x]), torch.tensor(x, dtype=torch.float64), Floats(x)])
                   .map(lambda entry, x=x: (entry, x, None))),
    st.integers(-(10**30), 10**30).map(lambda x: (x, float(x), None)),
    st.booleans().flatmap(lambda x: st.sampled_from([x, np.bool_(x), torch.tensor(x)]).map(lambda e, x=x: (e, float(x), None))),
    st.sampled_from([(Fraction(1, 2), 0.5, None), (Decimal("1.5"), 1.5, None), (3.4028235677973362e38, FLOAT32_MAX, None),
                     (np.array(4), 4.0, None), (torch.tensor(2, dtype=torch.int64), 2.0, None)]),
    st.just((None, NAN, None)),
)  # fmt: skip
WRONG_ENTRIES = {
    "nan": [NAN, np.float32(NAN), torch.tensor(NAN), Floats(NAN), Decimal("nan"), np.array(NAN)],
    "inf": [INF, 1e300, 10**400, np.float64(1e39), torch.tensor(1e300, dtype=torch.float64), 3.4028235677973366e38,
            torch.tensor(INF, dtype=torch.float16), Fraction(10**400)],
    "-inf": [-INF, -1e300, -(10**400), torch.tensor(-INF), -3.4028235677973366e38, Fraction(-(10**400))],
    "type": ["1.0", "", b"1", 1j, np.complex64(1), [1.0], (), {}, object(), Floats(None), torch.zeros(2),
             torch.tensor(1j), np.zeros(1), np.array("1"), np.array(1j), max],
}  # fmt: skip
WRONG = st.sampled_from([(entry, INF, kind) for kind, entries in WRONG_ENTRIES.items() for entry in entries])
CONTAINERS = st.sampled_from([list, tuple, deque, iter, lambda entries: (entry for entry in entries), lambda e: dict(enumerate(e)).values()])  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(GOOD, GOOD, WRONG), min_size=1, max_size=6), CONTAINERS, st.booleans(), st.data())
def test_bad_entries_are_marked_and_good_ones_untouched(trainer, cases, container, is_async, data):
    unusable = data.draw(st.sets(st.integers(0, len(cases) - 1)))
    calls = []

    def function(completions, **kwargs):
        calls.append(completions)
        return container([entry for entry, _, _ in cases])

    async def function_async(**kwargs):
        return function(**kwargs)

    give(trainer, function_async if is_async else function, lambda completions, **kwargs: [1.0] * len(completions))
    functions = trainer.reward_funcs
    with checked_rewards(trainer, unusable) as check:
        rewards = score(trainer, [f"text {i}" for i in range(len(cases))])
    assert trainer.reward_funcs is functions
    assert len(calls) == 1
    wanted = [UNUSABLE if i in unusable else value for i, (_, value, _) in enumerate(cases)]
    assert torch.equal(rewards[:, 0].nan_to_num(nan=7.0, posinf=8.0, neginf=9.0),
                       torch.tensor(wanted, dtype=torch.float32).nan_to_num(nan=7.0, posinf=8.0, neginf=9.0))  # fmt: skip
    kinds = [(i, kind) for i, (_, _, kind) in enumerate(cases) if kind is not None and i not in unusable]
    assert [(bad.completion, bad.kind) for bad in check.bad] == kinds
    assert all(bad.text == f"text {bad.completion}" and bad.function == "function_0" for bad in check.bad)
    marked = mark_unscorable(rewards)
    for i in range(len(cases)):
        if i in unusable or (i, cases[i][2]) in kinds:
            assert marked[i].isnan().all()
        else:
            assert marked[i, 1] == 1.0
            assert marked[i, 0].isnan() if cases[i][0] is None else marked[i, 0] == rewards[i, 0]


@pytest.mark.parametrize("kind", WRONG_ENTRIES)
def test_each_wrong_entry_is_of_its_kind(kind, trainer):
    for entry in WRONG_ENTRIES[kind]:
        give(trainer, lambda entry=entry, **kwargs: [0.5, entry])
        with checked_rewards(trainer) as check:
            assert score(trainer, ["a", "b"])[:, 0].tolist() == [0.5, BAD_REWARD]
        assert [(bad.completion, bad.kind) for bad in check.bad] == [(1, kind)]


@pytest.mark.parametrize("make_result", [list, tuple, np.array, torch.tensor, lambda e: torch.tensor(e).unsqueeze(1)])
def test_a_healthy_result_is_handed_on_as_the_very_same_object(make_result, trainer):
    result = make_result([1.0, 2.5])
    give(trainer, lambda **kwargs: result)
    with checked_rewards(trainer):
        assert trainer.reward_funcs[0](prompts=["p", "p"], completions=["a", "b"]) is result
        assert score(trainer, ["a", "b"])[:, 0].tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("make_result", "says"),
    [
        (lambda: None, "None"),
        (lambda: 1.5, "a float"),
        (lambda: {"a": 1.0, "b": 2.0}, "a dict"),
        (lambda: {1.0, 2.0}, "a set"),
        (lambda: "12", "a str"),
        (lambda: torch.tensor(1.0), "a Tensor"),
        (lambda: np.array(1.0), "a ndarray"),
        (lambda: asyncio.sleep(0), "a coroutine"),
    ],
)
def test_a_result_that_is_no_list_fails_the_call(make_result, says, trainer):
    give(trainer, lambda **kwargs: make_result(), lambda **kwargs: [1.0, 2.0])
    with checked_rewards(trainer) as check:
        rewards = score(trainer, ["a", "b"])
    assert rewards.tolist() == [[BAD_REWARD, 1.0], [BAD_REWARD, 2.0]]
    assert mark_unscorable(rewards).isnan().all()
    [bad] = check.bad
    assert (bad.kind, bad.completion) == ("type", None)
    assert f"returned {says} in place of a list of rewards" in bad.message


def broken_generator(**kwargs):
    yield 1.0
    raise KeyError("answer")


def test_a_generator_that_fails_half_way_is_an_error(trainer):
    give(trainer, broken_generator)
    with checked_rewards(trainer) as check:
        rewards = score(trainer, ["a", "b"])
    assert rewards[:, 0].tolist() == [BAD_REWARD, BAD_REWARD]
    assert "raised KeyError: 'answer' (test_bad_rewards.py:" in show(check.bad[0].message)


@pytest.mark.parametrize("signature", [lambda: [1.0], lambda completions: [1.0]])
def test_a_wrong_signature_is_an_error_without_a_place(signature, trainer):
    give(trainer, signature)
    with checked_rewards(trainer) as check:
        score(trainer, ["a"])
    assert "raised TypeError" in check.bad[0].detail
    assert ".py" not in check.bad[0].detail


def test_an_interrupt_passes_and_the_functions_are_put_back(trainer):
    def interrupt(**kwargs):
        raise KeyboardInterrupt

    give(trainer, interrupt)
    functions = trainer.reward_funcs
    with pytest.raises(KeyboardInterrupt), checked_rewards(trainer):
        score(trainer, ["a"])
    assert trainer.reward_funcs is functions
    assert functions == [interrupt]


@pytest.mark.parametrize("fault", [NAN, "error", "length", "kind"])
def test_observing_changes_nothing(fault, trainer):
    scorer = Scorer(3, fault)
    give(trainer, scorer)
    texts = ["one", "two", "three"]
    with checked_rewards(trainer, acts=False) as check:
        if fault == "error":
            with pytest.raises(ValueError, match="cannot read 5 characters"):
                score(trainer, texts)
        elif fault == "length":
            with pytest.raises(ValueError, match="returned 2 rewards"):
                score(trainer, texts)
        else:
            rewards = score(trainer, texts)[:, 0]
            assert rewards.tolist() == [0.0, 1.0, 2.0] if fault == "kind" else rewards[AT].isnan()
    assert len(check.bad) == 1


def test_kinds_of_functions_stay_what_they_are_to_trl(trainer):
    async def plain_async(**kwargs):
        return [1.0]

    judge = tiny_judge()
    give(trainer, Scorer(3), AsyncScorer(3), partial(AsyncScorer(3), x=1), partial(Scorer(3)), plain_async, judge)
    with checked_rewards(trainer):
        wrapped = list(trainer.reward_funcs)
    assert [is_async_callable(f) for f in wrapped[:5]] == [False, True, True, False, True]
    assert isinstance(wrapped[5], nn.Module)
    assert wrapped[0].salt == 3  # attributes can be read as before
    assert not judge.training


def test_only_some_findings_of_a_function_are_kept(trainer):
    give(trainer, lambda completions, **kwargs: [NAN] * len(completions), lambda completions, **kwargs: ["x"] * 30)
    with checked_rewards(trainer) as check:
        score(trainer, ["text"] * 30)
    assert [bad.function for bad in check.bad] == ["function_0"] * MAX_KEPT + ["function_1"] * MAX_KEPT


def test_scores_of_models_are_read_once_and_only_on_demand(trainer):
    give(trainer, *[tiny_judge(NAN) for _ in range(2)])
    inputs = {"input_ids": torch.ones(4, 3, dtype=torch.long), "attention_mask": torch.ones(4, 3, dtype=torch.long)}
    judge = tiny_judge()
    with torch.inference_mode(), OperationCounter() as alone:
        judge(**inputs)
        judge(**inputs)
    with (
        torch.inference_mode(),
        OperationCounter() as checked,
        checked_rewards(trainer, {0}, ["p"] * 4, ["c"] * 4) as check,
    ):
        columns = [model(**inputs).logits[:, 0] for model in trainer.reward_funcs]
    assert checked.num_reads == alone.num_reads
    assert all(column[0] == UNUSABLE and column[AT] == BAD_REWARD for column in columns)
    with OperationCounter() as count:
        assert [(bad.completion, bad.kind, bad.prompt) for bad in check.bad] == [(AT, "nan", "p")] * 2
    assert count.num_reads == 1


@pytest.mark.parametrize(("num_processes", "raises"), [(1, False), (2, True)])
def test_a_sharded_model_that_fails_ends_the_run(num_processes, raises, trainer):
    give(trainer, tiny_judge("error"))
    accelerator = SimpleNamespace(distributed_type="FSDP", num_processes=num_processes)
    stand_in = SimpleNamespace(reward_funcs=trainer.reward_funcs, reward_func_names=["judge"], accelerator=accelerator)
    with checked_rewards(stand_in) as check:
        [model] = stand_in.reward_funcs
        if raises:
            with pytest.raises(RuntimeError, match="planted"):
                model(input_ids=torch.ones(2, 3, dtype=torch.long))
        else:
            assert model(input_ids=torch.ones(2, 3, dtype=torch.long)).logits.tolist() == [[BAD_REWARD], [BAD_REWARD]]
    assert [(bad.function, bad.whole) for bad in check.bad] == [("judge", True)]


def test_a_model_that_came_from_nowhere_is_called_by_its_class(trainer):
    give(trainer, tiny_judge(NAN))
    trainer.reward_func_names = [""]
    stand_in = SimpleNamespace(
        reward_funcs=trainer.reward_funcs, reward_func_names=[""], accelerator=trainer.accelerator
    )
    with checked_rewards(stand_in) as check:
        [model] = stand_in.reward_funcs
        model(input_ids=torch.ones(AT + 1, 3, dtype=torch.long))
    assert [bad.function for bad in check.bad] == ["Judge"]


# ---- rows, advantages, texts ----


@given(st.lists(st.lists(st.sampled_from([0.5, -2.0, NAN, INF, -INF]), min_size=3, max_size=3), min_size=1, max_size=6))
def test_a_marked_row_is_marked_and_no_other(rows):
    rewards = torch.tensor(rows)
    marked = mark_unscorable(rewards)
    assert marked.dtype == rewards.dtype
    for row, before in zip(marked.tolist(), rows, strict=True):
        wanted = [NAN] * 3 if any(map(math.isinf, before)) else before
        assert str(row) == str(wanted)
    assert holds_bad_reward(rewards) == any(INF in row for row in rows)


def test_striking_reads_nothing():
    rewards = torch.tensor([[1.0, INF], [1.0, 2.0]])
    with OperationCounter() as count:
        mark_unscorable(rewards)
    assert count.num_reads == 0
    with OperationCounter() as count:
        zero_bad_advantages({"advantages": torch.zeros(4)})
    assert count.num_reads == 1


@pytest.mark.parametrize("value", [NAN, INF, -INF, FLOAT32_MAX, -FLOAT32_MAX, 1e30])
@pytest.mark.parametrize("per_token", [False, True])
def test_bad_advantages_become_zero_in_place(value, per_token):
    advantages = torch.tensor([0.5, value, -1e29, 0.0])
    if per_token:
        advantages = torch.stack([torch.full((4,), 0.25), advantages], dim=1)
    before = advantages.clone()
    output = {"advantages": advantages}
    assert zero_bad_advantages(output) == [1]
    assert output["advantages"] is advantages
    assert not advantages[1].any()
    assert torch.equal(advantages[[0, 2, 3]], before[[0, 2, 3]])


def test_an_output_without_advantages_has_none_to_check():
    assert zero_bad_advantages({}) == []
    assert zero_bad_advantages({"advantages": torch.zeros(0)}) == []


def test_a_finding_becomes_a_culprit():
    bad = BadReward("accuracy", 1, "nan", "returned nan", False, "2+2", "5")
    culprit = bad.culprit([10, 11])
    assert (culprit.phase, culprit.reward_function, culprit.samples, culprit.rows) == ("reward", "accuracy", [1], [11])
    assert show([culprit.prompt, culprit.completion]) == ["2+2", "5"]
    assert show([culprit.prompt, culprit.completion], text=False) == ["[redacted]", "[redacted]"]
    assert show(bad.message) == "reward function accuracy returned nan for completion 1 ('5')"
    assert show(bad.message, text=False) == "reward function accuracy returned nan for completion 1 ('[redacted]')"
    assert BadReward("accuracy", None, "length", "x", True).culprit([10]).rows is None


def test_texts_of_every_format_are_flat():
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
    ]
    assert flatten(chat) == "user: [image] What is it? assistant: [tool_calls]"


@pytest.mark.parametrize("conversational", [False, True])
def test_the_completion_that_an_error_held_is_named_only_if_it_is_the_only_one(conversational, trainer):
    texts = ["first text", "", "third text"]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts
    prompts = [[{"role": "user", "content": "hello"}]] * 3 if conversational else ["hello"] * 3

    def reads_one(completions, **kwargs):
        for completion in completions:
            text = completion[0]["content"] if conversational else completion
            if text.startswith("third"):
                int(text)
        return [0.0] * 3

    def holds_two(completions, **kwargs):
        first, *_, last = completions
        raise ValueError(f"{len(first)} {len(last)}")

    def holds_none(completions, **kwargs):
        empty, nothing = "", None
        raise ValueError(f"{empty}{nothing}")

    give(trainer, reads_one, holds_two, holds_none)
    with checked_rewards(trainer) as check:
        score(trainer, completions, prompts)
    assert [bad.completion for bad in check.bad] == [2, None, None]
    assert check.bad[0].text == ("assistant: third text" if conversational else "third text")
    assert "while it held completion 2" in check.bad[0].message


def test_a_finding_of_a_model_goes_without_texts_that_nobody_gave(trainer):
    give(trainer, tiny_judge(NAN))
    with checked_rewards(trainer) as check:
        trainer.reward_funcs[0](input_ids=torch.ones(4, 3, dtype=torch.long))
    assert [(bad.completion, bad.prompt, bad.text) for bad in check.bad] == [(AT, None, None)]
