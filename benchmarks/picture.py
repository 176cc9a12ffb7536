"""Draws the picture of the README: loss and gradient norm of the same run, stock and guarded, with one bad row.

    python benchmarks/picture.py [--output docs/images/stock-and-guarded.svg] [--steps 120]

Both runs train a small Llama on sums. One answer is cut off, so the mean loss over its labels is 0/0. Values are those of the log.
"""

import argparse
import math
import tempfile
from pathlib import Path

import matplotlib
import transformers
from matplotlib import pyplot
from transformers import Trainer
from trl import SFTConfig

from hf_nanguard import guarded
from hf_nanguard.examples.planted_failures import AnswerTrainer, CutOffAnswer
from hf_nanguard.examples.tasks import sums

BATCH_SIZE = 4
GREY, RED, BLUE = "#7d8590", "#e5534b", "#388bfd"  # readable on white and on black
STYLE = {
    "svg.hashsalt": "hf_nanguard", "svg.fonttype": "none", "font.size": 9, "text.color": GREY, "axes.labelcolor": GREY,
    "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "legend.frameon": False,
}  # fmt: skip


def train(trainer_class: type[Trainer], num_steps: int, bad_step: int, folder: str) -> list[dict[str, float]]:
    """Trains once and returns the logged rows of its steps."""
    args = SFTConfig(
        folder, max_steps=num_steps, per_device_train_batch_size=BATCH_SIZE, learning_rate=2e-3, logging_steps=1, seed=0,
        lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
        gradient_checkpointing=False, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = sums.build_examples(num_steps * BATCH_SIZE, 0)
    trainer = trainer_class(
        model=sums.build_model(0), args=args, train_dataset=rows, processing_class=sums.build_tokenizer()
    )
    trainer.data_collator = CutOffAnswer(trainer.data_collator, bad_step)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def draw(stock: list[dict[str, float]], guarded_rows: list[dict[str, float]], bad_step: int, file: Path) -> None:
    """Draws both runs, loss above gradient norm."""
    matplotlib.rcParams.update(STYLE)
    figure, panels = pyplot.subplots(2, 1, figsize=(7.2, 3.6), sharex=True, layout="constrained")
    for panel, name, label in zip(panels, ("loss", "grad_norm"), ("loss", "gradient norm"), strict=True):
        for rows, color, title in ((stock, RED, "stock Trainer"), (guarded_rows, BLUE, "guarded")):
            points = [(row["step"], row[name]) for row in rows if name in row and math.isfinite(row[name])]
            panel.plot(*zip(*points, strict=True), color=color, linewidth=1.4, label=title)
        panel.axvline(bad_step + 1, color=GREY, linewidth=0.8, linestyle=":")
        panel.set_ylabel(label)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(loc="upper right", labelcolor="linecolor")
    panels[0].annotate(
        "one bad row: the stock run logs 0.0 from here on", (bad_step + 2, 0.2), color=RED, fontsize=8, va="bottom"
    )
    panels[1].annotate(
        "stock: NaN, and so is every weight", (bad_step + 2, panels[1].get_ylim()[1] * 0.85), color=RED, fontsize=8
    )
    panels[1].set_xlabel("step")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, transparent=True, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Trains twice, draws, and prints how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/images/stock-and-guarded.svg"), help="SVG or PNG file."
    )
    parser.add_argument("--steps", type=int, default=120, help="Steps of each run; the bad row is in the middle third.")
    options = parser.parse_args()
    bad_step = options.steps // 3
    with tempfile.TemporaryDirectory() as folder:
        stock = train(AnswerTrainer, options.steps, bad_step, f"{folder}/stock")
        ours = train(guarded(AnswerTrainer), options.steps, bad_step, f"{folder}/guarded")
    draw(stock, ours, bad_step, options.output)
    last = f"last loss: stock {stock[-1]['loss']:.3g}, guarded {ours[-1]['loss']:.3g}"
    print(
        f"{options.output}: {options.steps} steps, bad row at step {bad_step}; {last}; transformers {transformers.__version__}"
    )


if __name__ == "__main__":
    main()
