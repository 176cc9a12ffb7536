"""A micro-batch brought back from its bundle: bit-identical if it was healthy, with the same origin if it was not, and
hostile bundles refused in a sentence."""

import inspect
import json
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

from hf_nanguard import ArgumentError
from hf_nanguard.bundle_replay.rebuild import rebuild, replay
from hf_nanguard.bundle_replay.rebuilt_trainer import OFF, RUN_ARGUMENTS, TRAINERS, build_arguments
from hf_nanguard.core.autopsy.bundle.reader import read_bundle
from hf_nanguard.core.autopsy.bundle.writer import write_bundle
from hf_nanguard.core.autopsy.evidence.verdict import Verdict
from hf_nanguard.core.rng import RngState
from hf_nanguard.hf.compat.own_loss import find_own_loss
from hf_nanguard.hf.trainer.trainer_facts import describe_model
from tests.architectures import BY_NAME
from tests.models import VOCAB, text_rows, tiny_llama, tiny_tokenizer, token_dataset
from tests.trainers import build, common_arguments, reward_length

from .bundles import NAN, UP, bad_row, bad_weight, examine_and_write, far_policy, healthy, hold, overflow, write

ROOT = Path(__file__).parent.parent.parent
CHECKPOINTED = {"gradient_checkpointing": True}
SETTINGS = {
    "plain": {"kind": "plain"},
    "plain, label smoothing": {"kind": "plain", "label_smoothing_factor": 0.1},
    "plain, float16": {"kind": "plain", "dtype": torch.float16},
    "plain, bfloat16 autocast": {"kind": "plain", "bf16": True},
    "plain, checkpointing": {
        "kind": "plain",
        **CHECKPOINTED,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "plain, reentrant": {"kind": "plain", **CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "sft": {"kind": "sft"},
    "sft, dft": {"kind": "sft", "loss_type": "dft"},
    "sft, LoRA": {"kind": "sft", "lora": True},
    "sft, LoRA, float16": {"kind": "sft", "lora": True, "dtype": torch.float16},
    "dpo, LoRA": {"kind": "dpo", "lora": True, "loss_type": ["ipo"], "beta": 0.3},
    "grpo": {"kind": "grpo", "temperature": 0.7, "epsilon": 0.3},
    "grpo, LoRA": {"kind": "grpo", "lora": True, "loss_type": "bnpo", "importance_sampling_level": "sequence"},
}


def run_both(suspect, folder: Path, **more) -> tuple[dict, dict]:
    """Returns loss and gradients of a micro-batch, and of the one that its bundle gives."""
    path = write_bundle(
        folder / "step-7", suspect, Verdict(None), suspect.runner.facts(suspect.weight), weights="all", **more
    )
    both = []
    for one in (suspect, rebuild(read_bundle(path))):
        loss = one.run().loss
        both.append({"loss": torch.tensor(loss), **{name: g.clone() for name, g in one.runner.named_gradients()}})
    return both[0], both[1]


def assert_equal(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert torch.isfinite(first["loss"])
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_healthy_batch_is_bit_identical(settings, tmp_path):
    suspect = hold(build(output_dir=tmp_path / "run", guard=False, **settings), healthy)
    assert_equal(*run_both(suspect, tmp_path))


def test_the_loss_depends_on_what_is_recorded(tmp_path):
    """The arguments above are not idle: another value gives another loss."""
    path, _ = write(tmp_path, "grpo", far_policy, epsilon=0.3)
    bundle = read_bundle(path)
    was = rebuild(bundle).run().loss
    bundle.facts["arguments"]["epsilon"] = bundle.facts["arguments"]["epsilon_high"] = 0.9
    assert rebuild(bundle).run().loss != was


@pytest.mark.parametrize("kind", ["reward", "kto", "rloo"])
def test_other_trainers_of_trl(kind, tmp_path):
    import trl
    from datasets import Dataset

    words = [row["text"] for row in text_rows(16)]
    arguments = common_arguments(tmp_path / "run")
    extra = {"processing_class": tiny_tokenizer()}
    if kind == "reward":
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=1,
        )  # fmt: skip
        rows = [{"chosen": words[i], "rejected": f"{words[i + 1]} w3"} for i in range(8)]
        trainer = trl.RewardTrainer(
            LlamaForSequenceClassification(config),
            args=trl.RewardConfig(center_rewards_coefficient=0.1, **arguments),
            train_dataset=Dataset.from_list(rows),
            **extra,
        )
    elif kind == "kto":
        from peft import get_peft_model

        model = get_peft_model(tiny_llama(), lora())
        rows = [{"prompt": "w1", "completion": f" {words[i]}", "label": i % 2 == 0} for i in range(8)]
        trainer = trl.KTOTrainer(model, args=trl.KTOConfig(**arguments), train_dataset=Dataset.from_list(rows), **extra)
    else:
        rows = [{"prompt": word} for word in words]
        trainer = trl.RLOOTrainer(
            tiny_llama(),
            reward_funcs=reward_length,
            args=trl.RLOOConfig(num_generations=2, max_completion_length=4, beta=0.0, **arguments),
            train_dataset=Dataset.from_list(rows),
            **extra,
        )
    assert_equal(*run_both(hold(trainer, healthy), tmp_path))


def lora():
    from peft import LoraConfig

    return LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("kind", ["adapter of the trainer's", "adapter of the user's", "answers in the data"])
def test_the_reference_of_dpo_is_the_one_of_the_run(kind, tmp_path):
    """The base model, a frozen copy of the adapter, or the log-probabilities that came with the batch."""
    import trl
    from datasets import Dataset
    from peft import get_peft_model

    words = [row["text"] for row in text_rows(16)]
    rows = [{"prompt": "w1 w2", "chosen": f" {words[2 * i]}", "rejected": f" {words[2 * i + 1]}"} for i in range(8)]
    answers = kind == "answers in the data"
    args = trl.DPOConfig(max_length=24, precompute_ref_log_probs=answers, **common_arguments(tmp_path / "run"))
    trainer = trl.DPOTrainer(
        get_peft_model(tiny_llama(), lora()) if kind == "adapter of the user's" else tiny_llama(),
        ref_model=tiny_llama(seed=4) if answers else None,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        peft_config=lora() if kind == "adapter of the trainer's" else None,
    )
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:  # of the adapter and of its copy: as if they had been trained
            parameter.data.normal_(0.0, 0.5)
    assert_equal(*run_both(hold(trainer, healthy), tmp_path))


def test_grpo_needs_no_reference_model(tmp_path):
    import trl
    from datasets import Dataset
    from peft import get_peft_model

    args = trl.GRPOConfig(
        num_generations=2, max_completion_length=4, beta=0.2, entropy_coef=0.1, **common_arguments(tmp_path / "run")
    )
    trainer = trl.GRPOTrainer(
        get_peft_model(tiny_llama(), lora()),
        reward_funcs=reward_length,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": row["text"]} for row in text_rows(8)]),
        processing_class=tiny_tokenizer(),
    )
    for name, parameter in trainer.model.named_parameters():
        if "lora_B.default" in name:
            parameter.data.normal_(0.0, 0.5)
    assert_equal(*run_both(hold(trainer, healthy), tmp_path))


def test_tied_weights_stay_tied(tmp_path):
    args = TrainingArguments(**common_arguments(tmp_path / "run"))
    trainer = Trainer(tiny_llama(tied=True), args, train_dataset=token_dataset(8))
    first, second = run_both(hold(trainer, healthy), tmp_path)
    assert_equal(first, second)
    assert "lm_head.weight" not in second


def test_float16_autocast_of_a_gpu_is_there_on_the_cpu(tmp_path):
    def from_gpu(facts):
        facts["model"] |= {"device": "cuda", "mixed_precision": "fp16"}
        facts["arguments"]["fp16"] = True

    path, verdict = write(tmp_path, plant=overflow, change=from_gpu)
    assert verdict.origin is None  # in float32 nothing overflows
    origin = rebuild(read_bundle(path)).find_origin()
    assert (origin.module, origin.dtype, str(origin.cause)) == ("model.layers.0.mlp", "float16", "fp16_overflow")


@pytest.mark.parametrize("name", ["mixtral", "t5", "bert", "llava", "wav2vec2", "gemma2"])
def test_other_architectures(name, tmp_path):
    architecture = BY_NAME[name]
    cls = transformers.Seq2SeqTrainer if name == "t5" else Trainer
    arguments = transformers.Seq2SeqTrainingArguments if name == "t5" else TrainingArguments
    batch = architecture.inputs()
    rows = [{key: value[i] for key, value in batch.items()} for i in range(len(next(iter(batch.values()))))]
    collate = lambda rows: {key: torch.stack([row[key] for row in rows]) for key in rows[0]}  # noqa: E731
    args = arguments(**common_arguments(tmp_path / "run", remove_unused_columns=False))
    trainer = cls(architecture.build(), args, train_dataset=rows, data_collator=collate)
    assert_equal(*run_both(hold(trainer, healthy), tmp_path))


def test_a_frozen_model_stays_frozen(tmp_path):
    trainer = build("plain", tmp_path / "run", guard=False)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    first, second = run_both(hold(trainer, healthy), tmp_path)
    assert_equal(first, second)
    assert all("layers.1" in name for name in second if name != "loss")


# ---- the verdict, in a process of its own ----


@pytest.mark.slow  # its twin in tests/cli/test_replay.py is not
def test_the_same_origin_in_a_fresh_process(tmp_path):
    planted = {
        "plain": {"plant": bad_row},
        "half": {"kind": "sft", "plant": overflow, "dtype": torch.float16},
        "lora": {"kind": "sft", "plant": bad_weight, "lora": True},
        "checkpointed": {"plant": bad_weight, **CHECKPOINTED},
        "ratio": {"kind": "grpo", "plant": far_policy},
    }
    written = {name: write(tmp_path / name, **settings) for name, settings in planted.items()}
    code = (
        "import json, sys\nfrom hf_nanguard.bundle_replay.rebuild import replay\n"
        "print(json.dumps([replay(path).as_dict() for path in sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, *(str(path) for path, _ in written.values())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    for (name, (_, verdict)), again in zip(written.items(), json.loads(done.stdout), strict=True):
        before = json.loads(json.dumps(verdict.as_dict()))
        assert before["origin"] is not None, name
        compared = ("origin", "blame", "cause", "reproducible", "num_samples")
        assert {key: again[key] for key in compared} == {key: before[key] for key in compared}, name
    assert written["plain"][1].blame.samples == [1]
    assert written["half"][1].origin.module == "model.layers.0.mlp"
    assert written["lora"][1].origin.leaf == f"base_model.model.model.{UP}"
    assert str(written["ratio"][1].cause) == "ratio_overflow"


def test_replay_leaves_the_random_state_alone(tmp_path):
    path, verdict = write(tmp_path)
    before = RngState.capture()
    assert replay(path).origin == verdict.origin
    after = RngState.capture()
    assert torch.equal(before.cpu, after.cpu)
    assert before.python == after.python


# ---- weights ----


def test_missing_weights_are_asked_for(tmp_path):
    path, _ = write(tmp_path, weights="none")
    with pytest.raises(
        ArgumentError, match=r"20 of the model's 21 .*--checkpoint FOLDER.*nanguard_bundle_weights='all'"
    ):
        rebuild(read_bundle(path))


@pytest.mark.parametrize("shards", [False, True])
def test_weights_of_a_checkpoint(shards, tmp_path):
    trainer = build("plain", tmp_path / "run", guard=False)
    suspect = hold(trainer, bad_weight)
    clean = tiny_llama()
    clean.save_pretrained(tmp_path / "checkpoint", **({"max_shard_size": "10KB"} if shards else {}))
    assert (tmp_path / "checkpoint" / "model.safetensors.index.json").exists() is shards
    path, verdict = examine_and_write(suspect, tmp_path, weights="none")
    again = rebuild(read_bundle(path), tmp_path / "checkpoint")
    assert again.find_origin() == verdict.origin  # the bad weight itself is in the bundle
    same = dict(again.model.named_parameters())
    assert all(torch.equal(same[name], p) for name, p in clean.named_parameters() if not name.endswith(UP))


def test_weights_of_base_model_and_adapter(tmp_path):
    trainer = build("sft", tmp_path / "run", guard=False, lora=True)
    suspect = hold(trainer, healthy)
    loss = suspect.run().loss
    trainer.model.save_pretrained(tmp_path / "adapter")
    tiny_llama().save_pretrained(tmp_path / "base")
    for weights, folders in (("none", ["base", "adapter"]), ("trainable", ["base"])):
        path, _ = examine_and_write(suspect, tmp_path / weights, weights=weights)
        assert rebuild(read_bundle(path), [tmp_path / folder for folder in folders]).run().loss == loss
    with pytest.raises(ArgumentError, match="--checkpoint"):
        rebuild(read_bundle(path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "pytorch_model.bin is a pickle"),
        (["model.pt", "config.json"], "model.pt is a pickle"),
        ([], "must contain safetensors"),
        (None, "must be a folder"),
    ],
)
def test_only_safetensors_are_loaded(files, message, tmp_path):
    path, _ = write(tmp_path, weights="none")
    folder = tmp_path / "checkpoint"
    for file in files or ():
        folder.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    if files == []:
        folder.mkdir()
    with pytest.raises(ArgumentError, match=message):
        rebuild(read_bundle(path), folder)


@pytest.mark.parametrize("file", ["evil.bin", "../model.safetensors", "/etc/model.safetensors", 7])
def test_an_index_of_shards_stays_in_its_folder(file, tmp_path):
    path, _ = write(tmp_path, weights="none")
    (tmp_path / "checkpoint").mkdir()
    index = tmp_path / "checkpoint" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises(ArgumentError, match=r"--checkpoint"):
        rebuild(read_bundle(path), tmp_path / "checkpoint")


# ---- what cannot be rebuilt ----


def change_model(**values):
    return lambda facts: facts["model"].update(values)


def change_config(**values):
    return lambda facts: facts["model"]["config"].update(values)


def change_trainer(**values):
    return lambda facts: facts["trainer"].update(values)


LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}


def change_adapter(**values):
    return change_model(adapters={"default": {**LORA, **values}})


HOSTILE = {
    "a function for a class": (change_model(**{"class": "os.system"}), "'os.system'.*--factory"),
    "a pipeline for a class": (change_model(**{"class": "pipeline"}), "'pipeline'"),
    "an auto class": (change_model(**{"class": "AutoModelForCausalLM"}), "AutoModelForCausalLM"),
    "a class of one's own": (change_model(module="evil"), "'LlamaForCausalLM' of 'evil'"),
    "no class": (change_model(**{"class": None}), "None"),
    "no config": (change_model(config=None), "config must be"),
    "another config": (change_config(model_type="bert"), "model_type 'bert'"),
    "broken config": (change_config(num_attention_heads="many"), "could not be built"),
    "kernels of the hub": (
        change_model(attention={"": "evil/kernel"}),
        "kernels are not downloaded, got 'evil/kernel'",
    ),
    "experts of the hub": (change_model(experts="evil/kernel"), "'evil/kernel'"),
    "quantized": (change_config(quantization_config={"quant_method": "gptq"}), "quantized"),
    "more than an integer": (change_config(hidden_size=2**40), "hidden_size"),
    "more than memory": (change_config(hidden_size=2**17, intermediate_size=2**20), "GiB"),
    "endless layers": (change_config(num_hidden_layers=10**6), "num_hidden_layers=1000000"),
    "unknown dtype": (change_model(dtype="__class__"), "'__class__'"),
    "another adapter": (change_model(adapters={"default": {"peft_type": "PROMPT_TUNING"}}), "'PROMPT_TUNING'"),
    "an adapter that imports": (change_model(adapters={"default": {**LORA, "megatron_config": {"a": 1}}}), "megatron"),
    "a pattern without end": (change_adapter(target_modules="(a+)+$"), "target_modules=.*forever"),
    "many repeats": (change_adapter(exclude_modules=".*.*.*.*.*x"), "exclude_modules=.*forever"),
    "a rank's pattern": (change_adapter(rank_pattern={"([a-z.]*)*q": 2}), "rank_pattern=.*forever"),
    "a scale's pattern": (change_adapter(alpha_pattern={"(a|a)*b": 2}), "alpha_pattern=.*forever"),
    "a layer's pattern": (
        change_adapter(layers_to_transform=[0], layers_pattern=["(.+)+x"]),
        "layers_pattern=.*forever",
    ),
    "an endless rank": (change_adapter(r=2**30), "r=1073741824, but a rank is at most"),
    "an endless rank of a module": (change_adapter(rank_pattern={"q_proj": 2**30}), "a rank is at most"),
    "copied layers": (change_adapter(layer_replication=[[0, 2]] * 10**4), "layer_replication=.*impossible"),
    "an endless list": (change_config(pruned_heads=[0] * 10**6), "pruned_heads of 1000000 entries"),
    "endless buffers": (
        lambda facts: facts["model"].update(
            {"class": "GPTNeoForCausalLM", "config": {"model_type": "gpt_neo", "max_position_embeddings": 2**20}}
        ),
        "GiB",
    ),
    "a device of another world": (change_model(device="nonsense:7", **{"class": None}), "None"),
    "another trainer": (change_trainer(host="Popen"), "'Popen'.*--factory"),
    "a trainer of no name": (change_trainer(host=["Trainer"]), "must be one of"),
    "a loss of its own": (change_trainer(own_loss=["compute_loss"]), "compute_loss.*--factory"),
    "another kind": (lambda facts: facts.update(kind="loop"), "loop.*--factory"),
    "no model": (lambda facts: facts.pop("model"), "does not describe its model"),
    "arguments it cannot take": (lambda facts: facts["arguments"].update(bf16=True, fp16=True), "could not be built"),
}


@pytest.fixture(scope="module")
def suspect(tmp_path_factory):
    return hold(build("plain", tmp_path_factory.mktemp("run"), guard=False), bad_weight)


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_bundle_is_refused(change, message, suspect, tmp_path):
    facts = suspect.runner.facts(suspect.weight)
    change(facts)
    path = write_bundle(tmp_path / "step-7", suspect, Verdict(None), facts, weights="all")
    with pytest.raises(ArgumentError, match=message) as refused:
        rebuild(read_bundle(path))
    assert "\n" not in str(refused.value)


def test_facts_of_any_type_are_refused_in_a_sentence(suspect, tmp_path):
    """Each fact in turn is replaced by something else: it is refused, or it does not matter."""
    facts = suspect.runner.facts(suspect.weight)
    path = write_bundle(tmp_path / "step-7", suspect, Verdict(None), facts, weights="all")
    bundle = read_bundle(path)
    refused = 0
    for holder in (bundle.facts, bundle.facts["model"], bundle.facts["trainer"]):
        for name, value in list(holder.items()):
            for wrong in ([[]], {"": 7}, "\x1b[2J", -1):
                holder[name] = wrong
                try:
                    rebuild(bundle)
                except ArgumentError:
                    refused += 1
                holder[name] = value
    assert refused > 30
    assert rebuild(bundle).find_origin().leaf.endswith(UP)


def test_nothing_is_fetched_or_imported(suspect, tmp_path, monkeypatch):
    def no_network(*args):
        raise AssertionError("reached for the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    facts = suspect.runner.facts(suspect.weight)
    facts["trainer"]["module"] = "evil"
    facts["model"]["config"] |= {
        "auto_map": {"AutoModelForCausalLM": "evil/repo--evil.Model"},
        "_name_or_path": "evil/repo",
        "use_pretrained_backbone": True,
    }
    written = tmp_path / "elsewhere"
    facts["arguments"] |= {
        "output_dir": str(written), "push_to_hub": True, "hub_model_id": "evil/repo", "trust_remote_code": True,
        "report_to": ["wandb"], "resume_from_checkpoint": "evil/repo", "deepspeed": "evil.json", "torch_compile": True,
    }  # fmt: skip
    path = write_bundle(tmp_path / "step-7", suspect, Verdict(None), facts, weights="all")
    again = rebuild(read_bundle(path))
    args = again.runner.trainer.args
    assert again.find_origin().leaf.endswith(UP)
    assert "evil" not in sys.modules
    assert not written.exists()
    assert (args.push_to_hub, args.report_to, args.deepspeed, args.torch_compile) == (False, [], None, False)


@pytest.mark.parametrize("name", TRAINERS)
def test_output_hub_reporting_and_launchers_stay_off(name, tmp_path):
    """Whatever a bundle says about them, also in words that could be names of folders or repositories."""
    package, arguments_name = TRAINERS[name]
    cls = getattr(__import__(package), arguments_name)
    hostile = {
        "push_to_hub": True, "hub_model_id": "evil", "deepspeed": "evil", "fsdp": "full_shard", "torch_compile": True,
        "full_determinism": True, "load_best_model_at_end": True, "resume_from_checkpoint": "evil", "tf32": True,
        "run_name": "evil", "use_liger_kernel": True, "trust_remote_code": True, "chat_template_path": "evil",
        "model_init_kwargs": {"evil": 1}, "eos_token": "evil", "pad_token": "evil", "use_vllm": True, "vllm_mode": "server",
        "vllm_server_host": "evil", "log_completions": True, "log_completions_hub_repo": "evil", "sync_ref_model": True,
        "activation_offloading": True, "generation_kwargs": {"evil": 1}, "use_transformers_paged": True,
        "generation_config": "evil", "dataset_kwargs": {"evil": 1}, "dataset_num_proc": 10**6,
    }  # fmt: skip
    recorded = {
        "output_dir": "evil",
        "report_to": ["wandb"],
        "loss_type": "../evil",
        "label_smoothing_factor": 0.25,
        "num_generations": 2,
        **hostile,
    }
    args = build_arguments(cls, {"arguments": recorded}, torch.device("cpu"), str(tmp_path))
    stock = cls(str(tmp_path), use_cpu=True, report_to="none")
    assert [key for key in hostile if getattr(args, key, None) != getattr(stock, key, None)] == []
    assert (args.output_dir, args.report_to, args.label_smoothing_factor) == (str(tmp_path), [], 0.25)
    assert getattr(args, "loss_type", None) == getattr(stock, "loss_type", None)


def test_dpo_needs_its_reference(tmp_path):
    path, _ = write(tmp_path, "dpo")
    with pytest.raises(ArgumentError, match=r"DPOTrainer needs its reference model.*--factory"):
        rebuild(read_bundle(path))


def test_tensors_that_do_not_fit(tmp_path):
    path, _ = write(tmp_path, change=change_config(intermediate_size=48))
    with pytest.raises(ArgumentError, match=r"does not fit the model, which has shape \[16, 48\] there"):
        rebuild(read_bundle(path))


# ---- models and losses of one's own ----


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_factory.py").write_text(
        "import torch\n"
        "from tests.models import tiny_llama\n"
        "def model(bundle): return tiny_llama(seed=3)\n"
        "def both(bundle): return tiny_llama(seed=3, dropout=0.0), lambda model, inputs: model(**inputs).loss * 2\n"
        "def wrong(bundle): return 'model'\n"
        "class Module(torch.nn.Linear): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_factory"
    sys.modules.pop("own_factory", None)


def test_a_factory_for_the_model_alone(own_module, tmp_path):
    path, verdict = write(tmp_path, change=change_model(**{"class": "MyModel"}))
    with pytest.raises(ArgumentError, match="MyModel"):
        rebuild(read_bundle(path))
    again = rebuild(read_bundle(path), factory="own_factory:model")
    assert again.find_origin() == verdict.origin
    assert type(again.runner.trainer).__name__ == "Trainer"


def test_a_factory_for_the_loss(own_module, tmp_path):
    path, verdict = write(tmp_path, change=change_trainer(own_loss=["compute_loss"]))
    again = rebuild(read_bundle(path), factory="own_factory:both")
    assert again.find_origin().signature == verdict.origin.signature
    healthy_path, _ = write(tmp_path / "healthy", "plain", healthy, dropout=0.0, gradient_accumulation_steps=1)
    loss = rebuild(read_bundle(healthy_path), factory="own_factory:both").run().loss
    with torch.no_grad():
        expected = 2 * tiny_llama(dropout=0.0)(**read_bundle(healthy_path).inputs).loss
    assert loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("own_factory", "module:function"),
        ("own_factory:", "module:function"),
        ("own_factory:missing", "missing"),
        ("no_such_module:build", "no_such_module"),
        ("own_factory:wrong", "returned str"),
    ],
)
def test_a_factory_that_cannot_be(factory, message, own_module, tmp_path):
    path, _ = write(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        rebuild(read_bundle(path), factory=factory)


def test_a_callback_has_the_models_own_loss(suspect, tmp_path):
    """What a callback catches are the calls of the model's forward."""
    trainer = suspect.runner.trainer
    facts = {"kind": "callback", **describe_model(trainer.accelerator.unwrap_model(trainer.model))}
    path = write_bundle(tmp_path / "step-7", suspect, Verdict(None), facts, weights="all")
    with pytest.raises(ArgumentError, match="calls of the model's forward"):
        rebuild(read_bundle(path))
    bundle = read_bundle(path)
    object.__setattr__(bundle, "inputs", {"args": [], "kwargs": bundle.inputs})
    again = rebuild(bundle)
    assert again.find_origin().leaf.endswith(UP)
    with torch.no_grad():
        dict(again.model.named_parameters())[f"model.{UP}"].nan_to_num_(nan=0.0)
    assert again.run().healthy


# ---- facts and text ----


def test_facts_are_strict_json_without_places(tmp_path):
    trainer = build("sft", tmp_path / "secret", guard=False, lora=True, hub_model_id="secret/name", run_name="secret")
    trainer.model.config._name_or_path = "secret/base"
    suspect = hold(trainer, healthy)
    facts = suspect.runner.facts(suspect.weight)
    assert "secret" not in json.dumps(facts, allow_nan=False)
    assert facts["trainer"]["host"] == "SFTTrainer"
    assert facts["trainer"]["own_loss"] == []
    assert facts["share"] == {"steps": 3, "num_items": int(suspect.weight.num_items), "completion_items": None}
    assert facts["arguments"]["learning_rate"] == 1e-2
    assert (
        facts["versions"]["torch"] == torch.__version__.split("+")[0] or facts["versions"]["torch"] == torch.__version__
    )
    assert set(facts["model"]["trainable"]) == {n for n, p in trainer.model.named_parameters() if p.requires_grad}


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class OwnLog(Trainer):
    def log(self, *args, **kwargs):
        return super().log(*args, **kwargs)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize(
    ("cls", "extra", "own"),
    [
        (Trainer, {}, []),
        (OwnLog, {}, []),
        (OwnLoss, {}, ["compute_loss"]),
        (OwnStep, {}, ["training_step"]),
        (Trainer, {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()},
         ["compute_loss_func"]),
    ],
)  # fmt: skip
def test_a_loss_of_ones_own_is_recorded(cls, extra, own, guard, tmp_path):
    assert find_own_loss(build("plain", tmp_path, trainer_class=cls, guard=guard, extra=extra)) == own


def test_every_argument_that_a_loss_reads_is_recorded():
    """A new version of a host may read another one."""
    harmless = {
        "max_length", "device", "n_gpu", "optim", "torch_empty_cache_steps", "per_device_train_batch_size",
        "gradient_checkpointing_kwargs",  # taken by itself
    }  # fmt: skip
    common = {f.name for f in fields(TrainingArguments)}
    for name, (package, _) in TRAINERS.items():
        cls = getattr(__import__(package), name)
        methods = ("compute_loss", "_compute_loss", "training_step", "_get_per_token_logps_and_entropies")
        text = "".join(inspect.getsource(vars(c)[m]) for c in cls.__mro__ for m in methods if m in vars(c))
        read = set(re.findall(r"self\.args\.(\w+)", text))
        taken = {arg for arg in read if (arg in RUN_ARGUMENTS if arg in common else not arg.startswith(OFF))}
        assert not read - taken - harmless, name


def test_non_finite_numbers_of_a_config_come_back(tmp_path):
    path, _ = write(tmp_path, change=change_config(some_limit=NAN, another=[0.0, float("inf")]))
    config = rebuild(read_bundle(path)).model.config
    assert config.some_limit != config.some_limit
    assert config.another == [0.0, float("inf")]
