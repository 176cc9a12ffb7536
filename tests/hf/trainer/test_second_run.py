"""Counts, statistics and budgets belong to one `train()`: a second one, on a model made anew or not, starts from zero."""

from hf_nanguard.testing import Fault, plant

from ...trainers import build, events_of, metric_rows_of


def test_counts_of_a_second_run_start_from_zero(tmp_path):
    trainer = build("plain", tmp_path)
    plant(trainer, Fault("loss", step=1, micro_step=0), Fault("loss", step=2, micro_step=1))
    trainer.train()
    assert trainer.nanguard.guard.counter.dropped == 2
    trainer.train()
    rows = metric_rows_of(trainer)
    assert [row["nanguard/dropped_microbatches"] for row in rows] == [0, 1, 2, 2] + [0] * 4


def test_a_resumed_run_goes_on_with_the_counts_of_its_checkpoint(tmp_path):
    trainer = build("plain", tmp_path, save_strategy="steps", save_steps=2)
    plant(trainer, Fault("loss", step=1, micro_step=0))
    trainer.train()
    trainer.args.max_steps = 6
    trainer.train(resume_from_checkpoint=True)
    rows = [row for row in trainer.state.log_history if "nanguard/dropped_microbatches" in row]
    assert rows[-1]["nanguard/dropped_microbatches"] == 1


def test_a_model_made_anew_is_not_compared_with_a_trained_one(tmp_path):
    """As in a search of hyperparameters: its loss is where the first run began, far above where that ended."""
    losses = [4.0 * 0.9**step + 0.02 for step in range(120)]
    for name, runs in {"anew": [losses, losses], "goes on": [losses + losses]}.items():
        trainer = build("plain", tmp_path / name)
        for run in runs:
            with trainer.nanguard.training():
                for step, loss in enumerate(run):
                    trainer.nanguard.guard.loss_watch.observe(step, loss)
        reported = {event["signal"] for event in events_of(trainer, trained=False)}
        assert reported == (set() if name == "anew" else {"loss_spike"})
