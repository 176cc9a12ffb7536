"""`nanguard replay`: reproduces the verdict of an autopsy from its bundle.

Anybody may have written the bundle, so a child process with limits on memory and time does the work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..plain_text import REDACTED, printable
from .shared.command_parser import Subparsers, between
from .shared.slow_stages import IMPORTS, slow_stages

if TYPE_CHECKING:
    from ..core.autopsy.bundle.reader import Bundle
    from ..core.autopsy.evidence.verdict import Verdict

ORIGIN = ("op", "module", "source", "phase", "leaf")
EPILOG = """examples:
  nanguard replay --remedies runs/sft/nanguard/autopsy/step-42
  nanguard replay step-42 --checkpoint runs/sft/checkpoint-40
  nanguard replay step-42 --checkpoint base-model --checkpoint runs/lora/checkpoint-40
  nanguard replay step-42 --factory my_model:build

A factory is a function of yours that is called with the bundle and returns the model, or
(model, loss_fn) with loss_fn(model, inputs) -> loss. No code from the bundle is executed. The
replay runs in a child process that is stopped when it exceeds the limits.

exit codes: 0 the same verdict, 1 another one or none, 2 bad arguments or a bad bundle
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="reproduce the verdict of an autopsy from its bundle",
        description="Rebuilds the model and the loss of a bundle, runs its bad micro-batch and reports where the first\n"
        "NaN or inf appears. Nothing is downloaded.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="the folder that an autopsy wrote, e.g. nanguard/autopsy/step-42"
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", action="append",
        help="folder with weights that are not in the bundle, as safetensors; can be given twice, for a base model and "
        "its adapter",
    )  # fmt: skip
    parser.add_argument("--factory", metavar="MODULE:FUNCTION", help="your own function for a custom model or loss")
    parser.add_argument("--remedies", action="store_true", help="try remedies again (default: show the recorded ones)")
    parser.add_argument("--device", help="where to run it (default: where it ran, if this machine has such a device)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=between(1, 10**6),
        default=600,
        help="stop after this time (default: 600)",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="GIB",
        type=between(1, 10**6),
        help="refuse to use more memory (default: 90 %% of what is free)",
    )
    parser.add_argument(
        "--in-process", action="store_true",
        help="work in this process, without limits, e.g. for a debugger; only for a bundle that you trust",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replays a bundle, in a child process or with `--in-process` in this one, and returns the exit code."""
    if arguments.in_process:
        return run_here(arguments)
    from ..bundle_replay.limited_process import Limits, run_limited

    limits = Limits.default(arguments.time_limit, arguments.memory_limit)
    return run_limited(
        as_words(arguments), limits, lambda text: print(f"nanguard: {text}", file=sys.stderr, flush=True)
    )


def as_words(arguments: argparse.Namespace) -> list[str]:
    """Returns the command line that does the work of this one in its own process."""
    words = ["replay", "--in-process"]
    for name in ("factory", "device"):
        if (value := getattr(arguments, name)) is not None:
            words.append(f"--{name}={value}")
    words += [f"--checkpoint={folder}" for folder in arguments.checkpoint or ()]
    words += [f"--{name}" for name in ("remedies", "json") if getattr(arguments, name)]
    return [*words, "--", arguments.bundle]


def run_here(arguments: argparse.Namespace) -> int:
    """Replays a bundle in this process and returns the exit code."""
    with redirect_stdout(sys.stderr), slow_stages(IMPORTS) as say:
        try:
            bundle, verdict = examine(arguments, say)
        except ArgumentError as error:  # its message may contain text of the bundle
            raise ArgumentError(" ".join(str(error).split())) from error
    differences = compare(bundle, verdict)
    if arguments.json:
        print(json.dumps(as_json(bundle, verdict, differences), allow_nan=False))
    else:
        text = format_replay(bundle, verdict, differences, arguments.remedies)
        print(printable(text, keep_newlines=True))  # a bundle could manipulate a terminal
    return 1 if differences else 0


def examine(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[Bundle, Verdict]:
    """Returns the bundle and what was found in it this time."""
    try:
        from ..core.autopsy.bundle.reader import read_bundle

        bundle = read_bundle(arguments.bundle)  # before the slow import, so that a wrong folder is reported at once
        from ..bundle_replay.rebuild import examine_bundle
    except ModuleNotFoundError as error:
        raise ArgumentError(f"nanguard replay needs {error.name}. Run pip install {error.name}.") from error
    say("building the model")
    options = (arguments.checkpoint, arguments.factory, arguments.remedies, arguments.device)
    return bundle, examine_bundle(bundle, *options, say)


# ---- comparison with the recorded verdict ----


def compare(bundle: Bundle, verdict: Verdict) -> list[str]:
    """Returns how the origin and the cause differ from the recorded ones; empty if they are the same.

    Samples are not compared: of several that are sufficient, a replay may find another one first.
    """
    recorded = as_dict(bundle.verdict.get("origin"))
    found = as_dict(verdict.as_dict()["origin"])
    if not recorded or not found:
        return [] if recorded == found else ["the replay was finite" if recorded else "the recorded replay was finite"]
    # A bundle contains weights that the optimizer ruined, but not its state: the replay sees only the weights.
    of_update = recorded.get("phase") == "optimizer" and found["phase"] == "parameter"
    pairs = [(name, recorded.get(name), found[name]) for name in ORIGIN if not (of_update and name == "phase")]
    if not of_update:
        pairs.append(("cause", bundle.verdict.get("cause"), str(verdict.cause)))
    return [f"{name} was {was!r}, is {value!r}" for name, was, value in pairs if was not in (value, REDACTED)]


def compare_versions(bundle: Bundle) -> list[str]:
    """Returns which libraries had other versions in the run."""
    from ..hf.trainer.trainer_facts import find_versions

    here, there = (
        {name: version.split("+")[0] for name, version in found.items()} for found in (find_versions(), bundle.versions)
    )
    return [f"{name} was {there[name]}, is {here[name]}" for name in here if there.get(name, here[name]) != here[name]]


# ---- what the run recorded: anybody may have written it, so values of another type are left out ----


def as_dict(value: object) -> dict:
    """Returns a mapping of a bundle, empty if it is anything else."""
    return value if isinstance(value, dict) else {}


def original_samples(bundle: Bundle, samples: list[int] | None) -> list[int] | None:
    """Returns positions in the micro-batch of the run, of which the bundle may contain only the culprits."""
    kept = as_dict(bundle.verdict.get("blame")).get("samples")
    if bundle.inputs_are != "samples" or not isinstance(kept, list) or samples is None:
        return samples
    return [kept[sample] for sample in samples if sample < len(kept)]


def add_recorded(verdict: Verdict, bundle: Bundle, with_data: bool, with_remedies: bool) -> Verdict:
    """Returns the verdict with what only the run could know: rows and texts of the culprit samples, and remedies it tried."""
    from ..core.event import Remedy

    blame, remedies = as_dict(bundle.verdict.get("blame")), bundle.verdict.get("remedies")
    if with_data and original_samples(bundle, verdict.blame.samples) == blame.get("samples"):
        rows, texts = blame.get("rows"), as_dict(blame.get("texts")).items()
        known = rows if isinstance(rows, list) and all(isinstance(row, int) for row in rows) else verdict.blame.rows
        texts_by_sample = {int(key): str(text) for key, text in texts if key.isdecimal() and len(key) < 10}
        verdict = replace(verdict, blame=replace(verdict.blame, rows=known, texts=texts_by_sample))
    if with_remedies:
        items = [as_dict(item) for item in remedies] if isinstance(remedies, list) else []
        tried = [(str(item.get("name"))[:80], item.get("tried") is True, item.get("works") is True) for item in items]
        verdict = replace(verdict, remedies=tuple(Remedy(*one) for one in tried))
    return verdict


# ---- output ----


def format_replay(bundle: Bundle, verdict: Verdict, differences: list[str], tried: bool) -> str:
    """Returns the verdict as in the log of the run, and how it compares to the recorded one."""
    from ..core.autopsy.evidence.verdict import format_verdict

    verdict = add_recorded(verdict, bundle, with_data=not differences, with_remedies=not tried)
    lines = [format_verdict(verdict, bundle.step, bundle.micro_step)]
    if verdict.remedies and not tried:
        lines.append("Remedies are those recorded in the run; --remedies tries them again.")
    lines.append(format_comparison(bundle, verdict, differences))
    versions = compare_versions(bundle)
    if versions:
        lines.append(f"Other versions: {'; '.join(versions)}.")
    lines += [f"Not in the bundle: {name}: {why}." for name, why in list(bundle.left_out.items())[:5] if differences]
    return "\n".join(lines)


def format_comparison(bundle: Bundle, verdict: Verdict, differences: list[str]) -> str:
    """Returns how the verdict compares to the recorded one; of several samples that suffice, another may fail elsewhere."""
    if not differences:
        return "The same verdict as recorded."
    is_reproduced = verdict.origin is not None and bundle.verdict.get("cause") == str(verdict.cause)
    start = "Reproduced with the same cause, at another place" if is_reproduced else "Not as recorded"
    return f"{start}: {'; '.join(differences)}."


def as_json(bundle: Bundle, verdict: Verdict, differences: list[str]) -> dict[str, object]:
    """Returns the outcome as strict JSON values."""
    return {
        "schema": 1,
        "bundle": str(bundle.path),
        "step": bundle.step,
        "same": not differences,
        "differences": differences,
        "verdict": verdict.as_dict(),
        "recorded": bundle.verdict,
        "versions": compare_versions(bundle),
        "left_out": bundle.left_out,
    }
