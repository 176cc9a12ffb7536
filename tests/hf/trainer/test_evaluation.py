"""In evaluation nothing is dropped: a metric that is not finite is told, once for each dataset, and never the best."""

import math

import pytest
from transformers import Trainer

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
