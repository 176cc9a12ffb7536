"""`make matrix`: environments with older and newer hosts, the laws in each of them, and the tables of docs/versions.md.

    python -m tests.version_matrix [NAME ...]    all sets and frameworks, or those that are named

Environments are kept in `.matrix/`: a second run installs only what has other pins than before. The row of a set says what was
installed, on which commit it ran and what passed. It is written when the set has passed and removed when it fails; the rows of
sets that did not run stay as they are.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".matrix"
PAGE = ROOT / "docs" / "versions.md"
HOSTS = ("torch", "transformers", "accelerate", "trl", "peft", "datasets")
TOOLS = "gguf hypothesis pytest==9.1.1 pytest-timeout pytest-xdist"
# What shows first that a host has changed. All of the laws take ten times as long and depend on the host no more than these.
TESTS = (
    # identity, no trace, honesty
    "tests/laws/test_identity.py::test_plain_trainer_is_identical",
    "tests/laws/test_identity.py::test_every_monitor_at_every_step_changes_nothing",
    "tests/laws/test_no_trace.py::test_one_bad_micro_batch_costs_only_itself",
    "tests/laws/test_no_trace.py::test_a_step_with_nothing_left_is_skipped",
    "tests/laws/test_honesty.py::test_the_log_never_shows_a_filtered_loss",
    "tests/laws/test_honesty.py::test_observe_never_acts",
    "tests/laws/test_honesty.py::test_halt_saves_the_last_good_state",
    "tests/laws/test_honesty.py::test_a_nan_weight_is_named_and_halts_at_once",
    "tests/laws/test_honesty.py::test_a_bad_evaluation_is_an_event_and_never_best",
    # the ways in, checkpoints, explanations, torch.compile
    "tests/hf/test_guarded_trainer.py::test_guarded_classes_accept_all_that_the_host_accepts",
    "tests/hf/test_guarded_trainer.py::test_attach_makes_a_stock_trainer_survive",
    "tests/hf/test_guarded_trainer.py::test_checkpoints_go_both_ways_and_resume_is_exact",
    "tests/hf/callbacks/test_nan_guard.py::test_it_attaches_when_the_trainer_is_built",
    "tests/takeover/test_fidelity.py::test_a_script_sees_and_ends_as_without_us[exit code]",
    "tests/laws/test_rewind.py::test_a_rewind_between_two_rows_of_the_log",
    "tests/hf/monitors/test_compiled_trainer.py",
    "tests/hf/monitors/test_evaluation.py",
    "tests/core/autopsy/trace",
    # two ranks
    "tests/distributed/test_ddp.py::test_two_ranks[healthy-llama-3]",
    "tests/distributed/test_ddp.py::test_two_ranks[way-nanguard-run-gradient]",
    "tests/distributed/test_ddp.py::test_two_ranks[sft-middle]",
    "tests/distributed/test_ddp.py::test_two_ranks[rewind]",
    "tests/distributed/test_ddp.py::test_two_ranks_exit_in_order",
)
REAL_PACKAGES = "tests/integrations/test_real_packages.py"
CUDA_BUILDS = "torchvision torchaudio torchcodec"  # of frameworks; without CUDA they cannot be imported


@dataclass(frozen=True)
class VersionSet:
    """One set of versions that can be installed together.

    Args:
        name (`str`):
            What the table calls it.
        python (`str`):
            The version of the interpreter.
        pins (`str`):
            The packages with their versions.
        trainers (`str`):
            The trainers that these versions can run, for the table.
        deselect (`str`):
            A pytest expression: what these versions of the hosts do not have.
        tools (`str`):
            What is installed besides, to run tests in the environment.
        without (`str`):
            What is uninstalled again.
    """

    name: str
    python: str
    pins: str
    trainers: str = "Trainer, SFT, DPO, GRPO and the others of TRL"
    deselect: str = ""
    tools: str = TOOLS
    without: str = ""

    @property
    def folder(self) -> Path:
        """The environment."""
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        """The Python of the environment."""
        return self.folder / "bin" / "python"

    def install(self) -> Path:
        """Builds the environment unless it is there with these pins; returns its interpreter.

        Raises:
            `RuntimeError`: if installing this package changes or removes another one.
        """
        stamp, wanted = self.folder / "installed.json", json.dumps(asdict(self))
        if stamp.is_file() and stamp.read_text() == wanted:
            return self.interpreter
        run_uv("venv", "--clear", "--python", find_python(self.python), str(self.folder))
        self._pip("install", *self.pins.split(), *self.tools.split())
        before = self.list_versions()
        self._pip("install", "-e", str(ROOT))
        after = self.list_versions()
        changed = sorted(name for name, version in before.items() if after.get(name) != version)
        if changed:
            raise RuntimeError(f"{self.name}: installing this package changed {', '.join(changed)}.")
        self._pip("check")
        if self.without:
            self._pip("uninstall", *self.without.split())
        stamp.write_text(wanted)
        return self.interpreter

    def list_versions(self) -> dict[str, str]:
        """Returns the version of every installed package, and that of Python."""
        listed = json.loads(self._pip("list", "--format", "json"))
        return {package["name"]: package["version"] for package in listed}

    def _pip(self, command: str, *words: str) -> str:
        return run_uv("pip", command, "--python", str(self.interpreter), *words)


@dataclass(frozen=True)
class Result:
    """How the tests of a set ended, with what was installed and on which commit."""

    commit: str
    passed: bool
    summary: str  # of pytest, without times
    versions: dict[str, str]


SETS = (
    VersionSet(
        "lowest",
        "3.10",
        "torch==2.8.0 transformers==5.3.0 accelerate==1.11.0 trl==0.24.0 peft==0.18.1 datasets==4.0.0",
        "Trainer, SFT",
        "grpo or dpo or kto or rloo or distillation or reward",  # TRL 0.24 imports mergekit for them
    ),
    VersionSet(
        "intermediate",
        "3.12",
        "torch==2.10.0 transformers==5.10.4 accelerate==1.12.0 trl==0.29.1 peft==0.19.0 datasets==4.8.4",
        "Trainer, SFT, DPO, GRPO, Reward, RLOO",
        "kto or distillation",  # not in this version, or in its experimental part
    ),
    VersionSet(
        "axolotl",
        "3.11",
        "torch==2.13.0 transformers==5.16.1 accelerate==1.13.0 trl==1.9.0 peft==0.20.0 datasets==4.8.4",
        "Trainer, SFT, DPO, GRPO, KTO, Reward, RLOO",
        "distillation",
    ),
    VersionSet(
        "newest",
        "3.13",
        "torch==2.15.0 transformers==5.23.0 accelerate==1.15.0 trl==1.16.0 peft==0.21.2 datasets==5.2.0",
    ),
)
FRAMEWORKS = (
    VersionSet(
        "axolotl-0.19.0", "3.11", "torch==2.13.0 axolotl==0.19.0", "stock and guarded", tools="", without=CUDA_BUILDS
    ),
    VersionSet(
        "llamafactory-0.9.5",
        "3.11",
        "torch==2.13.0 llamafactory==0.9.5",
        "stock and guarded",
        tools="",
        without=CUDA_BUILDS,
    ),
    VersionSet(
        "ms-swift-4.6.0", "3.11", "torch==2.13.0 ms-swift==4.6.0", "stock and guarded", tools="", without=CUDA_BUILDS
    ),
)


def run_uv(*words: str) -> str:
    """Runs uv, which is installed on first use, with its cache beside the environments so that they share files."""
    uv = FOLDER / "uv" / "bin" / "uv"
    if not uv.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / "uv")], check=True)
        subprocess.run([str(FOLDER / "uv" / "bin" / "python"), "-m", "pip", "install", "-q", "uv"], check=True)
    own = {"UV_CACHE_DIR": str(FOLDER / "cache"), "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    done = subprocess.run(
        [str(uv), "-q", *words], stdout=subprocess.PIPE, text=True, check=True, env={**own, **os.environ}
    )
    return done.stdout


def find_python(version: str) -> str:
    """Returns an interpreter on the PATH or of pyenv, or else the version, for which uv then looks."""
    found = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    works = (path for path in found if path and not subprocess.run([path, "-V"], capture_output=True).returncode)
    return next(works, version)  # one of pyenv on the PATH runs only if its version is switched on


def describe_commit() -> str:
    """Returns the commit of what the tests run, and whether it was changed since."""
    tested = ["hf_nanguard", "recipes", "tests", "pyproject.toml"]
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], stdout=subprocess.PIPE, text=True, check=True)
    changes = subprocess.run([*git, "status", "--porcelain", "--", *tested], stdout=subprocess.PIPE, check=True)
    return commit.stdout.strip() + (" and changes" if changes.stdout else "")


def run_tests(versions: VersionSet) -> Result:
    """Runs the tests of a set in its environment, or of a framework from this one."""
    print(f"==== {versions.name}: {versions.pins}", flush=True)
    own, commit = versions.install(), describe_commit()
    options, interpreter = ["-q", "-m", "not slow"], own
    if versions in FRAMEWORKS:  # its own environment has no pytest
        options, interpreter = ["-q", "-m", "slow", "-k", versions.name, REAL_PACKAGES], Path(sys.executable)
    else:
        # Warnings are no errors here: a host may deprecate what its own code uses, in one release and not in the next.
        options += ["-W", "default", "-n", "2", "--dist", "loadgroup", *TESTS]
        options += ["-k", f"not ({versions.deselect})"] if versions.deselect else []
    done = subprocess.run([str(interpreter), "-m", "pytest", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout[-6000:], flush=True)
    ended = re.findall(r"^=* ?(\d+ (?:passed|failed|skipped|error).*?) in \d.*$", done.stdout, re.MULTILINE)
    summary = re.sub(r", \d+ (deselected|warnings?)", "", ended[-1]) if ended else "no test ran"
    python = subprocess.run([str(own), "-V"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[1]
    passed = done.returncode == 0 and "passed" in summary
    return Result(commit, passed, summary, {"python": python, **versions.list_versions()})


def format_row(*cells: str) -> str:
    """Returns a line of a table."""
    return "| " + " | ".join(cells) + " |"


def update_table(group: str, versions: VersionSet, result: Result) -> None:
    """Writes the row of a set into its table of docs/versions.md, or removes it if the set has failed.

    Args:
        group (`str`):
            What the table is of: `"sets"` or `"frameworks"`.
        versions (`VersionSet`):
            The set.
        result (`Result`):
            How its tests ended.
    """
    begin, end = f"<!-- make matrix: {group} -->", f"<!-- end of {group} -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    table, after = rest.split(end)
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    rows.pop(versions.name, None)
    if result.passed:
        installed = [result.versions[name].partition("+")[0] for name in ("python", *HOSTS)]
        rows[versions.name] = format_row(versions.name, *installed, versions.trainers, result.commit, result.summary)
    members, remark = (SETS, "trainers") if versions in SETS else (FRAMEWORKS, "runs")
    heads = (group.removesuffix("s"), "python", *HOSTS, remark, "commit", "tests")
    known = [rows[each.name] for each in members if each.name in rows]
    written = "\n".join(["", "", format_row(*heads), "|---" * len(heads) + "|", *known, "", ""]) if known else "\n"
    PAGE.write_text(before + begin + written + end + after, encoding="utf-8")


def main() -> int:
    """Runs the sets that are named on the command line, or all, and writes their rows."""
    everything = (*SETS, *FRAMEWORKS)
    asked = sys.argv[1:] or [versions.name for versions in everything]
    if unknown := sorted(set(asked) - {versions.name for versions in everything}):
        print(
            f"No set is named {', '.join(unknown)}. Sets: {', '.join(each.name for each in everything)}.",
            file=sys.stderr,
        )
        return 2
    failed = []
    for versions in everything:
        if versions.name in asked:
            result = run_tests(versions)
            update_table("sets" if versions in SETS else "frameworks", versions, result)
            failed += [] if result.passed else [versions.name]
    if failed:
        print(f"Not in the tables, because they did not pass: {', '.join(failed)}.", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
