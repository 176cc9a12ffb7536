"""Counts and the metrics made of them."""

import json

from hf_nanguard.core.step.counters import RECENT, Counter


def test_a_fresh_run_is_a_success():
    assert Counter().as_metrics() == {
        "nanguard/skipped_steps": 0,
        "nanguard/dropped_microbatches": 0,
        "nanguard/success_rate": 1.0,
        "nanguard/success_rate_recent": 1.0,
        "nanguard/grad_norm_max": 0.0,
    }


def test_rates_are_used_over_seen():
    counter = Counter()
    for _ in range(150):
        counter.count_microbatches(4, 0)
    for _ in range(10):
        counter.count_microbatches(4, 1)
    metrics = counter.as_metrics()
    assert metrics["nanguard/dropped_microbatches"] == 10
    assert metrics["nanguard/success_rate"] == 630 / 640
    assert metrics["nanguard/success_rate_recent"] == 1 - 10 / RECENT


def test_the_largest_norm_is_that_since_the_last_row():
    counter = Counter()
    counter.grad_norm_max = 3.0
    assert counter.as_metrics()["nanguard/grad_norm_max"] == 3.0
    assert counter.as_metrics()["nanguard/grad_norm_max"] == 0.0


def test_gradients_are_counted_by_kind():
    counter = Counter()
    counter.count_gradients({"a": "nan", "b": "inf", "c": "nan"})
    counter.count_gradients({"a": "inf"})
    assert (counter.num_nan, counter.num_inf) == (2, 2)


def test_scaler_skips_are_shown_once_there_are_any():
    counter = Counter()
    assert "nanguard/scaler_skips" not in counter.as_metrics()
    counter.scaler_skips = 2
    assert counter.as_metrics()["nanguard/scaler_skips"] == 2


def test_state_makes_the_round_trip():
    counter = Counter()
    counter.count_microbatches(130, 7)
    counter.count_gradients({"a": "nan", "b": "inf"})
    counter.skipped_steps, counter.scaler_skips, counter.grad_norm_max = 3, 4, 5.0
    again = Counter()
    again.count_microbatches(1, 1)
    again.load_state_dict(json.loads(json.dumps(counter.state_dict(), allow_nan=False)))
    assert vars(again) == vars(counter)
    again.count_microbatches(200, 0)
    assert len(again.recent) == RECENT


def test_a_state_of_another_version_keeps_what_it_knows():
    counter = Counter()
    counter.load_state_dict({"seen": 5, "unknown": 1})
    assert counter.seen == 5
    assert counter.dropped == 0
    assert "unknown" not in vars(counter)
