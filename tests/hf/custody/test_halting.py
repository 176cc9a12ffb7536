"""How a run ends: what the bad steps have in common, which checkpoint to resume from, and a summary."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_nanguard import GuardArguments, NonFiniteError
from hf_nanguard.report.run_files import read_events, read_jsonl
from hf_nanguard.testing import Fault, plant

from ...laws.ways import WAYS, build_guarded, params
from ...models import token_dataset
from ...trainers import build, events_of, stock_class

LAYER = "model.layers.1.mlp.down_proj.weight"


def run(folder, *faults, kind="plain", resume=None, settings=None, **overrides):
    guard = GuardArguments(**{"nanguard_max_bad_steps": 4, "nanguard_max_rewinds": 0, **(settings or {})})
    overrides = {"gradient_accumulation_steps": 1, "max_steps": 20, **overrides}
    trainer = build(kind, folder, extra={"guard": guard}, **overrides)
    plant(trainer, *faults)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except NonFiniteError as error:
        return trainer, str(error)
    return trainer, None


def test_a_halt_says_what_the_bad_steps_have_in_common(tmp_path):
    model_fault = [Fault("label", step, value=777) for step in range(3, 7)]
    _, message = run(tmp_path, *model_fault)
    assert "after 4 bad steps in a row" in message
    assert "4 of these 4 bad steps: label_out_of_range" in message
    assert "nanguard_max_bad_steps" in message
    assert "Compare" not in message


def test_a_halt_names_cause_module_and_what_fixed_the_examined_batch(tmp_path):
    class Overflowing(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + torch.exp(x.float().abs().sum() * 1e4).to(x.dtype) * 0.0

    guard = GuardArguments(nanguard_max_bad_steps=3)
    trainer = build("plain", tmp_path, gradient_accumulation_steps=1, max_steps=9, extra={"guard": guard})
    layer = trainer.model.model.layers[1].mlp
    layer.down_proj = Overflowing(layer.down_proj)
    with pytest.raises(NonFiniteError, match=r"3 of these 3 bad steps: exp_overflow in .*layers\.1\.mlp\.down_proj"):
        trainer.train()


def test_a_resumed_run_has_its_full_budget(tmp_path):
    faults = [Fault("gradient", step, parameter=LAYER) for step in range(4, 8)]
    trainer, message = run(tmp_path, *faults)
    assert message is not None
    assert trainer.state.global_step == 7
    again, message = run(tmp_path, *[Fault("gradient", step, parameter=LAYER) for step in (7, 8, 9)],
                         resume=str(tmp_path / "checkpoint-7"))  # fmt: skip
    assert message is None
    assert again.state.global_step == 20


def test_the_last_good_checkpoint_is_known_after_a_resume(tmp_path):
    run(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    _, message = run(tmp_path, Fault("weight", 5, 0, parameter=LAYER), resume=str(tmp_path / "checkpoint-4"))
    assert f"The last good checkpoint is {tmp_path / 'checkpoint-4'}." in message


def test_a_learning_rate_that_a_resume_overrides_is_reported(tmp_path, caplog):
    run(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, learning_rate=3e-3)
    assert "was asked for" not in caplog.text
    run(tmp_path, max_steps=4, learning_rate=3e-3, resume=str(tmp_path / "checkpoint-2"))
    assert "was asked for" not in caplog.text
    run(tmp_path, max_steps=4, learning_rate=1e-5, resume=str(tmp_path / "checkpoint-2"))
    [line] = [record.getMessage() for record in caplog.records if "was asked for" in record.getMessage()]
    assert "learning_rate=1e-05 was asked for, but the schedule of the checkpoint is resumed with 0.003" in line


def test_rates_of_parameter_groups_are_nobodys_request(tmp_path, caplog):
    class Layered(stock_class("plain")):
        def create_optimizer(self, model=None):
            rates = enumerate(self.model.parameters(), 1)
            self.optimizer = torch.optim.SGD(
                [{"params": [p], "lr": self.args.learning_rate * 0.9**i} for i, p in rates]
            )
            return self.optimizer

    for steps, resumed in ((2, None), (4, str(tmp_path / "checkpoint-2"))):
        trainer = build("plain", tmp_path, Layered, max_steps=steps, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resumed)
    assert "was asked for" not in caplog.text


@pytest.mark.parametrize("best", [False, True])
def test_the_checkpoint_from_before_the_first_bad_step_is_kept_and_named(best, tmp_path):
    bad = [Fault("gradient", step, parameter=LAYER) for step in (5, 7, 9, 11, 12, 13, 14)]
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True} if best else {}
    extra = {
        "guard": GuardArguments(nanguard_max_bad_steps=4, nanguard_max_rewinds=0),
        "eval_dataset": token_dataset(4),
    }
    trainer = build("plain", tmp_path, gradient_accumulation_steps=1, max_steps=20, save_strategy="steps", save_steps=2,
                    save_total_limit=2, extra=extra, **evaluation)  # fmt: skip
    plant(trainer, *bad)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    earlier = tmp_path / "checkpoint-4"
    assert earlier.is_dir()
    assert f"The first of the bad steps is 5; resume from {earlier}" in str(caught.value)
    assert (tmp_path / "checkpoint-14").is_dir()
    num_others = len(list(tmp_path.glob("checkpoint-*"))) - 1
    assert num_others == 2, "the limit holds for the others"


def test_a_checkpoint_that_was_saved_while_the_run_diverged_is_not_advised(tmp_path):
    trainer = build("plain", tmp_path, gradient_accumulation_steps=1, max_steps=300, save_strategy="steps", save_steps=5,
                    learning_rate=10.0, lr_scheduler_type="constant_with_warmup", warmup_steps=20, max_grad_norm=0, optim="sgd",
                    extra={"guard": GuardArguments(nanguard_max_rewinds=0)})  # fmt: skip
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    first = min(event["step"] for event in events_of(trainer) if event["signal"].endswith(("_spike", "_diverged")))
    advised = int(re.search(r"resume from .*checkpoint-(\d+)", str(caught.value))[1])
    saved = {int(path.name.split("-")[1]) for path in Path(tmp_path).glob("checkpoint-*")}
    assert advised == max(step for step in saved if step < first)


def test_rotation_is_the_hosts_own_without_bad_steps(tmp_path):
    run(tmp_path, max_steps=8, save_strategy="steps", save_steps=2, save_total_limit=2)
    assert {path.name for path in Path(tmp_path).glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-8"}


def test_runs_in_one_folder_are_told_apart(tmp_path):
    first, _ = run(tmp_path, Fault("gradient", 1, parameter=LAYER), max_steps=3, save_strategy="steps", save_steps=2)
    run(tmp_path, Fault("gradient", 2, parameter=LAYER), max_steps=4, resume=str(tmp_path / "checkpoint-2"))
    events = events_of(first)
    assert len({event["run"] for event in events}) == len(events) == 2
    assert [event["step"] for event in read_events(tmp_path)] == [2]
    rows = list(read_jsonl(tmp_path / "nanguard" / "metrics.jsonl"))
    assert list(dict.fromkeys(row["run"] for row in rows)) == [event["run"] for event in events]
    run(tmp_path, max_steps=2)
    assert read_events(tmp_path) == [], "the last run had none"


def test_an_event_leaves_out_a_norm_that_was_not_measured(tmp_path):
    trainer, _ = run(tmp_path, Fault("label", 1, 1, value=777), gradient_accumulation_steps=3, max_steps=3)
    [event] = events_of(trainer)
    assert event["signal"] == "label_out_of_range"
    assert "grad_norm" not in event["values"]


def test_a_run_with_events_ends_with_a_summary(tmp_path, caplog):
    faults = [Fault("label", 1, value=777), Fault("label", 3, value=777), Fault("gradient", 5, parameter=LAYER)]
    run(tmp_path, *faults, max_steps=8)
    text = caplog.records[-1].getMessage()
    assert len(text.splitlines()) <= 9
    assert re.search(r"2 x label_out_of_range skipped at steps 1 and 3 \(dataset rows", text)
    assert "1 x grad_nonfinite skipped at step 5" in text
    assert text.endswith(f"\n  more: nanguard report {tmp_path}")


@pytest.mark.parametrize("way", WAYS)
def test_a_run_ends_with_a_summary_whichever_way_it_is_guarded(way, tmp_path, caplog):
    trainer = build_guarded(way, "plain", tmp_path, gradient_accumulation_steps=1, max_steps=3)
    plant(trainer, Fault("gradient", 1, parameter=LAYER))
    trainer.train()
    assert caplog.text.count("events of this run") == 1


def test_a_healthy_run_prints_nothing(tmp_path, caplog):
    trainer, _ = run(tmp_path, max_steps=3)
    assert trainer.state.global_step == 3
    assert not [record for record in caplog.records if record.name == "hf_nanguard"]


@pytest.mark.parametrize(
    ("way", "mode"), params(*product(WAYS, ("act",)), ("class", "observe"), cases=product(WAYS, ("act", "observe")))
)
def test_no_path_saves_weights_that_a_run_has_made_non_finite(way, mode, tmp_path):
    guard = GuardArguments(nanguard_on_halt="stop", nanguard_mode=mode, nanguard_max_rewinds=0)
    trainer = build_guarded(way, "plain", tmp_path / "run", guard, gradient_accumulation_steps=1)
    plant(trainer, Fault("weight", 2, parameter=LAYER))
    trainer.save_model(tmp_path / "before")
    trainer.train()
    trainer.save_model(tmp_path / "after")
    assert (tmp_path / "before" / "model.safetensors").is_file()
    assert (tmp_path / "after").exists() == (mode == "observe")
    event = events_of(trainer)[-1]
    action = "refused" if mode == "act" else "observed"
    assert (event["signal"], event["action"]) == ("checkpoint_nonfinite", action)
    assert mode == "observe" or event["culprit"]["parameter"] == LAYER
    assert str(tmp_path / "after") in event["message"]


def test_weights_that_are_infinite_by_design_are_saved(tmp_path):
    trainer = build("plain", tmp_path / "run")
    trainer.model.mask = torch.nn.Parameter(torch.tensor([0.0, -torch.inf]))
    trainer.save_model(tmp_path / "before")
    trainer.train()
    trainer.save_model(tmp_path / "after")
    assert (tmp_path / "before" / "model.safetensors").is_file()
    assert (tmp_path / "after" / "model.safetensors").is_file()
    assert events_of(trainer) == []


def test_a_halt_does_not_call_a_diverged_state_good(tmp_path):
    guard = GuardArguments(nanguard_max_bad_steps=3)
    trainer = build("plain", tmp_path, gradient_accumulation_steps=1, max_steps=9, extra={"guard": guard})
    watch = trainer.nanguard.guard.loss_watch

    class Diverged(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            for step in range(30):
                watch.observe(-30 + step, 2.0 if step < 3 else 900.0, 50.0)

    trainer.add_callback(Diverged())
    plant(trainer, *(Fault("gradient", step, parameter=LAYER) for step in range(2, 6)))
    with pytest.raises(
        NonFiniteError, match=r"A finite state, but not a good one: its loss has diverged since step"
    ) as error:
        trainer.train()
    assert "The last good state" not in str(error.value)
