"""The loss against the run's own history: healthy series of many kinds are silent, spikes and divergence are reported once."""

import json
import math

import numpy as np
import pytest

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.loss_divergence import DivergenceDetector
from hf_nanguard.core.monitors.loss_watch import LossWatch
from hf_nanguard.core.monitors.spike_detector import SpikeDetector
from hf_nanguard.core.ranks import Ranks

N = 500
STEPS = np.arange(N)


class Watched:
    """A loss watch, a detector of norms, and what they have reported."""

    def __init__(self):
        self.events = []
        self.losses = LossWatch(Journal(Ranks("cpu"), self.events.append))
        self.norms = SpikeDetector()
        self.norm_spikes = []

    def run(self, losses, norms=(), begin=0):
        for step, loss in enumerate(losses, begin):
            self.losses.observe(step, float(loss))
        for step, norm in enumerate(norms, begin):
            if self.norms.add(step, float(norm)):
                self.norm_spikes.append(step)
        return self

    @property
    def told(self):
        return [(event["signal"], event["step"]) for event in self.events]


def noise(rng, low=0.01, high=0.35):
    return np.exp(rng.normal(0, rng.uniform(low, high), N))


def decay(rng, first=None):
    first = math.exp(rng.uniform(-1, 2.5)) if first is None else first
    last = first * rng.uniform(0.01, 0.7)
    return last + (first - last) * np.exp(-STEPS / rng.uniform(10, 400))


def curriculum(rng):
    bounds, start, parts = np.linspace(0, N, rng.integers(3, 7)).astype(int), 2.0, []
    for size in np.diff(bounds):
        low = start * rng.uniform(0.3, 0.7)
        parts.append(low + (start - low) * np.exp(-np.arange(size) / rng.uniform(10, 60)))
        start = min(low * rng.uniform(1.2, 2.0), 2.8)
    return np.concatenate(parts) * noise(rng)


def warm_up(rng):
    length = rng.integers(5, 100)
    return np.where(length > STEPS, 4 * (1 + 0.15 * STEPS / length), decay(rng, 4.0)) * noise(rng)


def restarts(rng):
    period = rng.integers(40, 200)
    rate = 0.5 * (1 + np.cos(np.pi * (STEPS % period) / period))
    return decay(rng) * (1 + rng.uniform(0.05, 0.5) * rate) * noise(rng)


def tasks(rng):
    levels = np.exp(rng.uniform(-1.2, 1.2, rng.integers(2, 5)))
    return levels[rng.integers(0, len(levels), N)] * noise(rng) * (0.4 + 0.6 * np.exp(-STEPS / 100))


def policy_loss(rng):
    return rng.normal(0, rng.choice([1e-4, 0.01, 0.1, 0.5]), N) * (1 + 0.3 * np.abs(rng.standard_t(3, N)))


def sparse_policy_loss(rng):
    kl = 0.04 * np.abs(np.cumsum(rng.normal(0, 0.03, N)))
    return np.where(rng.random(N) < 0.6, 0.0, rng.normal(0, 0.05, N)) + kl * (STEPS > 0)


HEALTHY = {
    "decay": lambda rng: decay(rng) * noise(rng),
    "plateau": lambda rng: 3.0 * noise(rng),
    "heavy tails": lambda rng: decay(rng) * (1 + 0.1 * np.abs(rng.standard_t(4, N))),
    "small batches": lambda rng: decay(rng) * np.exp(rng.normal(0, 0.7, N)),
    "gamma": lambda rng: decay(rng) * rng.gamma(3, 1, N) / 3,
    "memorised": lambda rng: 5 * np.exp(-STEPS / 30) * noise(rng) + 1e-5 * np.exp(rng.normal(0, 1, N)),
    "warm-up": warm_up,
    "curriculum": curriculum,
    "restarts": restarts,
    "tasks": tasks,
    "policy loss": policy_loss,
    "sparse policy loss": sparse_policy_loss,
}  # fmt: skip


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_are_silent(kind):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        norms = np.exp(rng.normal(0, rng.uniform(0.1, 0.6), N)) * (1 + 5 * np.exp(-STEPS / 20))
        watched = Watched().run(HEALTHY[kind](rng), np.where(rng.random(N) < 0.2, 0.0, norms))
        assert watched.told == [], seed
        assert watched.norm_spikes == [], seed


@pytest.mark.parametrize(("factor", "at"), [(5, 40), (5, 60), (10, 20), (10, 60), (100, 6), (100, 20), (1e6, 3)])
def test_a_spike_is_reported_with_numbers(factor, at):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        losses = (1 + 2 * np.exp(-np.arange(100) / 60)) * np.exp(rng.normal(0, 0.05, 100))
        usual = np.median(losses[max(at - 30, 0) : at])
        losses[at] *= factor
        losses[at + 1] *= 1 + (factor - 1) * 0.2  # on its way back
        watched = Watched().run(losses)
        assert watched.told == [("loss_spike", at)]
        values = watched.events[0]["values"]
        assert values["loss"] == pytest.approx(losses[at])
        assert values["usual"] == pytest.approx(usual, rel=1e-3)


def diverging(top, rise=20, at=80, first=3.0, best=0.5, n=300):
    steps = np.arange(n)
    losses = best + (first - best) * np.exp(-steps / 15)
    losses += (top - losses) * (1 - np.exp(-np.maximum(steps - at, 0) / rise))
    return losses * np.exp(np.random.default_rng(0).normal(0, 0.08, n))


@pytest.mark.parametrize("top", [2.7, 3.0, 9.0, 1e4])
@pytest.mark.parametrize("rise", [1, 20, 60])
def test_a_loss_that_stays_high_has_diverged(top, rise):
    watched = Watched().run(diverging(top, rise))
    [(signal, step)] = [told for told in watched.told if told[0] != "loss_spike"]
    event = watched.events[-1]
    assert signal == "loss_diverged"
    assert event["action"] == "observed"
    assert 75 < event["values"]["since_step"] <= min(80 + rise, step)
    assert event["values"]["loss"] > 1.6 * event["values"]["usual"]
    assert f"since step {event['values']['since_step']}" in event["message"]


@pytest.mark.parametrize("first", [0.07, 2.0])
def test_a_run_that_diverges_at_once_is_reported_within_a_few_steps(first):
    losses = [first, 400 * first, *(first * 300 * math.exp(x) for x in np.random.default_rng(1).normal(0, 0.3, 14))]
    watched = Watched().run(losses)
    assert "loss_diverged" in dict(watched.told)
    assert watched.events[-1]["values"]["usual"] == pytest.approx(first)


def noisy(levels, sigma, seed=0):
    return np.array(levels) * np.exp(np.random.default_rng(seed).normal(0, sigma, len(levels)))


@pytest.mark.parametrize("sigma", [0.3, 0.7])
@pytest.mark.parametrize(("num_healthy", "factor"), [(1, 30), (2, 30), (10, 9)])
@pytest.mark.parametrize("first", [0.8, 5.6])
def test_a_noisy_divergence_is_reported_within_thirty_steps(first, num_healthy, factor, sigma):
    """A learning rate far too high: a steady loss, then one that is many times as large and far noisier."""
    for seed in range(5):
        losses = [first] * num_healthy + list(noisy([factor * first] * 90, sigma, seed))
        [step] = [step for signal, step in Watched().run(losses).told if signal == "loss_diverged"]
        assert step <= num_healthy + 30, seed


def test_a_first_loss_that_is_low_by_chance_is_no_reference_for_long():
    for seed in range(20):
        squares = np.random.default_rng(seed).normal(0, 1, N) ** 2  # a regression with batches of one
        squares[0] = 0.003
        assert all(step <= 40 for _, step in Watched().run(squares).told), seed


def test_a_policy_loss_that_explodes_is_reported():
    rng = np.random.default_rng(0)
    losses = np.concatenate([policy_loss(rng)[:60], 500 * np.exp(rng.normal(0, 0.3, 30))])
    assert dict(Watched().run(losses).told).keys() == {"loss_spike", "loss_diverged"}


def random_walk(rng):
    return 3 * np.exp(np.cumsum(rng.normal(0, np.exp(rng.uniform(math.log(0.005), math.log(0.1))), N)))


def autoregression(rng):
    memory, spread = rng.choice([0.9, 0.98, 0.99]), rng.uniform(0.1, 0.6)
    value, logs = 0.0, []
    for move in rng.normal(0, spread * math.sqrt(1 - memory**2), N):
        value = memory * value + move
        logs.append(value)
    return 3 * np.exp(np.array(logs))


def reported(losses, norms):
    detector = DivergenceDetector()
    return any(detector.add(step, *map(float, pair)) for step, pair in enumerate(zip(losses, norms, strict=True)))


@pytest.mark.parametrize("kind", [random_walk, autoregression])
def test_a_loss_that_wanders_is_rarely_reported_unless_its_gradient_grows(kind):
    """Of such series every second one was reported when noise was taken from one loss to the next: it has a memory. With a
    norm that grows like the loss they are those of a model that diverges, as far as they rise at all."""
    alone, with_norm = 0, 0
    for seed in range(40):
        rng = np.random.default_rng([7, seed])
        losses, noise = kind(rng), np.exp(rng.normal(0, 0.25, N))
        alone += reported(losses, noise)
        with_norm += reported(losses, losses**1.5 * noise)
    assert alone <= 5
    assert with_norm >= 2 * alone + 5


def harder_source(rng, num_steps):
    """A model that has hardly anything left to learn, whose data come from one source after another."""
    begin, factor = rng.integers(60, 250), rng.uniform(1.3, 1.8)
    return np.where(np.arange(num_steps) < begin, 1.3, 1.3 * factor) * np.exp(rng.normal(0, 0.12, num_steps))


def sorted_rows(rng, num_steps):
    """Rows from the easiest to the hardest, in epochs of two thirds of the steps."""
    return 1.2 * np.exp(0.7 * (1.5 * np.arange(num_steps) / num_steps % 1) + rng.normal(0, 0.1, num_steps))


@pytest.mark.parametrize("num_steps", [300, 900])
@pytest.mark.parametrize("kind", [harder_source, sorted_rows])
def test_data_that_become_harder_are_rarely_reported(kind, num_steps):
    """The norm of a healthy model follows the root of its loss. Every second series was reported when a rise by a quarter was enough
    whenever it began."""
    told = 0
    for seed in range(20):
        rng = np.random.default_rng([11, seed])
        losses = kind(rng, num_steps)
        told += reported(losses, losses**0.5 * np.exp(rng.normal(0, 0.3, num_steps)))
    assert told <= 2


@pytest.mark.parametrize(
    ("factor", "length", "growth", "num_steps"),
    [(1.4, 100, 1.0, 1200), (1.86, 100, 1.0, 600), (1.97, 1, 1.0, 500), (1.57, 1, 0.3, 450), (1.74, 20, 0.1, 450)],
)
def test_a_late_rise_that_the_norm_does_not_follow_is_reported(factor, length, growth, num_steps):
    """A model that never learned much is ruined late: its loss stays at a somewhat higher level, with a norm that is as before, or
    that vanishes, as that of a saturated model. None was reported when a late rise had to be by twice."""
    told, share = 0, np.clip((np.arange(num_steps) - 250) / length, 0, 1)
    for seed in range(12):
        rng = np.random.default_rng([17, seed])
        losses = 7.0 * factor**share * np.exp(rng.normal(0, 0.08, num_steps))
        told += reported(losses, growth**share * np.exp(rng.normal(0, 0.2, num_steps)))
    assert told >= 8, told


def test_a_norm_that_is_not_known_says_nothing_about_a_late_rise_until_it_has_lasted():
    noise = np.exp(np.random.default_rng(19).normal(0, 0.08, 800))
    losses = np.where(np.arange(800) < 200, 2.0, 3.4) * noise
    assert not reported(losses[:450], np.ones(450))
    assert reported(losses, np.ones(800))


def test_the_step_since_which_a_late_rise_lasts_is_named_long_after():
    noise = np.exp(np.random.default_rng(23).normal(0, 0.05, 900))
    detector, losses = DivergenceDetector(), np.where(np.arange(900) < 250, 2.0, 3.6) * noise
    [found] = filter(None, (detector.add(step, float(loss)) for step, loss in enumerate(losses)))
    assert 245 <= found.since <= 255
    assert found.usual == pytest.approx(2.0, rel=0.1)


def test_a_checkpoint_of_before_the_early_level_was_kept_gets_it_from_the_history():
    """The run of the test below, which continues from one without this level."""
    for seed in range(5):
        noise = np.exp(np.random.default_rng([29, seed]).normal(0, 0.06, 300))
        losses, first, resumed = (
            np.where(np.arange(300) < 12, 2.0, 2.9) * noise,
            DivergenceDetector(),
            DivergenceDetector(),
        )
        for step in range(65):
            assert first.add(step, float(losses[step])) is None, seed
        resumed.load_state_dict({**first.state_dict(), "early": None})
        assert any(resumed.add(step, float(losses[step])) for step in range(65, 300)), seed


def test_a_late_rise_is_reported_once_while_it_lasts():
    """Also where the loss still moves, so that it is steady at times only."""
    rng, steps = np.random.default_rng(31), np.arange(1500)
    losses = np.where(steps < 250, 7.0, 12.5 * np.exp(0.06 * np.sin(steps / 60))) * np.exp(rng.normal(0, 0.05, 1500))
    detector, norms = DivergenceDetector(), np.exp(rng.normal(0, 0.2, 1500))
    found = [detector.add(step, float(losses[step]), float(norms[step])) for step in steps.tolist()]
    assert len(list(filter(None, found))) == 1


def test_a_floor_holds_for_the_early_level_too():
    detector = DivergenceDetector()
    for step in range(80):
        detector.add(step, 0.01)
    detector.raise_floor(3.0)
    assert detector.early == pytest.approx(math.log(3.0))


def test_a_small_rise_that_begins_with_the_run_is_reported():
    """A rate that is too high ruins the model before it has learned anything; its norm does not grow."""
    for seed in range(10):
        rng = np.random.default_rng([13, seed])
        losses = [2.0] * 12 + [3.4 * math.exp(x) for x in rng.normal(0, 0.06, 288)]
        assert reported(losses, np.exp(rng.normal(0, 0.3, 300))), seed


@pytest.mark.parametrize("rise", [1, 30])
def test_a_moderate_divergence_in_a_noisy_loss_is_found_by_its_gradient(rise):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        losses = diverging(6.0, rise) * np.exp(rng.normal(0, 0.3, 300))
        assert reported(losses, losses * np.exp(rng.normal(0, 0.25, 300))), seed


def test_a_second_divergence_is_reported_after_a_recovery():
    losses = np.concatenate([diverging(6.0, 1)[:200], np.full(120, 0.5), np.full(80, 7.0)])
    told = [step for signal, step in Watched().run(losses).told if signal == "loss_diverged"]
    assert len(told) == 2
    assert told[1] > 320


def test_the_history_survives_a_checkpoint():
    losses = diverging(3.0)
    first = Watched().run(losses[:75])
    state = json.loads(json.dumps(first.losses.state_dict(), allow_nan=False))
    resumed = Watched()
    resumed.losses.load_state_dict(state)
    resumed.run(losses[75:], begin=75)
    assert resumed.told == Watched().run(losses).told
    assert resumed.told


def test_nonfinite_losses_are_not_part_of_it():
    losses = list(diverging(3.0))
    spoiled = [loss for pair in zip(losses, [math.nan, math.inf] * 150, strict=True) for loss in pair]
    watched = Watched()
    for step, loss in enumerate(spoiled):
        watched.losses.observe(step // 2, loss)
    assert watched.told == Watched().run(losses).told
