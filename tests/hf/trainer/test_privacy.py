"""With `nanguard_bundle_text=False` nothing readable of the data is written or logged, and nothing of ours is uploaded.

Each case puts a secret where a guarded run could pick it up. The same run with text is the control: it shows the secret.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, default_data_collator
from transformers import trainer as host

from hf_nanguard import GuardArguments, replay
from hf_nanguard.plain_text import show
from hf_nanguard.testing import NAN, Fault, plant

from ...laws.ways import params
from ...models import tiny_llama, token_dataset
from ...trainers import build, events_of
from .test_autopsy import MARK, poisoned

SECRET = "Jane Roe"
QUICK = {"gradient_accumulation_steps": 1, "max_steps": 2}
LAYER = "model.layers.1.mlp.down_proj.weight"


def find_secret(folder, caplog, secret):
    """Returns the files below a run's folder that contain a secret, and the log if it does."""
    files = [path for path in sorted((Path(folder) / "nanguard").rglob("*")) if path.is_file()]
    assert files
    found = [path.name for path in files if secret.encode() in path.read_bytes()]
    return found + (["log"] if secret in caplog.text else [])


def reward_of_secrets(completions, **kwargs):
    raise ValueError(f"no score for {SECRET}")


def bad_reward(folder, guard):
    """The prompt of a bad reward, and the text of an exception in a reward function."""

    def reward(completions, **kwargs):
        return [NAN] * len(completions)

    trainer = build("grpo", folder, extra={"guard": guard, "reward_funcs": [reward, reward_of_secrets]}, **QUICK)
    dataset = trainer.train_dataset
    trainer.train_dataset = dataset.map(lambda row: {"prompt": f"{row['prompt']} {SECRET}"})
    trainer.train()


def _losing(folder, guard, settings):
    class Losing(Trainer):
        def compute_loss(self, *args, **kwargs):
            if self.state.global_step == 1:
                raise ValueError(f"cannot parse {SECRET}")
            return super().compute_loss(*args, **kwargs)

    guard = GuardArguments(**{**vars(guard), **settings})
    trainer = build("plain", folder, Losing, extra={"guard": guard}, **QUICK)
    with nullcontext() if settings else pytest.raises(ValueError, match=f"^cannot parse {SECRET}$"):
        trainer.train()


def loss_error(folder, guard):
    """The text of an exception in the loss, which ends the run."""
    _losing(folder, guard, {})


def dropped_loss_error(folder, guard):
    """The same, of a micro-batch that is dropped."""
    _losing(
        folder,
        guard,
        {
            "nanguard_on_loss_error": "drop",
            "nanguard_max_bad_steps": 1,
            "nanguard_max_rewinds": 0,
            "nanguard_on_halt": "stop",
        },
    )


class Keyed(Trainer):
    """Its batches have columns whose names are text of the data; the float one is bad once."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs = dict(inputs)
        scale = inputs.pop(SECRET)
        inputs.pop("notes")
        return super().compute_loss(model, inputs, *args, **kwargs) * scale.mean()


def keys(folder, guard):
    """Keys of the batch, also nested ones, and text among its values."""

    def collate(examples):
        bad = examples[0]["input_ids"][0] == examples[0]["labels"][0]
        scale = torch.full((len(examples),), NAN if bad else 1.0)
        return {**default_data_collator(examples), SECRET: scale, "notes": {f"{SECRET} 2": torch.ones(1), "n": SECRET}}

    extra = {"guard": guard, "data_collator": collate}
    trainer = build("plain", folder, Keyed, extra=extra, remove_unused_columns=False, **QUICK)
    trainer.train()
    assert events_of(trainer)[0]["bundle"] == "autopsy/step-0"


def decoded(folder, guard):
    """The decoded text of the sample to blame."""
    poisoned("sft", folder, settings=guard, max_steps=8).train()


def monitor(folder, guard):
    """The text of an exception in a hook of the user's that a monitor runs into."""
    trainer = build("plain", folder, extra={"guard": guard}, **QUICK)

    def fail(step):
        raise RuntimeError(f"hook about {SECRET}")

    plant(trainer, Fault("gradient", 0, parameter=LAYER))
    for watching in (trainer.nanguard.guard.monitor_set,):
        begin = watching.begin

        def begin_and_break(monitors, *others, begin=begin):
            begin(monitors, *others)
            monitors[0].begin_step = fail

        watching.begin = begin_and_break
    trainer.train()


def autopsy(folder, guard):
    """The text of an exception that a forward raises only when it runs again."""

    replays = []

    class Twice(Trainer):
        def compute_loss(self, *args, **kwargs):
            if self.nanguard.replaying:
                replays.append(1)
            if len(replays) > 1:
                raise RuntimeError(f"cannot repeat {SECRET}")
            return super().compute_loss(*args, **kwargs)

    trainer = build("plain", folder, Twice, extra={"guard": guard}, **QUICK)
    plant(trainer, Fault("loss", 1, 0))
    trainer.train()


def logged_row(folder, guard):
    """Text that a callback puts into a row of the log."""

    class Show(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.log({"sample": f"{SECRET} went home", f"score of {SECRET}": 1.0})

    trainer = build("plain", folder, extra={"guard": guard, "callbacks": [Show()]}, **QUICK)
    trainer.train()


def evaluated(folder, guard):
    """The name of an evaluation dataset, in the metric that is bad."""

    class Failing(Trainer):
        def prediction_step(self, *args, **kwargs):
            loss, *others = super().prediction_step(*args, **kwargs)
            return (loss * NAN, *others)

    extra = {"guard": guard, "eval_dataset": {f"{SECRET} again": token_dataset(2)}}
    build("plain", folder, Failing, extra=extra, eval_strategy="steps", eval_steps=1, **QUICK).train()


def configured(folder, guard):
    """Text that the user has added to the config of the model."""
    trainer = build("plain", folder, extra={"guard": guard}, **QUICK)
    trainer.model.config.greeting = {f"for {SECRET}": [f"Dear {SECRET}", 1]}
    plant(trainer, Fault("loss", 1, 0))
    trainer.train()


CASES = {
    case.__name__: case
    for case in (
        bad_reward,
        loss_error,
        dropped_loss_error,
        keys,
        decoded,
        monitor,
        autopsy,
        logged_row,
        evaluated,
        configured,
    )
}
SHOWN_IN = {  # where the control shows it
    "keys": {"events.jsonl", "facts.json", "inputs.safetensors", "log"},
    "decoded": {"events.jsonl", "facts.json", "README.md", "log"},
    "bad_reward": {"events.jsonl", "log"},
    "logged_row": {"metrics.jsonl"},
    "configured": {"facts.json"},
}


@pytest.mark.parametrize("name", CASES)
def test_no_text_of_the_data_is_written_or_logged(name, tmp_path, caplog):
    caplog.set_level("INFO", "hf_nanguard")
    secret = f"w{MARK - 7}" if name == "decoded" else SECRET
    CASES[name](tmp_path / "hidden", GuardArguments(nanguard_bundle_text=False))
    assert find_secret(tmp_path / "hidden", caplog, secret) == []
    caplog.clear()
    CASES[name](tmp_path / "shown", GuardArguments())
    assert set(find_secret(tmp_path / "shown", caplog, secret)) >= SHOWN_IN.get(name, {"events.jsonl", "log"})


def test_marks_of_quoted_text_appear_nowhere(tmp_path, caplog):
    caplog.set_level("INFO", "hf_nanguard")
    for name in ("keys", "dropped_loss_error", "bad_reward"):
        CASES[name](tmp_path / name, GuardArguments())
        assert find_secret(tmp_path / name, caplog, SECRET), "nothing was quoted"
        for mark in ("\ufdd0", "\ufdd1"):
            assert find_secret(tmp_path / name, caplog, mark) == []
            assert find_secret(tmp_path / name, caplog, mark.encode("unicode_escape").decode()) == []


def test_a_bundle_without_text_can_be_replayed(tmp_path):
    settings = GuardArguments(
        nanguard_bundle_text=False, nanguard_bundle_weights="all", nanguard_on_halt="stop", nanguard_max_rewinds=0
    )
    trainer = build("plain", tmp_path, extra={"guard": settings}, **QUICK)

    class Spoil(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                with torch.no_grad():
                    model.get_parameter(LAYER)[0, 0] = NAN

    trainer.add_callback(Spoil())
    trainer.train()
    [bundle] = (tmp_path / "nanguard" / "autopsy").iterdir()
    verdict = replay(bundle)
    assert verdict.origin.parameter == LAYER


def test_no_bundle_is_written_on_request(tmp_path):
    trainer = build("plain", tmp_path, extra={"guard": GuardArguments(nanguard_bundle=False)}, **QUICK)
    plant(trainer, Fault("loss", 1, 0))
    trainer.train()
    [event] = events_of(trainer)
    assert (event["bundle"], event["cause"]) == (None, "unknown")
    assert "texts" in event["values"]["autopsy"], "it was examined all the same"
    assert {path.name for path in (tmp_path / "nanguard").iterdir()} == {"events.jsonl", "metrics.jsonl"}


def test_configs_contain_neither_paths_nor_names_of_classes(tmp_path):
    from hf_nanguard.hf.trainer.trainer_facts import describe_model

    model = tiny_llama()
    model.config._name_or_path = "/home/jane/model"
    model.config.id2label = {0: "healthy", 1: SECRET}
    model.config.inner = {
        "_name_or_path": "/home/jane/inner",
        "files": ["~/jane.txt", "../jane", "C:\\jane", "patients/jane.jsonl"],
        "name": "plain",
        "/home/jane": 1,
    }
    facts = show(describe_model(model))
    assert "jane" not in str(facts).lower()
    assert facts["config"]["inner"] == {"files": ["[redacted]"] * 4, "name": "plain"}
    assert facts["config"]["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}


# ---- the Hub ----


class Hub:
    """A client that notes what would be uploaded."""

    def __init__(self):
        self.uploads = []

    def create_repo(self, repo_id, **kwargs):
        return type("Url", (), {"repo_id": repo_id})()

    def upload_folder(self, *, folder_path, ignore_patterns=None, **kwargs):
        from huggingface_hub.utils import filter_repo_objects

        paths = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        self.uploads.append(set(filter_repo_objects(paths, ignore_patterns=ignore_patterns)))
        return type("Job", (), {"is_done": lambda self: True, "done": lambda self: True, "result": lambda self: None})()


@pytest.mark.parametrize("kind", params("plain", cases=("plain", "sft")))
@pytest.mark.parametrize(
    ("asked", "strategy"), [(False, "every_save"), (False, "all_checkpoints"), (True, "every_save")]
)
def test_the_guards_folder_is_uploaded_only_on_request(asked, strategy, kind, tmp_path, monkeypatch):
    ends = {}
    for name in ("stock", "guarded"):
        hub = Hub()
        monkeypatch.setattr("huggingface_hub.utils.enable_progress_bars", lambda: None)  # it warns if they are off
        monkeypatch.setattr(host, "hf_api", lambda hub=hub: hub)
        extra = {"guard": GuardArguments(nanguard_push_to_hub=asked)} if name == "guarded" else {}
        trainer = build(kind, tmp_path / name, guard=name == "guarded", extra=extra, push_to_hub=True, hub_strategy=strategy,
                        hub_model_id="jane/model", save_strategy="steps", save_steps=1, **QUICK)  # fmt: skip
        if name == "guarded":
            plant(trainer, Fault("loss", 0, 0))
        trainer.train()
        trainer.save_model()
        trainer.push_to_hub()
        ends[name] = hub.uploads
        assert host.hf_api() is hub
    assert (tmp_path / "guarded" / "nanguard" / "events.jsonl").is_file()
    ours = [{path for path in paths if path.startswith("nanguard/")} for paths in ends["guarded"]]
    assert any(ours) == asked
    assert not asked or any("facts.json" in path for path in set().union(*ours))
    others = [
        {path for path in paths - own if "nanguard_state" not in path}
        for paths, own in zip(ends["guarded"], ours, strict=True)
    ]
    assert len(others) > 2
    assert others == ends["stock"], "everything else goes along"
