"""Every name of the vocabulary is used somewhere in the package, or is listed as reserved."""

import re
from pathlib import Path

import pytest

import hf_nanguard
from hf_nanguard.core.vocabulary import RESERVED, Action, Cause, Signal

PACKAGE = Path(hf_nanguard.__file__).parent
SOURCE = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")) if path.name != "vocabulary.py"
)
USED = set(re.findall(r"\b(?:Signal|Action|Cause)\.[A-Z0-9_]+\b", SOURCE))


@pytest.mark.parametrize(
    "member", [*Signal, *Action, *Cause], ids=lambda member: f"{type(member).__name__}.{member.name}"
)
def test_a_name_is_used_unless_it_is_reserved(member):
    is_reserved = any(member is name for name in RESERVED)  # members of different enums may be equal strings
    assert (f"{type(member).__name__}.{member.name}" in USED) == (not is_reserved)
