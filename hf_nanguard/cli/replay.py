"""`nanguard replay`: reproduces the verdict of an autopsy from its bundle, in a process of its own."""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..core.autopsy.bundle.reader import Bundle
    from ..core.autopsy.evidence.verdict import Verdict
    from ..core.event import Remedy

PATIENCE = 2.0
PACKAGES = ("torch", "transformers", "trl", "peft")
EPILOG = """examples:
  nanguard replay --remedies runs/sft/nanguard/autopsy/step-42
  nanguard replay step-42 --checkpoint runs/sft/checkpoint-40
  nanguard replay step-42 --checkpoint base-model --checkpoint runs/lora/checkpoint-40
  nanguard replay step-42 --factory my_model:build

A factory is a function of yours that is called with the bundle and returns the model, or
(model, loss_fn) with loss_fn(model, inputs) -> loss. Nothing from the bundle itself is executed.

exit codes: 0 the same verdict, 1 another one or none, 2 bad arguments or a bad bundle
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="reproduce the verdict of an autopsy from its bundle",
        description="Builds model and loss of a bundle again, runs its bad micro-batch and says where the bad number\n"
        "is born. Nothing is downloaded.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="the folder that an autopsy wrote, e.g. nanguard/autopsy/step-42"
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", action="append",
        help="folder with weights that the bundle does not hold, as safetensors; may be given twice, for a base model "
        "and its adapter",
    )  # fmt: skip
    parser.add_argument("--factory", metavar="MODULE:FUNCTION", help="your own function for a custom model or loss")
    parser.add_argument("--remedies", action="store_true", help="try remedies again (by default shown as recorded)")
    parser.add_argument("--device", help="where to run it (default: where it ran, if this machine has that)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replays a bundle and returns the exit code."""
    with redirect_stdout(sys.stderr), patience("importing the libraries") as say:
        try:
            bundle, verdict = examine(arguments, say)
        except ArgumentError as error:  # what it says may hold text of the bundle
            raise ArgumentError(" ".join(printable(str(error)).split())) from error
    differences = compare(bundle, verdict)
    if arguments.json:
        print(json.dumps(tell_json(bundle, verdict, differences), allow_nan=False))
    else:
        print(printable(tell(bundle, verdict, differences, arguments.remedies)))
    return 1 if differences else 0


def examine(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[Bundle, Verdict]:
    """Returns the bundle and what was found in it this time."""
    try:
        from ..core.autopsy.bundle.reader import read_bundle

        bundle = read_bundle(arguments.bundle)  # a wrong folder is told before the slow import
        from ..bundle_replay.rebuild import examine_bundle
    except ModuleNotFoundError as error:
        raise ArgumentError(f"nanguard replay needs {error.name}. Run pip install {error.name}.") from error
    say("building the model")
    try:
        return bundle, examine_bundle(
            bundle, arguments.checkpoint, arguments.factory, arguments.remedies, arguments.device, say
        )
    except ArgumentError:
        raise
    except Exception as error:  # model, loss and inputs are somebody else's: anything may be raised in there
        first = (str(error).strip().splitlines() or ["no message"])[0][:300]
        raise ArgumentError(
            f"The bundle {arguments.bundle!r} could not be run ({type(error).__name__}: {first})."
        ) from error


@contextmanager
def patience(first: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that is told what is being done, and shows it on the error output if it takes long."""
    stage = first
    stop = threading.Event()

    def show() -> None:
        while not stop.wait(PATIENCE):
            print(f"nanguard: {stage} ...", file=sys.stderr, flush=True)

    def say(text: str) -> None:
        nonlocal stage
        stage = text

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        stop.set()
        thread.join()


def printable(text: str) -> str:
    """Returns a text without control characters, which a bundle could steer a terminal with."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


# ---- the comparison ----


def compare(bundle: Bundle, verdict: Verdict) -> list[str]:
    """Returns how a verdict differs from the recorded one, nothing if it is the same."""
    old = bundle.verdict
    before = old.get("origin")
    if verdict.origin is None or not isinstance(before, dict):
        if verdict.origin is None and not isinstance(before, dict):
            return []
        return ["the replay was finite" if verdict.origin is None else "the recorded replay was finite"]
    new = verdict.as_dict()
    now = new["origin"]
    names = ["op", "module", "source", "phase", "leaf"]
    # Weights that the optimizer ruined are inside, its state is not: the replay sees the weights only.
    of_update = before.get("phase") == "optimizer" and now["phase"] == "parameter"
    pairs = [(name, before.get(name), now[name]) for name in names if not (of_update and name == "phase")]
    if not of_update:
        pairs.append(("cause", old.get("cause"), new["cause"]))
    if "untried" not in (_blame(old).get("scope"), new["blame"]["scope"]):
        pairs.append(("samples", _blame(old).get("samples"), original_samples(bundle, new["blame"]["samples"])))
    return [f"{name} was {was!r}, is {value!r}" for name, was, value in pairs if was != value]


def original_samples(bundle: Bundle, samples: list[int] | None) -> list[int] | None:
    """Returns places in the micro-batch of the run, of which the bundle may hold only the culprits."""
    kept = _blame(bundle.verdict).get("samples")
    if bundle.inputs_are != "samples" or not isinstance(kept, list) or samples is None:
        return samples
    return [kept[sample] for sample in samples if sample < len(kept)]


def _blame(verdict: dict[str, Any]) -> dict[str, Any]:
    blame = verdict.get("blame")
    return blame if isinstance(blame, dict) else {}


def compare_versions(bundle: Bundle) -> list[str]:
    """Returns which libraries were other versions in the run."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in PACKAGES:
        try:
            here = version(package)
        except PackageNotFoundError:
            continue
        there = bundle.versions.get(package, here)
        if there.split("+")[0] != here.split("+")[0]:
            found.append(f"{package} was {there}, is {here}")
    return found


# ---- what is shown ----


def tell(bundle: Bundle, verdict: Verdict, differences: list[str], tried: bool) -> str:
    """Returns the verdict as the run's log shows it, and how it compares to the recorded one."""
    from dataclasses import replace

    from ..core.autopsy.evidence.verdict import format_verdict

    recorded = recorded_remedies(bundle.verdict)
    if not tried:
        verdict = replace(verdict, remedies=recorded)
    if not differences:
        verdict = replace(verdict, blame=replace(verdict.blame, **recorded_data(bundle.verdict)))
    micro_step = vars(bundle).get("micro_step", 0)
    lines = [format_verdict(verdict, find_step(bundle), micro_step)]
    if recorded and not tried:
        lines.append("Remedies are as recorded; --remedies tries them again.")
    lines.append("The same verdict as recorded." if not differences else f"Not as recorded: {'; '.join(differences)}.")
    versions = compare_versions(bundle)
    if versions:
        lines.append(f"Other versions: {'; '.join(versions)}.")
    lines += [f"Not in the bundle: {name}: {why}." for name, why in list(bundle.left_out.items())[:5] if differences]
    return "\n".join(lines)


def tell_json(bundle: Bundle, verdict: Verdict, differences: list[str]) -> dict[str, Any]:
    """Returns the outcome as strict JSON values."""
    return {
        "schema": 1,
        "bundle": str(bundle.path),
        "step": find_step(bundle),
        "same": not differences,
        "differences": differences,
        "verdict": verdict.as_dict(),
        "recorded": bundle.verdict,
        "versions": compare_versions(bundle),
        "left_out": bundle.left_out,
    }


def find_step(bundle: Bundle) -> int:
    """Returns the step of the run: recorded, or from the name of the folder."""
    step = bundle.facts.get("step")
    named = re.match(r"step-(\d{1,12})\b", bundle.path.resolve().name)
    return step if isinstance(step, int) else int(named[1]) if named else 0


def recorded_data(verdict: dict[str, Any]) -> dict[str, Any]:
    """Returns dataset rows and texts of the samples to blame, which only the run could know."""
    rows, texts = _blame(verdict).get("rows"), _blame(verdict).get("texts")
    found: dict[str, Any] = {}
    if isinstance(rows, list) and all(isinstance(row, int) for row in rows):
        found["rows"] = rows
    if isinstance(texts, dict):
        found["texts"] = {int(key): str(text) for key, text in texts.items() if re.fullmatch("[0-9]{1,9}", key)}
    return found


def recorded_remedies(verdict: dict[str, Any]) -> tuple[Remedy, ...]:
    """Returns the remedies that the bundle tells of."""
    from ..core.event import Remedy

    told = verdict.get("remedies")
    items = [item for item in (told if isinstance(told, list) else []) if isinstance(item, dict)]
    return tuple(
        Remedy(
            name=str(item.get("name"))[:80],
            tried=item.get("tried") is True,
            works=item["works"] if isinstance(item.get("works"), bool) else None,
        )
        for item in items
    )
