"""Autopsies in real trainers: one row is bad, and the event names it, its token, the module, the operator and the line."""

import json
from inspect import getsourcelines
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from hf_nanguard import GuardArguments, NanGuardCallback, NonFiniteError, guarded
from hf_nanguard.core.autopsy.evidence.verdict import Blame, Verdict, format_verdict
from hf_nanguard.core.autopsy.trace.origin import Origin
from hf_nanguard.core.vocabulary import Cause
from hf_nanguard.hf.trainer.trainer_runner import decode_sample
from hf_nanguard.testing import Fault, plant

from ...models import text_rows, tiny_llama, tiny_tokenizer, token_rows
from ...reference import assert_same, losses_of, tensors_of
from ...trainers import KINDS, build, common_arguments, events_of

BAD_ROW = 13
NAME = "model.layers.1.mlp.up_proj.weight"
MARK = 63  # a token that no other row has: "w56"


def bad_dataset(kind):
    """The data of a kind, with `MARK` in one row."""
    if kind == "plain":
        rows = [{k: [t if t != MARK else 5 for t in v] for k, v in row.items()} for row in token_rows(48)]
        rows[BAD_ROW]["input_ids"][3] = rows[BAD_ROW]["labels"][3] = MARK
        return Dataset.from_list(rows)
    rows = text_rows(96)
    words = rows[BAD_ROW]["text"].split()
    rows[BAD_ROW]["text"] = " ".join([*words[:3], f"w{MARK - 7}", *words[4:]])
    return Dataset.from_list(rows[:48])


class Poison:
    """Takes the logarithm of zero at every `MARK`, in a named module and in training only."""

    def __init__(self, model, name="model.layers.1.mlp"):
        self.marked = None
        model.get_input_embeddings().register_forward_pre_hook(self.note)
        model.get_submodule(name).register_forward_hook(self.strike)

    def note(self, module, args):
        self.marked = args[0] == MARK

    def strike(self, module, args, output):
        if not torch.is_grad_enabled():
            return output
        marked = self.marked[:, -output.shape[1] :, None].to(output.dtype)
        return output + torch.log(1.0 - marked)


LINES, FIRST = getsourcelines(Poison.strike)
LINE = FIRST + next(i for i, line in enumerate(LINES) if "torch.log" in line)


def poisoned(kind, folder, guard=True, settings=None, **overrides):
    extra = {"train_dataset": bad_dataset(kind)}
    if guard and settings is not None:
        extra["guard"] = settings
    trainer = build(kind, folder, guard=guard, extra=extra, **overrides)
    Poison(trainer.accelerator.unwrap_model(trainer.model))
    return trainer


def the_event(trainer):
    [event] = [event for event in events_of(trainer) if event["signal"] != "guard_failed"]
    return event


def _check(event, row=BAD_ROW):
    culprit = event["culprit"]
    assert culprit["op"] == "aten.log.default"
    assert culprit["source"] == f"test_autopsy.py:{LINE}"
    assert culprit["module"] == "model.layers.1.mlp"
    assert culprit["phase"] == "forward"
    assert event["cause"] == "log_of_zero"
    assert event["values"]["autopsy"]["scope"] == "samples"
    if row is not None:
        assert culprit["rows"] == [row]
    assert {"drop_rows"} <= {remedy["name"] for remedy in event["remedies"] if remedy["works"]}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_the_row_the_token_and_the_line(kind, checkpointing, tmp_path):
    trainer = poisoned(kind, tmp_path, max_steps=8, gradient_checkpointing=checkpointing)
    trainer.train()
    event = the_event(trainer)
    assert event["action"] == "dropped"
    _check(event)
    assert {token for _, token in event["culprit"]["tokens"]} == {3}
    [sample] = event["culprit"]["samples"]
    assert {s for s, _ in event["culprit"]["tokens"]} == {sample}
    assert not any(torch.isnan(p).any() for p in trainer.model.parameters())
    bundle = Path(trainer.args.output_dir) / "nanguard" / event["bundle"]
    assert {"facts.json", "inputs.safetensors", "README.md"} <= {path.name for path in bundle.iterdir()}


def test_the_text_of_the_row_is_shown_unless_it_must_not(tmp_path):
    trainer = poisoned("sft", tmp_path / "shown", max_steps=8)
    trainer.train()
    [text] = the_event(trainer)["values"]["autopsy"]["texts"].values()
    assert text.split()[3] == f"w{MARK - 7}"
    trainer = poisoned("sft", tmp_path / "hidden", max_steps=8, settings=GuardArguments(nanguard_bundle_text=False))
    trainer.train()
    event = the_event(trainer)
    _check(event)
    assert set(event["values"]["autopsy"]["texts"].values()) == {"[redacted]"}
    written = [
        path.read_text() for path in (tmp_path / "hidden").rglob("*") if path.suffix in (".json", ".jsonl", ".md")
    ]
    assert written
    assert not any(f"w{MARK - 7}" in text for text in written)


@pytest.mark.parametrize("kind", KINDS)
def test_no_trace_of_the_autopsy(kind, tmp_path):
    """With and without an autopsy the run ends the same, metrics of the trainer included."""
    ends = []
    for autopsy in (True, False):
        trainer = build(kind, tmp_path / str(autopsy), extra={"guard": GuardArguments(nanguard_autopsy=autopsy)})
        bare = trainer.accelerator.unwrap_model(trainer.model)
        strike = {"armed": False}

        def hook(module, args, output, strike=strike, trainer=trainer):
            live = torch.is_grad_enabled() and trainer.state.global_step == 2
            strike["armed"] = strike["armed"] or live
            return output + torch.log(output.detach() * 0.0) if live else output

        bare.get_submodule("model.layers.0.mlp.up_proj").register_forward_hook(hook)
        trainer.train()
        assert strike["armed"]
        ends.append((tensors_of(trainer), losses_of(trainer), vars(trainer).get("_metrics")))
        events = [event for event in events_of(trainer) if event["step"] == 2]
        assert {event["culprit"]["op"] for event in events} == {"aten.log.default" if autopsy else None}
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_row_of_the_embedding_that_nobody_initialised(accumulation, tmp_path):
    """It costs the batch that needs it, not the run, as long as nobody looks at the weights themselves."""
    steps = 24 // accumulation
    extra = {
        "train_dataset": bad_dataset("plain"),
        "guard": GuardArguments(nanguard_weight_check_steps=0, nanguard_on_bad_start="observe"),
    }
    trainer = build(
        "plain", tmp_path, extra=extra, max_steps=steps,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[MARK] = float("nan")
    trainer.train()
    start, event = events_of(trainer)
    assert (start["step"], start["action"], start["values"]["rows"]) == (0, "observed", [MARK])
    culprit = event["culprit"]
    assert (culprit["phase"], culprit["parameter"]) == ("parameter", "model.embed_tokens.weight")
    assert (culprit["op"], culprit["module"]) == ("aten.embedding.default", "model.embed_tokens")
    assert event["cause"] == "uninitialised_weight"
    assert culprit["rows"] == [BAD_ROW]
    assert event["values"]["autopsy"]["num_bad"] == 16


@pytest.mark.parametrize("kind", ["plain", "sft", "dpo"])
def test_a_callback_explains_too(kind, tmp_path):
    trainer = build(kind, tmp_path, guard=False, extra={"callbacks": [NanGuardCallback()]}, max_steps=4)
    bare = trainer.model

    def hook(module, args, output):
        live = torch.is_grad_enabled() and trainer.state.global_step == 2
        return output + torch.log(output.detach() * 0.0) if live else output

    bare.get_submodule("model.layers.0.mlp.up_proj").register_forward_hook(hook)
    trainer.train()
    event, *others = events_of(trainer)
    assert {event["action"], *(other["action"] for other in others)} == {"skipped"}
    assert len(others) == 2  # all three micro-batches of the step
    assert (event["cause"], event["culprit"]["op"]) == ("log_of_zero", "aten.log.default")
    assert event["culprit"]["module"] == "model.layers.0.mlp.up_proj"
    assert event["values"]["autopsy"]["scope"] == "every_sample"
    assert event["message"].endswith("all its samples fail, the data is probably not the cause")
    assert event["culprit"]["samples"] is None
    assert len(event["culprit"]["rows"]) > 1


def test_a_micro_batch_of_bad_rows_alone_is_blamed_if_another_is_finite(tmp_path):
    """The weights of both its classes are 0; those of the other micro-batches are not."""
    from torch.nn.functional import cross_entropy
    from transformers import Trainer

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            weight = (torch.arange(64) != MARK).float()
            return cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten(), weight=weight)

    rows = token_rows(12)
    for row in (8, 9):
        rows[row]["labels"] = [MARK] * 8
    extra = {"train_dataset": Dataset.from_list(rows)}
    trainer = build("plain", tmp_path, Weighted, extra=extra, train_sampling_strategy="sequential", max_steps=2)
    trainer.train()
    [event] = events_of(trainer)
    assert (event["action"], event["cause"], event["values"]["autopsy"]["scope"]) == (
        "dropped",
        "div_by_zero",
        "samples",
    )
    assert (event["culprit"]["samples"], event["culprit"]["rows"]) == ([0, 1], [8, 9])
    assert event["message"].endswith("(dataset rows 8, 9)")


def test_a_callback_explains_a_loss_outside_the_model(tmp_path):
    from transformers import Trainer

    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = model(**inputs).loss
            return loss + torch.log(loss * 0.0) if self.state.global_step == 2 else loss

    trainer = build("plain", tmp_path, OwnLoss, guard=False, extra={"callbacks": [NanGuardCallback()]})
    trainer.train()
    event, *_ = events_of(trainer)
    assert (event["action"], event["culprit"]["phase"], event["culprit"]["module"]) == ("skipped", "loss", None)
    assert (event["cause"], event["culprit"]["op"]) == ("log_of_zero", "aten.log.default")


def test_a_run_in_float16_names_the_overflow_and_what_works(tmp_path):
    trainer = build("plain", tmp_path, dtype=torch.float16, max_steps=1, learning_rate=0.0)
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.up_proj.weight.fill_(3e4)
    trainer.train()
    event = next(event for event in events_of(trainer) if event["action"] == "skipped")
    assert event["cause"] == "fp16_overflow"
    assert event["culprit"]["module"] == "model.layers.1.mlp.up_proj"
    assert event["values"]["autopsy"]["dtype"] == "float16"
    assert event["values"]["autopsy"]["limit"] == 65504.0
    assert {"float32", "bfloat16"} <= {remedy["name"] for remedy in event["remedies"] if remedy["works"]}
    assert all(p.dtype == torch.float16 for p in trainer.model.parameters())


def test_text_is_printable():
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([[10, 11, 0], [12, 13, 14]])
    assert decode_sample(tokenizer, {"input_ids": ids}, 1) == "w5 w6 w7"
    assert decode_sample(tokenizer, {"prompt_ids": ids[:, :1], "completion_ids": ids[:, 1:]}, 0).split() == ["w3", "w4"]
    assert decode_sample(None, {"input_ids": ids}, 1) is None
    assert decode_sample(tokenizer, {"pixel_values": ids}, 1) is None
    assert decode_sample(tokenizer, {"input_ids": ids}, 7) is None
    blame = Blame("samples", [0], texts={0: "a\x1b[31mb\nc"})
    assert "[0] a [31mb c\n" in format_verdict(Verdict(Origin("forward", "nan", Cause.LOG_OF_ZERO), blame), 1, 0)


def test_events_are_strict_json(tmp_path):
    trainer = poisoned("plain", tmp_path, max_steps=8)
    trainer.train()
    lines = (tmp_path / "nanguard" / "events.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


@pytest.mark.parametrize(
    ("field", "cause"), [("old_per_token_logps", "ratio_overflow"), ("ref_per_token_logps", "kl_overflow")]
)
def test_a_policy_ratio_and_a_kl_term_are_told_apart(field, cause, tmp_path):
    """One completion whose log-probability is off by 200, as a policy that has moved too far or a stale buffer gives it."""
    import trl

    class Off(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            mask = output["completion_mask"]
            if field not in output:
                output[field] = torch.full(mask.shape, -4.0)
            sign = -1.0 if field == "old_per_token_logps" else 1.0
            if self.state.global_step == 1:
                output[field] = output[field].clone()
                output[field][0] += sign * 200.0
                output["advantages"] = torch.ones_like(output["advantages"])
            return output

    kl = cause == "kl_overflow"  # the reference of an adapter is the model without it
    trainer = build(
        "grpo", tmp_path, Off, max_steps=3, beta=0.1 if kl else 0.0, lora=kl, gradient_accumulation_steps=1,
        extra={"guard": GuardArguments(nanguard_ratio_bound=None)},
    )  # fmt: skip
    trainer.train()
    event = the_event(trainer)
    assert event["step"] == 1
    assert event["cause"] == cause
    assert event["culprit"]["op"].startswith("aten.exp")
    assert event["culprit"]["source"].startswith("grpo_trainer.py:")
    assert {"bounded_log_ratio"} <= {remedy["name"] for remedy in event["remedies"] if remedy["works"]}
    assert len(event["culprit"]["samples"]) == 1
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("kind", ["plain", "sft", "dpo"])
def test_a_moment_that_ruined_a_weight(kind, tmp_path):
    """Loss and gradients are finite in the step that does it; the next one finds the weight, and what made it so."""
    extra = {"guard": GuardArguments(nanguard_max_rewinds=0)}
    trainer = build(kind, tmp_path, extra=extra, max_steps=5)
    plant(trainer, Fault("moment", step=2, parameter=NAME))
    with pytest.raises(NonFiniteError, match="exp_avg"):
        trainer.train()
    halted = events_of(trainer)[-1]
    assert (halted["signal"], halted["action"], halted["step"]) == ("param_nonfinite", "halted", 3)
    assert (halted["cause"], halted["culprit"]["parameter"]) == ("optimizer_state", NAME)
    assert halted["culprit"]["phase"] == "optimizer"


@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_an_eps_that_is_zero_in_float16(kind, tmp_path):
    extra = {"guard": GuardArguments(nanguard_max_rewinds=0)}
    trainer = build(
        kind, tmp_path, dtype=torch.float16, optim="adamw_torch", max_steps=5, weight_decay=0.0, extra=extra
    )
    with pytest.raises(NonFiniteError, match="eps"):
        trainer.train()
    halted = events_of(trainer)[-1]
    assert (halted["signal"], halted["cause"]) == ("param_nonfinite", "adam_eps_underflow")
    works = {remedy["name"] for remedy in halted["remedies"] if remedy["works"]}
    assert {"larger_eps", "fused"} <= works


@pytest.mark.parametrize("kind", KINDS)
def test_a_finite_loss_with_a_bad_gradient(kind, tmp_path):
    """A root at zero: nothing in the forward tells, and every row is as guilty as the next."""
    trainer = build(kind, tmp_path, max_steps=4)
    bare = trainer.accelerator.unwrap_model(trainer.model)

    def hook(module, args, output):
        live = torch.is_grad_enabled() and trainer.state.global_step == 2
        return output + (output * 0.0).sqrt() if live else output

    bare.get_submodule("model.layers.0.mlp.up_proj").register_forward_hook(hook)
    trainer.train()
    events = [event for event in events_of(trainer) if event["step"] == 2]
    assert events
    for event in events:
        assert event["signal"] == "grad_nonfinite"
        assert (event["cause"], event["culprit"]["phase"]) == ("sqrt_at_zero", "backward")
        assert event["culprit"]["module"] == "model.layers.0.mlp.up_proj"
        assert event["culprit"]["source"].startswith("test_autopsy.py:")
        assert event["values"]["autopsy"]["node"] == "SqrtBackward0"
    assert {"eps_in_sqrt"} <= {remedy["name"] for remedy in events[0]["remedies"] if remedy["works"]}


def test_a_compiled_model_is_explained_as_it_was_written(tmp_path):
    trainer = build("plain", tmp_path, max_steps=2, torch_compile=True, torch_compile_backend="eager")
    Poison(trainer.model, "model.layers.0.mlp")
    trainer.train_dataset = bad_dataset("plain").select([BAD_ROW] * 12)
    trainer.train()
    event = events_of(trainer)[0]
    assert (event["culprit"]["op"], event["culprit"]["module"]) == ("aten.log.default", "model.layers.0.mlp")
    assert event["culprit"]["source"] == f"test_autopsy.py:{LINE}"


def _sick(folder, guard, every=None, **overrides):
    """A run with a bad row of the embedding in every `every`-th row of the data, or with a bad entry of a matrix."""
    rows = [{k: [t if t != MARK else 5 for t in v] for k, v in row.items()} for row in token_rows(48, 16)]
    for row in rows[::every] if every else ():
        row["input_ids"][3] = MARK
    extra = {"train_dataset": Dataset.from_list(rows), "guard": guard}
    trainer = build("plain", folder, extra=extra, gradient_accumulation_steps=1, **overrides)
    with torch.no_grad():
        if every:
            trainer.model.model.embed_tokens.weight[MARK] = float("nan")
        else:
            trainer.model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    return trainer


def test_a_bad_weight_ends_the_run_also_when_there_was_no_time_to_test_samples(tmp_path):
    guard = GuardArguments(nanguard_autopsy_seconds=1e-6)
    with pytest.raises(NonFiniteError, match="up_proj"):
        _sick(tmp_path, guard, per_device_train_batch_size=16).train()


def test_a_row_that_few_samples_need_does_not_end_the_run_when_no_more_is_examined(tmp_path):
    guard = GuardArguments(nanguard_max_autopsies=1, nanguard_max_bad_steps=100, nanguard_weight_check_steps=0,
                           nanguard_on_bad_start="observe")  # fmt: skip
    trainer = _sick(tmp_path, guard, every=12, per_device_train_batch_size=4, max_steps=36)
    trainer.train()
    assert trainer.state.global_step == 36
    assert len(events_of(trainer)) > 4


class Stateful(LlamaForCausalLM):
    """A model that counts, keeps a running mean and draws from a generator of its own, in plain attributes."""

    def __init__(self, config):
        super().__init__(config)
        self.calls, self.mean, self.generator = 0, torch.zeros(1), torch.Generator().manual_seed(3)

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1)
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        output.loss = output.loss * (1 + 0.1 * torch.rand(1, generator=self.generator).item())
        return output


@pytest.mark.parametrize("callback", [False, True])
def test_no_trace_of_the_autopsy_in_what_modules_hold(callback, tmp_path):
    ends = []
    for autopsy in (True, False):
        guard = GuardArguments(nanguard_autopsy=autopsy)
        torch.manual_seed(0)
        model = Stateful(tiny_llama().config)
        arguments = TrainingArguments(**common_arguments(tmp_path / str(autopsy), max_steps=8))
        dataset = bad_dataset("plain")
        if callback:
            trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[NanGuardCallback(guard)])
        else:
            trainer = guarded(Trainer)(model, arguments, train_dataset=dataset, guard=guard)
        Poison(model)
        trainer.train()
        assert the_event(trainer)["culprit"].get("op") == ("aten.log.default" if autopsy else None)
        ends.append((model.calls, model.mean, model.generator.get_state(), tensors_of(trainer)))
    (calls, mean, state, tensors), (other_calls, other_mean, other_state, others) = ends
    assert calls == other_calls
    assert torch.equal(mean, other_mean)
    assert torch.equal(state, other_state)
    assert_same(tensors, others)
