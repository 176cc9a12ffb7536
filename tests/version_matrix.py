"""`make matrix`: environments with older and newer hosts, the laws in each of them, and the table of docs/versions.md.

    python -m tests.version_matrix [NAME ...]    all sets, or those that are named

Environments are kept in `.matrix/`, so that a second run installs nothing. The table is written when all sets have run.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".matrix"
PAGE = ROOT / "docs" / "versions.md"
TOOLS = (
    "numpy",
    "safetensors",
    "rich",
    "shtab",
    "gguf",
    "hypothesis",
    "pytest==9.1.1",
    "pytest-timeout",
    "pytest-xdist",
)
LAWS = ("tests/laws/test_identity.py", "tests/laws/test_no_trace.py", "tests/laws/test_honesty.py")
HOSTS = ("tests/hf/test_guarded_trainer.py", "tests/hf/callbacks", "tests/distributed/test_ddp.py")
BEGIN, END = "<!-- table: make matrix -->", "<!-- end of table -->"


@dataclass(frozen=True)
class VersionSet:
    """One set of versions that pip can install together.

    Args:
        name (`str`):
            What the table calls it.
        python (`str`):
            The interpreter, looked up as `python<version>`.
        pins (`str`):
            The packages with their versions.
        trainers (`str`):
            The trainers that these versions can run, for the table.
        deselect (`str`):
            A pytest expression: what these versions of the hosts do not have.
    """

    name: str
    python: str
    pins: str
    trainers: str = "Trainer, SFT, DPO, GRPO and the others of TRL"
    deselect: str = ""

    def install(self, without: str = "") -> Path:
        """Builds the environment unless it is there, and uninstalls what must not be in it; returns its interpreter."""
        folder = ENVIRONMENTS / self.name
        interpreter, stamp = folder / "bin" / "python", folder / ".installed"
        if not stamp.is_file():
            subprocess.run([f"python{self.python}", "-m", "venv", str(folder)], check=True)
            pip = [str(interpreter), "-m", "pip", "install", "-q"]
            torch = next(pin for pin in self.pins.split() if pin.startswith("torch=="))
            subprocess.run([*pip, torch], check=True)
            subprocess.run([*pip, *self.pins.split(), *TOOLS], check=True)
            subprocess.run([*pip, "-e", str(ROOT)], check=True)  # changes nothing, because the pins are in our ranges
            subprocess.run([str(interpreter), "-m", "pip", "check"], check=True)
            subprocess.run(
                [str(interpreter), "-m", "pip", "uninstall", "-q", "-y", *without.split()], check=bool(without)
            )
            stamp.touch()
        return interpreter

    def run(self) -> str:
        """Runs the laws with these versions; returns the last line of pytest."""
        marks = ["-m", "not slow", *(["-k", f"not ({self.deselect})"] if self.deselect else [])]
        words = [str(self.install()), "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", *marks, *LAWS, *HOSTS]
        print(f"==== {self.name}: {self.pins}", flush=True)
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout[-3000:], flush=True)
        return done.stdout.strip().splitlines()[-1]


SETS = (
    VersionSet(
        "lowest",
        "3.10",
        "torch==2.8.0 transformers==5.3.0 accelerate==1.11.0 trl==0.24.0 peft==0.18.1 datasets==4.0.0",
        "Trainer, SFT",
        "grpo or dpo or kto or rloo or distillation or reward",
    ),
    VersionSet(
        "intermediate",
        "3.12",
        "torch==2.13.0 transformers==5.10.4 accelerate==1.12.0 trl==0.29.1 peft==0.19.0 datasets==4.8.4",
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
        "3.11",
        "torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 trl==1.16.0 peft==0.21.2 datasets==5.2.0",
    ),
)


def format_table(results: dict[str, str]) -> str:
    """Returns the table of docs/versions.md."""
    names = ("torch", "transformers", "accelerate", "trl", "peft", "datasets")
    rows = ["| set | Python | " + " | ".join(names) + " | trainers tested | tests |", "|---" * (len(names) + 4) + "|"]
    for versions in SETS:
        pins = dict(pin.split("==") for pin in versions.pins.split())
        result = re.sub(r", \d+ deselected| in .*|=+ ?", "", results[versions.name])
        cells = [versions.name, versions.python, *(pins[name] for name in names), versions.trainers, result]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> int:
    """Runs the sets that are named on the command line, or all."""
    asked = sys.argv[1:] or [versions.name for versions in SETS]
    results = {versions.name: versions.run() for versions in SETS if versions.name in asked}
    if len(results) == len(SETS):
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{format_table(results)}\n\n{END}{after}", encoding="utf-8")
    return int(any(re.search(r"failed|error", line) for line in results.values()))


if __name__ == "__main__":
    sys.exit(main())
