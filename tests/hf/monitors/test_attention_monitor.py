"""Planted collapses of attention, routers and head are named; healthy models stay silent, and no run is changed."""

import copy
import json
import logging
import math
from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, Trainer, TrainerCallback

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.hf.monitors.attention_monitor import AttentionMonitor
from hf_nanguard.testing import OperationCounter

from ...architectures import BY_NAME, DECODER, VOCAB
from ...models import tiny_llama
from ...reference import assert_same, losses_of, tensors_of
from ...trainers import build

LOOKUP = AttentionInterface.get_interface
SLOW = pytest.mark.slow
NOUNS = ("attention_score_max", "attention_entropy_min", "router_entropy_min", "router_load_max", "logsumexp_max")


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    left, AttentionInterface.get_interface = AttentionInterface.get_interface, LOOKUP
    assert left is LOOKUP


def make(model, period=1, early=(), **settings):
    """A monitor of one rank and the list of its events."""
    ranks, events = Ranks(alone=True), []
    return AttentionMonitor(model, Journal(ranks, events.append), period, early=early, **settings), events


def play(monitor, model, batch, steps, plant=None, first=0):
    """Forward, backward and the monitor, without an optimizer; `plant(step)` spoils the model. Returns all metrics."""
    rows = []
    for step in range(first, first + steps):
        if plant is not None:
            plant(step)
        monitor.begin_step(step)
        model(**batch).loss.backward()
        monitor.end_backward(step)
        monitor.before_update(step)
        assert monitor.after_update(step) is None
        rows.append(monitor.metrics())
    return rows


class Drive(TrainerCallback):
    """Takes a monitor through the steps of a stock trainer; `plant(model, step)` spoils the model."""

    def __init__(self, period=1, early=(), plant=None, full_metrics=False):
        self.settings = {"period": period, "early": early, "full_metrics": full_metrics}
        self.plant = plant
        self.rows = []
        self.events = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.monitor, self.events = make(model, **self.settings)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.plant is not None:
            self.plant(model, state.global_step)
        self.monitor.begin_step(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.monitor.end_backward(state.global_step)
        self.monitor.before_update(state.global_step)

    def on_optimizer_step(self, args, state, control, **kwargs):
        assert self.monitor.after_update(state.global_step) is None
        self.rows.append(self.monitor.metrics())


def emitted(events):
    """Signal, kind and module of events."""
    return [(event["signal"], event["values"].get("kind"), (event["culprit"] or {}).get("module")) for event in events]


def grow(parameter, after=3, factor=4.0, part=slice(None)):
    """Makes a weight larger at every step from `after` on."""

    def plant(step):
        if step >= after:
            with torch.no_grad():
                parameter[part] *= factor

    return plant


# ---- what is seen ----


@pytest.mark.parametrize("name", [name for name, a in BY_NAME.items() if a.sdpa])
def test_eager_and_sdpa_show_the_same(name):
    rows = []
    for attention in ("eager", "sdpa"):
        model = BY_NAME[name].build(attention=attention).eval()
        grow(
            next(
                p for n, p in model.named_parameters() if "q_proj" in n or "query" in n or "c_attn" in n or ".q." in n
            ),
            0,
        )(0)
        monitor, _ = make(model, full_metrics=True)
        rows += play(monitor, model, BY_NAME[name].inputs(), 1)
    assert rows[0].keys() == rows[1].keys()
    assert rows[0] == pytest.approx(rows[1], abs=1e-4)


def test_llama_is_measured_as_its_own_attention_weights_say():
    architecture = BY_NAME["llama"]
    model = architecture.build().eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight *= 100
    monitor, _ = make(model, full_metrics=True)
    [row] = play(monitor, model, architecture.inputs(), 1)
    with torch.no_grad():
        output = model(**architecture.inputs(), output_attentions=True)
    for layer, weights in enumerate(output.attentions):
        kept = weights[:2, :, 3:].double()  # two samples; the first three queries see fewer than four keys
        count = torch.arange(4, 9, dtype=torch.double)
        entropy = (torch.special.entr(kept).sum(-1) / count.log()).mean()
        assert row[f"nanguard/attention_entropy/model.layers.{layer}.self_attn"] == pytest.approx(
            float(entropy), abs=1e-5
        )
    lowest = min(value for name, value in row.items() if "attention_entropy/" in name)
    assert row["nanguard/attention_entropy_min"] == lowest < 0.99
    assert row["nanguard/logsumexp_max"] == pytest.approx(float(output.logits[:2].logsumexp(-1).abs().max()), rel=1e-5)


def test_a_router_is_measured_without_padding():
    architecture = BY_NAME["mixtral"]
    model, batch = architecture.build().eval(), architecture.inputs()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight *= 100
    monitor, _ = make(model, full_metrics=True)
    [row] = play(monitor, model, batch, 1)
    with torch.no_grad():
        [first, _] = model(**batch, output_router_logits=True).router_logits
    kept = first[batch["attention_mask"].flatten().bool()].double().softmax(-1)
    name = "model.layers.0.mlp.gate"
    assert row[f"nanguard/router_entropy/{name}"] == pytest.approx(
        float(torch.special.entr(kept).sum(-1).mean() / math.log(4)), abs=1e-5
    )
    assert row[f"nanguard/router_load/{name}"] == pytest.approx(float(kept.argmax(-1).bincount().max()) / len(kept))


def test_metrics_are_compact_unless_all_are_asked_for():
    architecture = BY_NAME["mixtral"]
    model = architecture.build()
    monitor, _ = make(model)
    assert play(monitor, model, architecture.inputs(), 1)[0].keys() == {f"nanguard/{noun}" for noun in NOUNS}
    assert monitor.metrics() == {}
    monitor, _ = make(model, full_metrics=True)
    row = play(monitor, model, architecture.inputs(), 1)[0]
    assert len(row) == len(NOUNS) + 2 * 2 + 2 * 2 + 1  # score and entropy, entropy and load of two layers; one head


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_checkpointing_shows_the_same_once(name, reentrant):
    architecture, rows = BY_NAME[name], []
    for checkpointing in (False, True):
        model = architecture.build()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        monitor, _ = make(model, full_metrics=True)
        rows += play(monitor, model, architecture.inputs(), 1)
        gradients = [p.grad for p in model.parameters()]
        bare = copy.deepcopy(model)
        bare.zero_grad()
        bare(**architecture.inputs()).loss.backward()
        assert all(torch.equal(a, b.grad) for a, b in zip(gradients, bare.parameters(), strict=True))
    assert rows[0] == pytest.approx(rows[1], abs=1e-6)


def test_generation_and_other_models_do_not_count():
    architecture = BY_NAME["llama"]
    model, other, batch = architecture.build(), architecture.build(), architecture.inputs()
    grow(other.model.layers[0].self_attn.q_proj.weight, 0, 1e4)(0)
    monitor, _ = make(model, full_metrics=True)
    [expected] = play(monitor, model, batch, 1)
    monitor.begin_step(1)
    with torch.no_grad():
        model.generate(torch.full((2, 9), 5), max_new_tokens=2, do_sample=False, pad_token_id=0)
    other(**batch).loss.backward()
    model(**batch).loss.backward()
    monitor.end_backward(1)
    monitor.after_update(1)
    assert monitor.metrics() == expected


def test_a_fused_head_is_measured_from_its_hidden_states():
    from trl.trainer.utils import add_fused_lm_head

    architecture = BY_NAME["llama"]
    model, batch = architecture.build().eval(), architecture.inputs()
    monitor, _ = make(model)
    [plain] = play(monitor, model, batch, 1)
    add_fused_lm_head(model)
    [fused] = play(monitor, model, {**batch, "fused_lm_head": True}, 1)
    assert fused == pytest.approx(plain, rel=1e-5)
    assert "nanguard/logsumexp_max" in fused


def test_a_sharded_head_that_is_not_called_is_left_out_and_that_is_said_once(caplog):
    from trl.trainer.utils import add_fused_lm_head

    architecture = BY_NAME["llama"]
    model, batch = architecture.build(), architecture.inputs()
    add_fused_lm_head(model)
    monitor, events = make(model)
    with caplog.at_level(logging.WARNING, "hf_nanguard"), sharded(model):
        for step in range(3):
            monitor.begin_step(step)
            with torch.enable_grad(), whole(model):
                model(**batch, fused_lm_head=True)
            monitor.end_backward(step)
            monitor.after_update(step)
    assert "nanguard/logsumexp_max" not in monitor.metrics()
    assert events == []
    assert len([record for record in caplog.records if "sharded" in record.getMessage()]) == 1


@contextmanager
def sharded(model):
    """The head's weight has no values here, as between the uses of a partitioned one."""
    head = model.lm_head
    full = head.weight
    head.weight = nn.Parameter(torch.empty(0))
    head.full = [full]
    try:
        yield
    finally:
        head.weight = full


@contextmanager
def whole(model):
    """It is gathered for the forward."""
    head, empty = model.lm_head, model.lm_head.weight
    head.weight = head.full[0]
    try:
        yield
    finally:
        head.weight = empty


# ---- planted collapses ----

COLLAPSES = {
    "llama": ("model.layers.1.self_attn", "q_proj.weight"),
    "qwen2": ("model.layers.0.self_attn", "k_proj.weight"),
    "gemma3": ("model.layers.0.self_attn", "k_norm.weight"),
    "mixtral": ("model.layers.0.self_attn", "q_proj.weight"),
    "gpt2": ("transformer.h.1.attn", "c_attn.weight"),
    "bert": ("bert.encoder.layer.1.attention.self", "query.weight"),
    "t5": ("decoder.block.1.layer.1.EncDecAttention", "q.weight"),
    "llava": ("model.vision_tower.encoder.layers.1.self_attn", "q_proj.weight"),
    "whisper": ("model.decoder.layers.0.encoder_attn", "k_proj.weight"),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_attention_that_turns_one_hot_is_named(name):
    module, weight = COLLAPSES[name]
    architecture = BY_NAME[name]
    model = architecture.build().eval()
    monitor, events = make(model)
    parameter = model.get_parameter(f"{module}.{weight}")
    part = (slice(None), slice(0, 32)) if name == "gpt2" else slice(None)  # queries and keys, and not the values
    with torch.no_grad():
        parameter[part] += 0.1 if name == "gemma3" else 0  # a scale of 1 + weight, which begins at 0
    rows = play(monitor, model, architecture.inputs(), 16, grow(parameter, part=part))
    assert ("entropy_collapse", "attention_entropy", module) in emitted(events)
    assert {place for _, _, place in emitted(events)} == {module}
    assert len(emitted(events)) == len(set(emitted(events)))
    event = next(event for event in events if event["values"]["kind"] == "attention_entropy")
    assert event["action"] == "observed"
    assert event["culprit"]["phase"] == "forward"
    low = [row["nanguard/attention_entropy_min"] < 0.05 for row in rows]
    assert low.index(True) > 3
    assert event["step"] == low.index(True) + 2  # the third check in a row
    json.dumps(event, allow_nan=False)


def test_growing_scores_are_reported_as_the_collapse_they_lead_to():
    architecture = BY_NAME["llama"]
    model = architecture.build()
    monitor, events = make(model)
    rows = play(monitor, model, architecture.inputs(), 16, grow(model.model.layers[1].self_attn.q_proj.weight))
    module = "model.layers.1.self_attn"
    assert emitted(events) == [
        ("entropy_collapse", "attention_entropy", module), ("entropy_collapse", "attention_score", module),
    ]  # fmt: skip
    high = [row["nanguard/attention_score_max"] > 1000 for row in rows]
    assert events[1]["step"] == high.index(True) + 2
    assert events[1]["values"]["attention_score"] == rows[events[1]["step"]]["nanguard/attention_score_max"]


def test_a_softcap_holds_the_scores():
    architecture = BY_NAME["gemma2"]
    model = architecture.build().eval()
    monitor, events = make(model)
    rows = play(
        monitor, model, architecture.inputs(), 16, grow(model.model.layers[1].self_attn.q_proj.weight, factor=8.0)
    )
    assert rows[-1]["nanguard/attention_score_max"] == pytest.approx(50)
    assert "attention_score" not in [kind for _, kind, _ in emitted(events)]


def make_gpt_oss():
    """Routers with a bias, learned sinks and a sliding window."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4,
           "attn_implementation": "eager"})  # fmt: skip
    return transformers.GptOssForCausalLM(config)


def test_a_router_with_a_bias_towards_one_expert_is_named():
    model = make_gpt_oss()
    monitor, events = make(model)
    gate = "model.layers.1.mlp.router"

    def plant(step):
        if step >= 4:
            with torch.no_grad():
                model.get_parameter(f"{gate}.bias")[2] += 1.0

    rows = play(monitor, model, BY_NAME["llama"].inputs(), 14, plant)
    assert emitted(events) == [("entropy_collapse", "router_balance", gate)]
    assert events[0]["values"]["router_load"] == 1.0
    assert rows[-1]["nanguard/router_load_max"] == 1.0
    assert rows[0]["nanguard/router_load_max"] < 0.8


def test_a_dead_router_is_named_though_its_distribution_is_uniform():
    architecture = BY_NAME["mixtral"]
    model = architecture.build()
    monitor, events = make(model)

    def plant(step):
        if step == 4:
            nn.init.zeros_(model.model.layers[0].mlp.gate.weight)

    play(monitor, model, architecture.inputs(), 8, plant)
    assert emitted(events) == [("entropy_collapse", "router_balance", "model.layers.0.mlp.gate")]
    assert events[0]["step"] == 6
    assert events[0]["values"]["router_load_entropy"] == pytest.approx(1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # the head of the second is tied to its embedding
def test_a_head_whose_logits_grow_is_named(name):
    architecture = BY_NAME[name]
    model = architecture.build()
    monitor, events = make(model)
    rows = play(monitor, model, architecture.inputs(), 14, grow(model.lm_head.weight, factor=3.0))
    assert emitted(events) == [("activation_headroom", "logsumexp", "lm_head")]
    high = [row["nanguard/logsumexp_max"] > 100 for row in rows]
    assert events[0]["step"] == high.index(True) + 2


@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
@pytest.mark.parametrize("lora", [False, True])
def test_collapses_are_named_on_every_trainer(kind, lora, tmp_path):
    def plant(model, step):
        if step >= 4:
            with torch.no_grad():
                next(p for n, p in model.named_parameters() if "layers.1.self_attn.k_proj" in n).mul_(4.0)
                next(p for n, p in model.named_parameters() if "lm_head" in n).mul_(4.0)

    drive = Drive(plant=plant)
    settings = {"max_steps": 14, "gradient_accumulation_steps": 1, "learning_rate": 1e-4}
    build(kind, tmp_path, guard=False, lora=lora, extra={"callbacks": [drive]}, **settings).train()
    prefix = "base_model.model." if lora else ""
    assert {(signal, module) for signal, _, module in emitted(drive.events)} == {
        ("entropy_collapse", f"{prefix}model.layers.1.self_attn"), ("activation_headroom", f"{prefix}lm_head"),
    }  # fmt: skip
    assert all(event["step"] > 6 for event in drive.events)


# ---- healthy ----


@pytest.mark.parametrize("name", BY_NAME)
def test_untrained_models_are_silent(name):
    model = BY_NAME[name].build()
    monitor, events = make(model)
    rows = play(monitor, model, BY_NAME[name].inputs(), 8)
    assert events == []
    assert ["nanguard/attention_entropy_min" in row for row in rows] == [True] * 8


def train(model, batches, steps, rate=1e-2):
    """A plain loop; returns events and the first and last loss."""
    monitor, events = make(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        monitor.begin_step(step)
        loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        monitor.end_backward(step)
        optimizer.step()
        monitor.after_update(step)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return events, losses


@pytest.mark.parametrize(
    "name", ["llama", "mixtral", *[pytest.param(name, marks=SLOW) for name in ("gpt2", "bert", "t5", "qwen3", "llava")]]
)
def test_models_that_learn_for_200_steps_are_silent(name):
    architecture = BY_NAME[name]
    events, losses = train(architecture.build(), [architecture.inputs()], 200, 1e-3 if name == "llava" else 1e-2)
    assert events == []
    assert losses[-1] < 0.5 * losses[0]


def test_a_router_that_is_mildly_out_of_balance_is_silent():
    model = make_gpt_oss()
    monitor, events = make(model)

    def plant(step):
        with torch.no_grad():
            model.model.layers[1].mlp.router.bias[2] = 0.1 if step >= 4 else 0.0

    rows = play(monitor, model, BY_NAME["llama"].inputs(), 12, plant)
    assert rows[-1]["nanguard/router_load_max"] > rows[0]["nanguard/router_load_max"]
    assert events == []


def test_layers_that_rest_on_the_first_token_are_silent():
    """A sink: the key of one token that all queries like, as trained models have it."""
    architecture = BY_NAME["llama"]
    model, batch = architecture.build(), architecture.inputs()
    monitor, events = make(model)
    attention = model.model.layers[1].self_attn

    def sink(module, args, output):
        output = output.clone()
        output[:, :1, 3::8], output[:, 1:, 3::8] = (
            4.0,
            0.0,
        )  # the feature of each head that turns least with the position
        return output

    def plant(step):
        if step == 4:
            attention.k_proj.register_forward_hook(sink)
            attention.q_proj.register_forward_hook(
                lambda module, args, output: output.index_fill(2, torch.tensor([3, 11]), 3.0)
            )

    rows = play(monitor, model, batch, 12, plant)
    assert rows[-1]["nanguard/attention_entropy_min"] < 0.5
    assert events == []


def test_short_sequences_have_no_entropy_and_are_silent():
    model = tiny_llama()
    monitor, events = make(model)
    ids = torch.randint(3, VOCAB, (2, 3))
    rows = play(monitor, model, {"input_ids": ids, "labels": ids}, 8)
    assert "nanguard/attention_entropy_min" not in rows[0]
    assert "nanguard/attention_score_max" in rows[0]
    assert events == []


# ---- the run ----


RUNS = {
    "default": {},
    "lora": {"lora": True},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
}
QUICK = {("plain", name) for name in RUNS} | {("sft", "lora"), ("sft", "default"), ("grpo", "checkpointing")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else SLOW)
        for kind in ("plain", "sft", "grpo")
        for name in RUNS
    ],
)
def test_a_monitored_run_is_identical(kind, name, tmp_path):
    settings = RUNS[name]
    stock = build(kind, tmp_path / "stock", guard=False, **settings)
    stock.train()
    expected = tensors_of(stock)
    drive = Drive()
    ours = build(kind, tmp_path / "ours", guard=False, extra={"callbacks": [drive]}, **settings)
    ours.train()
    assert_same(tensors_of(ours), expected)
    assert losses_of(ours) == losses_of(stock)
    assert len(drive.rows) == 4
    wanted = {"nanguard/attention_score_max", "nanguard/attention_entropy_min", "nanguard/logsumexp_max"}
    assert all(row.keys() == wanted for row in drive.rows)
    assert drive.events == []


def test_an_adapter_on_a_fused_head_draws_no_random_numbers():
    from peft import LoraConfig, get_peft_model
    from trl.trainer.utils import add_fused_lm_head

    base = tiny_llama(dropout=0.0)
    add_fused_lm_head(base)
    config = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(base, config).train()
    monitor, _ = make(model)
    monitor.begin_step(0)
    batch = BY_NAME["llama"].inputs()
    model(**batch, fused_lm_head=True).loss.backward()
    state = torch.get_rng_state()
    monitor.end_backward(0)
    monitor.after_update(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.get_output_embeddings().training
    assert all(module.training for module in model.modules())
    assert "nanguard/logsumexp_max" in monitor.metrics()


class _Count(TrainerCallback):
    """Counts operations and reads of single steps, from begin to end."""

    def __init__(self):
        self.counts = {}

    def on_step_begin(self, args, state, control, **kwargs):
        self.context = OperationCounter()
        self.counts[state.global_step] = self.context.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        self.context.__exit__(None, None, None)


def _count(tmp_path, *callbacks):
    counter = _Count()
    settings = {"max_steps": 6, "logging_steps": 100, "gradient_accumulation_steps": 2}
    build("plain", tmp_path, guard=False, extra={"callbacks": [counter, *callbacks]}, **settings).train()
    return counter.counts


def test_steps_that_are_not_due_cost_nothing_and_others_one_read(tmp_path):
    stock = _count(tmp_path / "stock")
    ours = _count(tmp_path / "ours", Drive(period=3))
    for step in (0, 1, 3, 4):
        assert ours[step].op_counts == stock[step].op_counts
        assert ours[step].reads == stock[step].reads
    for step in (2, 5):
        assert ours[step].num_reads == stock[step].num_reads + 1
        assert ours[step].num_ops - stock[step].num_ops <= 2 * 60 + 30  # two layers and the head, views included


def test_period_zero_is_off(tmp_path):
    drive = Drive(period=0, early=(1, 2))
    build("plain", tmp_path, guard=False, extra={"callbacks": [drive]}).train()
    assert drive.rows == [{}] * 4


def test_hooks_are_gone_after_the_backward_and_after_an_error(tmp_path):
    class Breaks(Trainer):
        def compute_loss(self, *args, **kwargs):
            super().compute_loss(*args, **kwargs)
            raise ZeroDivisionError

    drive = Drive()
    trainer = build("plain", tmp_path, Breaks, guard=False, extra={"callbacks": [drive]})
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert AttentionInterface.get_interface is not LOOKUP
    drive.monitor.close()
    assert AttentionInterface.get_interface is LOOKUP
    assert [
        name for name, module in trainer.model.named_modules() if module._forward_hooks or module._forward_pre_hooks
    ] == []
    assert drive.monitor.after_update(0) is None
    play(drive.monitor, trainer.model, BY_NAME["llama"].inputs(), 1)
    assert [
        name for name, module in trainer.model.named_modules() if module._forward_hooks or module._forward_pre_hooks
    ] == []


def test_a_step_that_is_skipped_is_forgotten():
    architecture = BY_NAME["llama"]
    model = architecture.build()
    monitor, _ = make(model)
    monitor.begin_step(0)
    model(**architecture.inputs()).loss.backward()
    monitor.end_backward(0)
    monitor.begin_step(1)
    monitor.close()
    assert monitor.after_update(1) is None
    assert monitor.metrics() == {}


def test_the_watch_goes_on_after_a_checkpoint():
    architecture = BY_NAME["llama"]
    model = architecture.build()
    plant = grow(model.model.layers[1].self_attn.q_proj.weight)
    monitor, events = make(model)
    play(monitor, model, architecture.inputs(), 7, plant)
    assert events == []
    resumed, events = make(model)
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    play(resumed, model, architecture.inputs(), 9, plant, first=7)
    assert {module for _, _, module in emitted(events)} == {"model.layers.1.self_attn"}


# ---- what cannot be seen ----


def test_attention_that_does_not_use_the_interface_is_said_once(caplog):
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2, pad_token_id=0)
    model = transformers.BloomForCausalLM(config)
    monitor, events = make(model)
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        rows = play(monitor, model, BY_NAME["llama"].inputs(), 3)
    assert [row.keys() for row in rows] == [{"nanguard/logsumexp_max"}] * 3
    assert events == []
    assert len([record for record in caplog.records if "attention is not monitored" in record.getMessage()]) == 1


def test_an_implementation_that_hides_its_mask_is_named(caplog):
    def attend(module, query, key, value, attention_mask, **kwargs):
        return value.transpose(1, 2).contiguous(), None

    AttentionInterface.register("mine", attend)
    try:
        model = tiny_llama()
        model.set_attn_implementation("mine")
        monitor, _ = make(model)
        ids = torch.randint(3, VOCAB, (2, 8))
        with caplog.at_level(logging.WARNING, "hf_nanguard"):
            rows = play(monitor, model, {"input_ids": ids, "labels": ids}, 2)
    finally:
        AttentionInterface._global_mapping.pop("mine")
    assert rows[0].keys() == {"nanguard/logsumexp_max"}
    assert [r.getMessage() for r in caplog.records if "attn_implementation='mine'" in r.getMessage()] != []


@pytest.mark.parametrize("first", [pytest.param(0, marks=SLOW), 2])
def test_a_compiled_model_is_reported_once_and_left_alone(first):
    architecture = BY_NAME["llama"]
    model, batch = architecture.build(), architecture.inputs()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    losses = [float(compiled(**batch).loss.detach()) for _ in range(first)]
    monitor, events = make(model)
    rows = play(monitor, compiled, batch, 4, first=first)
    torch._dynamo.reset()
    assert rows == [{}] * 4
    assert emitted(events) == [("guard_failed", None, None)]
    assert "compiled" in events[0]["message"]
    assert len(set(losses)) <= 1


def test_a_model_of_another_kind_is_reported_once():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2))

        def forward(self, x):
            return transformers.utils.ModelOutput(loss=self.body(x).sum())

    model = Plain()
    monitor, events = make(model)
    play(monitor, model, {"x": torch.ones(1, 2)}, 3)
    assert emitted(events) == [("guard_failed", None, None)]
