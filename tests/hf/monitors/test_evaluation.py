"""In evaluation nothing is dropped: a metric that is not finite is told, once for each dataset, and never the best."""

import math

import pytest
from transformers import Trainer

from hf_nanguard.hf.compat.trainer import filters_evaluation
from hf_nanguard.hf.monitors import evaluation

from ...models import token_dataset
from ...trainers import build, events_of


class _Spoiled(Trainer):
    """A trainer whose evaluation losses are NaN from step 2 on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not model.training and self.state.global_step >= 2:
            loss = loss * math.nan
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("several", [False, True])
def test_a_bad_evaluation_is_told_once(several, tmp_path):
    dataset = token_dataset(4, seed=5)
    extra = {"eval_dataset": {"a": dataset, "b": dataset} if several else dataset}
    trainer = build("plain", tmp_path, _Spoiled, eval_strategy="steps", eval_steps=2, max_steps=2, extra=extra)
    trainer.train()
    found = [(event["signal"], *event["values"]) for event in events_of(trainer)]
    names = ["eval_a_loss", "eval_b_loss"] if several else ["eval_loss"]
    assert found == [("eval_nonfinite", name) for name in names]


def test_the_metric_that_chooses_the_best_model_is_told_too(tmp_path):
    trainer = build("plain", tmp_path, metric_for_best_model="perplexity", greater_is_better=True)
    assert trainer.nanguard.evaluation.best_metric == "eval_perplexity"
    assert trainer.nanguard.evaluation.spoils_best({"eval_perplexity": math.inf})
    assert trainer._determine_best_metric({"eval_perplexity": math.inf}, None) is False
    assert trainer.state.best_metric is None
    with trainer.nanguard.evaluation.watched():
        trainer.nanguard.evaluation.check({"eval_perplexity": math.inf, "eval_loss": 2.0})
    assert [event["values"] for event in events_of(trainer)] == [{"eval_perplexity": "inf"}]


class _BadBatch(Trainer):
    """A trainer with a NaN loss in the evaluation batch that begins with row 0."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not model.training and inputs["input_ids"][0, 0] == 3:
            loss = loss * math.nan
        return (loss, outputs) if return_outputs else loss


class _Filtered(_BadBatch):
    """Leaves that batch out of the mean, as transformers does since 5.23."""

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_loss"] = 4.0
        return output


@pytest.mark.parametrize("has_labels", [True, False])
def test_a_loss_that_the_host_leaves_out_is_told_unless_its_batch_has_no_label(has_labels, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "filters_evaluation", lambda trainer: True)
    rows = list(token_dataset(8))
    if not has_labels:
        rows = [{**row, "labels": [-100] * 8 if i < 4 else row["labels"]} for i, row in enumerate(rows)]
    settings = {"per_device_eval_batch_size": 4, "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    saving = {"save_strategy": "best", "metric_for_best_model": "loss"}
    trainer = build("plain", tmp_path, _Filtered, extra={"eval_dataset": rows}, **settings, **saving)
    trainer.train()
    found = [(event["signal"], event["micro_step"], event["values"]) for event in events_of(trainer)]
    assert found == ([("eval_nonfinite", 0, {"eval_loss": 4.0, "loss": "nan"})] if has_labels else [])
    assert trainer.state.best_metric == (None if has_labels else 4.0)


@pytest.mark.parametrize("active", [True, False])
def test_whether_the_host_filters_an_evaluation_is_known(active, tmp_path):
    settings = {"logging_nan_inf_filter": active, "per_device_eval_batch_size": 4}
    extra = {"eval_dataset": token_dataset(8)}
    trainer = build("plain", tmp_path, _BadBatch, guard=False, extra=extra, **settings)
    assert math.isfinite(trainer.evaluate()["eval_loss"]) == filters_evaluation(trainer)
