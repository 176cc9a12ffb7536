"""The README of a bundle, for a colleague who received the folder and has never heard of hf_nanguard."""

from ....plain_text import cut, printable
from ...event import JsonObject
from ..evidence.verdict import Verdict, format_verdict

MAX_LEFT_OUT = 6
MAX_LINE = 500


def format_readme(verdict: Verdict, facts: JsonObject, saved: list[str], text: bool) -> str:
    """Returns the README of a bundle in 15 to 30 lines; `saved` are the weights in it."""
    weights = facts["weights"]["are"]
    samples = (facts["inputs"]["samples"] or [])[:8]
    inputs = {
        "all": "the micro-batch as the loss received it",
        "samples": f"only the samples {samples} of the micro-batch because all of it was too large",
        "none": "no inputs because they were too large",
    }
    block = format_verdict(verdict, facts["step"], facts["micro_step"])
    lines = [
        f"# Autopsy of a bad training step: step {facts['step']}",
        "",
        *(f"    {printable(cut(line, MAX_LINE))}" for line in block.split("\n")[:15]),
        "",
        "To reproduce it (`FOLDER` is the path of this folder):",
        "",
        f"    nanguard replay FOLDER{'' if weights == 'all' else ' --checkpoint PATH'}",
        "",
    ]
    if weights != "all":
        missing = "the weights" if weights == "none" else "the frozen weights"
        lines.append(f"`PATH` is a checkpoint with {missing} of that run, because they are not in this folder.")
    lines += [
        "For a custom model or loss add `--factory module:function`.",
        "Nothing in this folder is pickled, and replaying it runs no code from it.",
        "",
        "- `facts.json`: the verdict, the settings of the run, library versions, what was left out and why",
        f"- `inputs.safetensors`: {inputs[facts['inputs']['are']]}; the random state of its forward pass",
    ]
    if saved:
        culprit = f"only {code(saved[0])}, which contains the bad value"
        what = culprit if weights == "none" else f"{weights} weights at that moment"
        lines.append(f"- `weights.safetensors`: {what}")
    if facts["left_out"]:
        shown = list(facts["left_out"])[:MAX_LEFT_OUT]
        more = ", ..." if len(facts["left_out"]) > len(shown) else ""
        lines.append(f"- left out: {', '.join(map(code, shown))}{more}")
    share = "Share it only with people allowed to see that data."
    if text:
        lines += ["", f"This folder contains training data, some of it readable. {share}"]
    else:
        lines += [
            "",
            "This folder contains training data as token ids and other tensors, which anyone with the tokenizer can decode. Besides",
            "them it has shapes, row and token positions, names of modules and lines of code, but no text of the data: strings and",
            f"keys that no host library uses are replaced. {share}",
        ]
    versions = ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
    return "\n".join([*lines, "", f"Written at {facts['time']} with {printable(versions)}.", ""])


def code(text: str) -> str:
    """Returns text from a run as Markdown code."""
    return f"`{printable(cut(text, MAX_LINE)).replace('`', chr(39))}`"
