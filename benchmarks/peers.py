"""Compares hf_nanguard with what people use today, on two planted failures: every cell is the outcome of a run.

    python benchmarks/peers.py            # a minute or two

One row of 64 makes a loss of 0/0, or a finite loss whose gradient is NaN. "Reported" is what the log or the error names: the
place (the planted line of code), parameters or modules, the data (the row's number).
"""

import argparse
import io
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result_tables import add_json_flag, publish
from benchmarks.small_llama import SIZES, build_llama, count_step
from hf_nanguard import NanGuardCallback, guarded

BAD_ROW, STEPS = 21, 16


class PlantedTrainer(Trainer):
    """A masked mean and a distance, as a user writes them; `fault` says which of them is bad for the bad row."""

    fault = "none"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = inputs.pop("row")
        logits = model(**inputs).logits
        bad = (rows == BAD_ROW)[:, None] & (self.fault == "loss")
        mask = torch.where(bad, 0.0, 1.0).expand(-1, logits.shape[1] - 1)
        labels = inputs["input_ids"][:, 1:]
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
        mean = (losses * mask).sum(1) / mask.sum(1)  # planted: 0/0
        same = (rows == BAD_ROW) & (self.fault == "gradient")
        spread = torch.where(same[:, None], logits[:, 0] * 0.0, logits[:, 0])
        distance = spread.square().sum(1).sqrt()  # planted: the root of zero has no slope
        return (mean + 1e-3 * distance).mean()


class WithoutNan(PlantedTrainer):
    """Replaces a bad loss by zero."""

    def compute_loss(self, *args, **kwargs):
        return torch.nan_to_num(super().compute_loss(*args, **kwargs))


class SkipsNan(PlantedTrainer):
    """Leaves a micro-batch out if its loss is bad."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        if not torch.isfinite(loss):
            return torch.zeros_like(loss)
        self.accelerator.backward(loss)
        return loss.detach()


class LooksAfterStep(TrainerCallback):
    """Checks every gradient at the end of the step, and stops."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                print(f"bad gradient in {name}")
                control.should_training_stop = True


@dataclass(frozen=True)
class Contender:
    """A way to guard a run."""

    name: str
    trainer: type = PlantedTrainer
    around: Callable[[], AbstractContextManager] = nullcontext
    arguments: tuple[tuple[str, Any], ...] = ()
    callback: type | None = None


CONTENDERS = (
    Contender("`Trainer` as it comes"),
    Contender("`nan_to_num` of the loss", WithoutNan),
    Contender("skip a NaN loss in `training_step`", SkipsNan),
    Contender("gradients checked in `on_step_end`", callback=LooksAfterStep),
    Contender("`torch.autograd.detect_anomaly`", around=torch.autograd.detect_anomaly),
    Contender('`debug="underflow_overflow"`', arguments=(("debug", "underflow_overflow"),)),
    Contender("`NanGuardCallback`", callback=NanGuardCallback),
    Contender("guarded trainer", guarded(PlantedTrainer)),
)


def build(contender: Contender, fault: str, steps: int = STEPS) -> Trainer:
    """Builds the run."""
    ids = torch.randint(3, SIZES["tiny"][2], (64, 8), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": row, "row": index} for index, row in enumerate(ids)]
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, use_cpu=True, remove_unused_columns=False, dataloader_pin_memory=False,
        train_sampling_strategy="sequential", **dict(contender.arguments),
    )  # fmt: skip
    callbacks = [] if contender.callback is None else [contender.callback()]
    trainer = contender.trainer(build_llama("tiny"), args, train_dataset=rows, callbacks=callbacks)
    trainer.fault = fault
    return trainer


def play(contender: Contender, fault: str) -> str:
    """Runs a fault and returns how the run ended and what was reported."""
    trainer = build(contender, fault)
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    logging.getLogger("hf_nanguard").addHandler(handler)
    error = None
    try:
        with redirect_stdout(output), redirect_stderr(output), contender.around():
            trainer.train()
    except Exception as raised:  # whatever a contender raises is its outcome
        error = type(raised).__name__
        output.write(str(raised))
    finally:
        logging.getLogger("hf_nanguard").removeHandler(handler)
    is_finite = all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
    done = trainer.state.global_step
    ending = f"{error} at step {done}" if error else "runs on" if done == STEPS else f"stops at step {done}"
    text = output.getvalue()
    reported = [
        name
        for name, found in (
            ("place", re.search(r"planted: |mask\.sum\(1\)  #|\.sum\(1\)\.sqrt\(\)|peers\.py", text)),
            ("parameters", re.search(r"(lm_head|model\.norm|embed_tokens)\.weight|model\.layers\.\d", text)),
            ("data", re.search(rf"rows? {BAD_ROW}\b", text)),
        )
        if found
    ]
    return f"{ending}, weights {'finite' if is_finite else 'NaN'}, reported: {', '.join(reported) or 'nothing'}"


def count(contender: Contender) -> tuple[float, float]:
    """Returns host reads and operations of a healthy step."""
    with contender.around():
        return count_step(build(contender, "none", steps=5))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_flag(parser)
    options = parser.parse_args()
    logging.getLogger("hf_nanguard").propagate = False
    stock = count(CONTENDERS[0])
    rows = []
    for contender in CONTENDERS:
        reads, ops = (mine - theirs for mine, theirs in zip(count(contender), stock, strict=True))
        ends = {"loss is 0/0": play(contender, "loss"), "finite loss, NaN gradient": play(contender, "gradient")}
        counts = {"healthy: host reads": f"{reads:+.0f}", "operations": f"{ops:+.0f}"}
        rows.append({"": contender.name, **ends, **counts})
        print("\n    ".join(rows[-1].values()), flush=True)
    publish(
        f"one run of {STEPS} steps for each cell, counts of a healthy step beside stock; nothing is timed",
        rows,
        options.json,
    )


if __name__ == "__main__":
    main()
