"""The host's rotation waits until a checkpoint was read back, and keeps what is protected."""

import pytest
from transformers import trainer as trainer_module

from hf_nanguard.hf.compat.checkpoint_rotation import deferred_rotation, rotate

STEPS = range(10, 60, 10)


@pytest.mark.parametrize("protected", [None, 20, 50])
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_protected_checkpoints_are_kept_beyond_the_limit(limit, protected, tmp_path):
    for step in STEPS:
        (tmp_path / f"checkpoint-{step}").mkdir()
    original = vars(trainer_module)["rotate_checkpoints"]
    with deferred_rotation() as calls:
        trainer_module.rotate_checkpoints(output_dir=str(tmp_path), save_total_limit=limit)
        assert len(list(tmp_path.iterdir())) == len(STEPS)
    assert trainer_module.rotate_checkpoints is original
    for call in calls:
        rotate(call, set() if protected is None else {tmp_path / f"checkpoint-{protected}"})
    kept = {int(folder.name.split("-")[1]) for folder in tmp_path.iterdir()}
    assert kept == (set(STEPS) if limit is None else {*STEPS[-limit:]} | ({protected} - {None}))
