"""The README of a bundle: what a colleague needs who was sent the folder and knows nothing."""

from typing import Any

from ..evidence.verdict import format_verdict
from .content import Content

MAX_LEFT_OUT = 6
MAX_LINE = 500
LACKS = {
    "none": "`PATH` is a checkpoint of that time, for no weights are inside. ",
    "trainable": "`PATH` is the model that was trained, for frozen weights are not inside. ",
    "all": "",
}


def write_readme(content: Content, text: bool) -> str:
    """Returns the README of a bundle in 15 to 30 lines."""
    facts = content.facts
    weights = facts["weights"]["are"]
    block = format_verdict(content.verdict, facts["step"], facts["micro_step"])
    versions = ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
    lines = [
        f"# A training step that went bad: step {facts['step']}",
        "",
        *(f"    {clean(line)}" for line in block.split("\n")[:15]),
        "",
        "To see it again, in the folder above this one (`FOLDER` is the name of this one):",
        "",
        f"    nanguard replay FOLDER{'' if weights == 'all' else ' --checkpoint PATH'}",
        "",
        f"{LACKS[weights]}For a model or a loss of your own add `--factory module:function`.",
        "Nothing in here is pickled, and nothing in here is executed.",
        "",
        "- `facts.json`: the verdict, how the run was set up, versions, what was left out and why",
        f"- `inputs.safetensors`: {_tell_inputs(facts['inputs'])}; the random state of its forward",
    ]
    if "weights.safetensors" in content.files:
        lines.append(f"- `weights.safetensors`: the weights at that moment ({weights})")
    if "needed.safetensors" in content.files:
        [needed] = content.files["needed.safetensors"]
        lines.append(f"- `needed.safetensors`: {code(needed)}, where the bad number was")
    if facts["left_out"]:
        shown = list(facts["left_out"])[:MAX_LEFT_OUT]
        lines.append(
            f"- left out: {', '.join(map(code, shown))}{', ...' if len(facts['left_out']) > len(shown) else ''}"
        )
    if text:
        lines += ["", "It holds training data, in part as text: send it only to whom you may send that."]
    else:
        lines += ["", "Decoded text was left out. Token ids are inside, for without them nothing can be seen again:"]
        lines += ["whoever has the tokenizer can decode them."]
    return "\n".join([*lines, "", f"Written at {facts['time']} with {clean(versions)}.", ""])


def clean(text: str) -> str:
    """Returns text from a run as one line that moves no cursor and hides nothing."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_LINE])


def code(text: str) -> str:
    """Returns text from a run as Markdown code."""
    return f"`{clean(text).replace('`', chr(39))}`"


def _tell_inputs(inputs: dict[str, Any]) -> str:
    if inputs["are"] == "samples":
        return f"only the samples {inputs['samples'][:8]} of the micro-batch, for the whole of it was too large"
    return "the micro-batch as the loss got it" if inputs["are"] == "all" else "not the micro-batch (too large)"
