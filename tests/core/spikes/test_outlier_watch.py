"""Which steps are examined, and how much a run pays for examinations that come to nothing."""

import json
import random

from hf_nanguard.core.spikes.outlier_watch import FIRST_WAIT, MAX_APART, MIN_SEEN, STEPS_EACH, WAIT_FACTOR, OutlierWatch
from hf_nanguard.core.vocabulary import Signal


def seen(count=60, micro_batches=1, spread=0.05):
    watch, rng = OutlierWatch(3), random.Random(0)
    for step in range(count):
        losses = [rng.lognormvariate(0.0, spread) for _ in range(micro_batches)]
        assert watch.suspect(step, losses, rng.lognormvariate(0.0, spread), True) is None
    return watch


def test_the_micro_batch_whose_loss_is_out_of_line_is_suspected():
    suspicion = seen(micro_batches=4).suspect(60, [1.0, 1.0, 3.0, 2.5], 1.0, True)
    assert (suspicion.signal, suspicion.micro_batches) == (Signal.LOSS_SPIKE, [2, 3])
    assert 0.9 < suspicion.usual < 1.1 < suspicion.threshold < 2.5


def test_a_norm_out_of_line_suspects_all_of_them():
    suspicion = seen(micro_batches=2).suspect(60, [1.0, 1.0], 3.0, True)
    assert (suspicion.signal, suspicion.micro_batches) == (Signal.GRAD_SPIKE, [0, 1])


def test_among_ranks_only_the_norm_counts():
    assert seen().suspect(60, [3.0], 1.0, False) is None


def test_many_outliers_do_not_hide_one_another():
    watch, rng = OutlierWatch(3), random.Random(1)
    found = 0
    for step in range(400):
        is_bad = step > 50 and rng.random() < 0.2
        loss = rng.lognormvariate(0.0, 0.1) * (3.5 if is_bad else 1.0)
        found += watch.suspect(step, [loss], 1.0, True) is not None and is_bad
    assert found > 50


def test_a_spike_need_not_wait_but_anything_else_does():
    watch = seen(MIN_SEEN - 1)
    assert watch.is_due(0, True)
    assert not watch.is_due(0, False)
    watch.suspect(MIN_SEEN, [1.0], 1.0, True)
    assert watch.is_due(MIN_SEEN, False)
    watch.conclude(100, False, False)
    assert watch.is_due(101, True)
    assert not watch.is_due(100 + FIRST_WAIT - 1, False)
    assert watch.is_due(100 + FIRST_WAIT, False)
    watch.conclude(200, False, False)
    assert not watch.is_due(200 + WAIT_FACTOR * FIRST_WAIT - 1, False)
    watch.conclude(300, False, True)
    assert watch.is_due(301, False)


def test_a_run_pays_for_few_examinations_that_come_to_nothing():
    watch = seen()
    examined = [
        step for step in range(60, 10_000) if watch.is_due(step, False) and watch.conclude(step, False, False) is None
    ]
    assert len(examined) <= 10
    for step in range(50, 100):  # each with another verdict than rows
        watch.conclude(step, True, False, True)
    for step in (100, 200, 300):
        assert watch.is_due(step, True)
        watch.conclude(step, True, False)
    assert not watch.is_due(9_999, True)
    watch.begin_run()
    assert watch.is_due(0, True)


def test_the_values_survive_a_checkpoint():
    watch, other = seen(), OutlierWatch(3)
    other.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert other.losses.start == watch.losses.start is not None
    assert other.norms.threshold() == watch.norms.threshold()


def test_examinations_of_losses_that_are_apart_are_bounded():
    watch = OutlierWatch(3)
    examined = 0
    for step in range(5000):
        if watch.is_due(step, False, is_apart=True):
            examined += 1
            watch.conclude(step, False, True, True, is_apart=True)
            assert examined <= 3 + step // STEPS_EACH
    assert examined == MAX_APART
