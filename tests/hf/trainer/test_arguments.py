"""The guard's settings: parsed by every parser of the host, beside host defaults that stay as they are, checked at once."""

import dataclasses
import inspect
import pickle
import re

import pytest
from datasets import Dataset
from transformers import HfArgumentParser, TrainingArguments

from hf_nanguard import (
    ArgumentError,
    GuardArguments,
    GuardedGRPOConfig,
    GuardedGRPOTrainer,
    GuardedSFTConfig,
    GuardedSFTTrainer,
    GuardedTrainer,
    GuardedTrainingArguments,
)
from hf_nanguard.core.settings import SETTINGS, Policy
from hf_nanguard.hf.trainer.arguments import find_guard_arguments
from hf_nanguard.testing import INF, NAN, Fault, plant

from ...laws.ways import WAYS, build_guarded
from ...models import text_rows, tiny_llama, tiny_tokenizer, token_dataset
from ...trainers import build, common_arguments, events_of, reward_length


def _host(guarded_class):
    """The host's own config that a guarded one extends."""
    import trl

    return {
        GuardedTrainingArguments: TrainingArguments,
        GuardedSFTConfig: trl.SFTConfig,
        GuardedGRPOConfig: trl.GRPOConfig,
    }[guarded_class]


CONFIGS = [GuardedTrainingArguments, GuardedSFTConfig, GuardedGRPOConfig]
FIELDS = [field.name for field in dataclasses.fields(GuardArguments)]

# One value for every field that is not its default, as it is written on a command line and as it arrives.
GIVEN = {
    "nanguard_mode": ("off", "off"),
    "nanguard_doctor": ("strict", "strict"),
    "nanguard_precision": ("auto", "auto"),
    "nanguard_on_nonfinite": ("repair", "repair"),
    "nanguard_loss_floor": ("1e-3", 1e-3),
    "nanguard_on_loss_error": ("drop", "drop"),
    "nanguard_skip_grad_norm": ("2", 2.0),
    "nanguard_on_spike": ("clip", "clip"),
    "nanguard_max_bad_steps": ("3", 3),
    "nanguard_max_rewinds": ("0", 0),
    "nanguard_rewind_lr_factor": ("0.5", 0.5),
    "nanguard_snapshot_steps": ("7", 7),
    "nanguard_on_param_nonfinite": ("halt", "halt"),
    "nanguard_on_bad_start": ("observe", "observe"),
    "nanguard_on_halt": ("stop", "stop"),
    "nanguard_on_bad_input": ("halt", "halt"),
    "nanguard_stall_steps": ("7", 7),
    "nanguard_autopsy": ("false", False),
    "nanguard_max_autopsies": ("2", 2),
    "nanguard_autopsy_seconds": ("7.5", 7.5),
    "nanguard_quarantine": ("record", "record"),
    "nanguard_bundle": ("false", False),
    "nanguard_bundle_weights": ("all", "all"),
    "nanguard_bundle_text": ("false", False),
    "nanguard_push_to_hub": ("true", True),
    "nanguard_logits_mode": ("always", "always"),
    "nanguard_logits_clip_value": ("25", 25.0),
    "nanguard_logits_min_prob": ("1e-6", 1e-6),
    "nanguard_min_temperature": ("0.2", 0.2),
    "nanguard_on_bad_reward": ("halt", "halt"),
    "nanguard_ratio_bound": ("15", 15.0),
    "nanguard_activation_steps": ("5", 5),
    "nanguard_activation_modules": ("model.layers.?,lm_head", "model.layers.?,lm_head"),
    "nanguard_attention_steps": ("25", 25),
    "nanguard_weight_check_steps": ("0", 0),
    "nanguard_full_metrics": ("true", True),
}


def test_every_field_is_given_and_none_is_its_default():
    defaults = GuardArguments()
    assert list(GIVEN) == FIELDS
    assert all(getattr(defaults, name) != value for name, (_, value) in GIVEN.items())


def _read(parsed):
    return {name: getattr(parsed, name) for name in FIELDS}


CPU = ["--use_cpu", "true", "--bf16", "false"]  # TRL defaults to bf16, which needs a GPU or this
EXPECTED = {name: value for name, (_, value) in GIVEN.items()}


# ---- parsers ----


@pytest.mark.parametrize("config", [GuardArguments, *CONFIGS])
def test_the_command_line_fills_every_field(config, tmp_path):
    line = [text for name, (written, _) in GIVEN.items() for text in (f"--{name}", written)]
    line += ["--output_dir", str(tmp_path), "--learning_rate", "0.5", *CPU] if config is not GuardArguments else []
    (parsed,) = HfArgumentParser(config).parse_args_into_dataclasses(line)
    assert type(parsed) is config
    assert _read(parsed) == EXPECTED
    assert config is GuardArguments or (parsed.learning_rate, parsed.output_dir) == (0.5, str(tmp_path))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_trl_yaml_file_fills_every_field_and_the_command_line_wins(config, tmp_path):
    from trl import TrlParser

    file = tmp_path / "config.yaml"
    lines = [f"{name}: {written}" for name, (written, _) in GIVEN.items()]  # off is bare, as people write it
    file.write_text(
        "\n".join([f"output_dir: {tmp_path}", "learning_rate: 0.5", "use_cpu: true", "bf16: false", *lines])
    )
    (parsed,) = TrlParser(config).parse_args_and_config(["--config", str(file)])
    assert _read(parsed) == EXPECTED
    assert parsed.learning_rate == 0.5
    (parsed,) = TrlParser(config).parse_args_and_config(["--config", str(file), "--nanguard_max_bad_steps", "7"])
    assert _read(parsed) == {**EXPECTED, "nanguard_max_bad_steps": 7}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_yaml_file_of_the_host_parser_fills_every_field(config, tmp_path):
    file = tmp_path / "config.yaml"
    lines = [f"{name}: {written}" for name, (written, _) in {**GIVEN, "nanguard_loss_floor": ("0.001", 0)}.items()]
    file.write_text("\n".join([f"output_dir: {tmp_path}", "use_cpu: true", "bf16: false", *lines]))
    (parsed,) = HfArgumentParser(config).parse_yaml_file(str(file))
    assert _read(parsed) == EXPECTED


def test_a_dictionary_fills_the_fields(tmp_path):
    (parsed,) = HfArgumentParser(GuardedTrainingArguments).parse_dict({"output_dir": str(tmp_path), **EXPECTED})
    assert _read(parsed) == EXPECTED


def test_guard_arguments_parse_beside_a_plain_config(tmp_path):
    line = ["--output_dir", str(tmp_path), "--nanguard_on_spike", "skip"]
    args, guard = HfArgumentParser((TrainingArguments, GuardArguments)).parse_args_into_dataclasses(line)
    assert type(args) is TrainingArguments
    assert guard.nanguard_on_spike == "skip"


@pytest.mark.parametrize("config", CONFIGS)
def test_a_bad_value_from_the_command_line_is_refused_by_name(config, tmp_path):
    line = ["--output_dir", str(tmp_path), "--nanguard_on_nonfinite", "ignore"]
    with pytest.raises(ArgumentError, match=r"nanguard_on_nonfinite must be one of drop, .*, got 'ignore'"):
        HfArgumentParser(config).parse_args_into_dataclasses(line)


def test_every_field_has_a_help_text():
    for field in dataclasses.fields(GuardArguments):
        assert len(field.metadata["help"]) > 10, field.name


def test_python_shows_the_fields(tmp_path):
    """They are made from those of `Policy`, and still are what `inspect`, `help` and pickle expect of a dataclass."""
    assert list(inspect.signature(GuardArguments).parameters) == FIELDS
    assert list(inspect.signature(GuardedTrainingArguments).parameters)[-len(FIELDS) :] == FIELDS
    assert all(f"        {name} (`" in GuardArguments.__doc__ for name in FIELDS)
    for given in (GuardArguments(**EXPECTED), GuardedTrainingArguments(str(tmp_path), **EXPECTED)):
        assert _read(pickle.loads(pickle.dumps(given))) == EXPECTED
    assert repr(GuardArguments()).startswith("GuardArguments(nanguard_mode='act', ")


def test_a_bare_off_of_yaml_is_off():
    assert GuardArguments(nanguard_mode=False, nanguard_logits_mode=False).policy() == Policy(
        mode="off", logits_mode="off"
    )


# ---- the host's own fields ----


@pytest.mark.parametrize("config", CONFIGS)
def test_all_other_defaults_are_the_hosts(config):
    def defaults(cls):
        made = {}
        for field in dataclasses.fields(cls):
            factory = field.default_factory is not dataclasses.MISSING
            made[field.name] = field.default_factory() if factory else field.default
        return made

    ours, theirs = defaults(config), defaults(_host(config))
    assert {name: value for name, value in ours.items() if name not in FIELDS} == theirs
    assert {name: ours[name] for name in FIELDS} == {
        name: getattr(GuardArguments(), name) for name in FIELDS
    }  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_an_instance_is_what_the_host_would_have_made(config, tmp_path):
    """Field by field after `__post_init__`, which both must have run."""
    given = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    ours, theirs = config(**given), _host(config)(**given)
    for field in dataclasses.fields(_host(config)):
        assert repr(getattr(ours, field.name)) == repr(getattr(theirs, field.name)), field.name
    assert ours.device == theirs.device
    plain = {name: value for name, value in ours.to_dict().items() if name not in FIELDS}
    assert plain.keys() == theirs.to_dict().keys()


def test_a_config_survives_its_own_dictionary(tmp_path):
    args = GuardedTrainingArguments(str(tmp_path), nanguard_max_bad_steps=4)
    assert args.to_dict()["nanguard_max_bad_steps"] == 4
    assert dataclasses.replace(args, learning_rate=1.0).nanguard_max_bad_steps == 4


@pytest.mark.parametrize("config", CONFIGS)
def test_positional_arguments_are_the_hosts(config):
    theirs = [field.name for field in dataclasses.fields(_host(config))]
    assert [field.name for field in dataclasses.fields(config)] == theirs + FIELDS


# ---- bad values ----

CHOSEN = [name for name, setting in SETTINGS.items() if setting.choices]
BAD = [
    *[(f"nanguard_{name}", value) for name in CHOSEN for value in ("nonsense", "", "ACT", None, 3, True)],
    *[("nanguard_max_bad_steps", value) for value in (0, -3, 2.5, "5", None, True)],
    *[("nanguard_max_rewinds", value) for value in (-3, 2.5, "5", None, True)],
    *[("nanguard_rewind_lr_factor", value) for value in (0.0, -1.0, 2, NAN, INF, "x", None, True)],
    *[("nanguard_snapshot_steps", value) for value in (-3, 2.5, "5", True)],
    *[("nanguard_max_autopsies", value) for value in (0, -3, 2.5, "5", None, True)],
    *[("nanguard_autopsy_seconds", value) for value in (0.0, -1.0, NAN, INF, "long", None, True)],
    *[
        (f"nanguard_{name}", value)
        for name in ("autopsy", "bundle", "bundle_text", "push_to_hub")
        for value in ("on", None, 1)
    ],
    *[
        (f"nanguard_{name}", value)
        for name in ("stall_steps", "activation_steps", "attention_steps", "weight_check_steps")
        for value in (-1, 2.5, "5", None, True)
    ],
    *[("nanguard_activation_modules", value) for value in ("", "a,,b", 3)],
    *[("nanguard_full_metrics", value) for value in ("yes", None, 1)],
    ("nanguard_logits_min_prob", 2),
    *[("nanguard_ratio_bound", value) for value in (0.0, -1.0, NAN, INF, 50.0, "x", True)],
    *[
        (f"nanguard_{name}", value)
        for name in ("logits_clip_value", "logits_min_prob", "min_temperature")
        for value in (0.0, -1.0, NAN, INF, "x", None, True)
    ],
    *[("nanguard_skip_grad_norm", value) for value in (0, -2.0, NAN, INF, "large", True)],
    *[("nanguard_loss_floor", value) for value in (0.0, -1e-6, NAN, INF, "tiny", None, True)],
    ("nanguard_on_nonfinite", "rewind"),
]


def test_bad_values_are_tried_for_every_field():
    assert {name for name, _ in BAD} == set(FIELDS)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_one_message_with_name_value_and_way_out(name, value):
    with pytest.raises(ArgumentError) as caught:
        GuardArguments(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert f"got {value!r}." in message
    choices = SETTINGS[name.removeprefix("nanguard_")].choices
    if choices:
        assert f"one of {', '.join(choices)}," in message
    else:
        assert re.search(
            r"must be (an integer of at least [01]( or None)?|a finite number above 0( and at most (1|40))?( or None)?|True or False|"
            r"names separated by commas or None),",
            message,
        )
    assert "\n" not in message


@pytest.mark.parametrize("config", CONFIGS)
def test_guarded_configs_check_at_construction_too(config, tmp_path):
    with pytest.raises(ArgumentError, match="nanguard_max_bad_steps must be an integer of at least 1, got -1"):
        config(output_dir=str(tmp_path), nanguard_max_bad_steps=-1)


def test_settings_that_contradict_each_other_are_both_named():
    with pytest.raises(ArgumentError) as caught:
        GuardArguments(nanguard_mode="observe", nanguard_skip_grad_norm=2.0)
    for part in ("nanguard_skip_grad_norm", "2.0", "nanguard_mode", "'observe'", "leave nanguard_skip_grad_norm out"):
        assert part in str(caught.value)


def test_an_unknown_field_is_refused_by_the_dataclass():
    with pytest.raises(TypeError, match="nanguard_on_nonfinte"):
        GuardArguments(nanguard_on_nonfinte="drop")


# ---- the way to the guard ----


def test_settings_reach_the_policy_one_to_one():
    assert GuardArguments().policy() == Policy()
    policy = GuardArguments(**EXPECTED).policy()
    assert dataclasses.asdict(policy) == {name.removeprefix("nanguard_"): value for name, value in EXPECTED.items()}


def test_given_settings_come_before_those_of_the_config(tmp_path):
    args = GuardedTrainingArguments(str(tmp_path), nanguard_max_bad_steps=4)
    given = GuardArguments(nanguard_max_bad_steps=6)
    assert find_guard_arguments(given, args) is given
    assert find_guard_arguments(None, args) is args
    assert find_guard_arguments(None, TrainingArguments(str(tmp_path))) == GuardArguments()


def test_settings_given_to_a_trainer_are_carried_out(tmp_path):
    extra = {"guard": GuardArguments(nanguard_on_nonfinite="skip")}
    trainer = build("plain", tmp_path, extra=extra)
    plant(trainer, Fault("loss", 1, 1))
    trainer.train()
    assert [(event["step"], event["action"]) for event in events_of(trainer)] == [(1, "skipped")]
    assert trainer.nanguard.guard.counter.dropped == 3


def _plain_trainers(tmp_path):
    import trl

    rows = text_rows(12)
    arguments = common_arguments(tmp_path, max_steps=2)
    tokenizer = tiny_tokenizer()
    prompts = Dataset.from_list([{"prompt": row["text"]} for row in rows])
    grpo = trl.GRPOConfig(**arguments, num_generations=2, max_completion_length=4)
    yield GuardedTrainer(tiny_llama(), TrainingArguments(**arguments), train_dataset=token_dataset(12))
    yield GuardedSFTTrainer(
        tiny_llama(), args=trl.SFTConfig(**arguments, max_length=16), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    yield GuardedGRPOTrainer(
        tiny_llama(), args=grpo, train_dataset=prompts, processing_class=tokenizer, reward_funcs=reward_length
    )


def test_plain_configs_of_the_host_are_guarded_by_the_defaults(tmp_path):
    for trainer in _plain_trainers(tmp_path):
        assert not isinstance(trainer.args, GuardArguments)
        assert trainer.nanguard.policy == Policy()
        planted = plant(trainer, Fault("loss", 1, 1))
        trainer.train()
        assert len(planted.triggered) == 1
    assert [(event["step"], event["micro_step"], event["action"]) for event in events_of(trainer)] == [
        (1, 1, "dropped")
    ] * 3  # fmt: skip


@pytest.mark.parametrize("way", list(WAYS)[:4])
def test_settings_may_be_a_dictionary(way, tmp_path):
    trainer = build_guarded(way, "plain", tmp_path, {"nanguard_on_nonfinite": "skip"}, max_steps=1)
    trainer.train()
    assert trainer.nanguard.policy.on_nonfinite == "skip"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"on_nonfinite": "skip"}, "guard has no setting 'on_nonfinite', did you mean nanguard_on_nonfinite?"),
        ({"zzz": 1}, "guard has no setting 'zzz'."),
        ("skip", "guard must be GuardArguments or a dictionary of its fields, got str."),
    ],
)
@pytest.mark.parametrize("way", list(WAYS)[:4])
def test_other_settings_are_refused_in_one_sentence(way, given, sentence, tmp_path):
    with pytest.raises(ArgumentError) as caught:
        build_guarded(way, "plain", tmp_path, given)
    assert str(caught.value).startswith(sentence)
