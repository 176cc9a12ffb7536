"""Guarded generation: the same tokens from a healthy model, and the planted row and no other found in a broken one."""

import copy
import logging
import pickle
import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
)

from hf_nanguard.core import logits as core_logits
from hf_nanguard.errors import ArgumentError
from hf_nanguard.hf.generation import logits_processors as processor
from hf_nanguard.hf.generation import sampling_record as watching
from hf_nanguard.hf.generation.guard_generation import guard_generation, place_guards
from hf_nanguard.hf.generation.logits_processors import NumericalStabilityLogitsProcessor, SafeTemperatureLogitsWarper
from hf_nanguard.hf.generation.sampling_record import RequestNotes
from hf_nanguard.testing import INF, NAN, OperationCounter
from tests.models import VOCAB, tiny_llama

PAD, EOS, POISON, NEW = 0, 2, 61, 6
WARPED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95,
          "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4}  # fmt: skip
MODES = {
    "sampling": {"do_sample": True, "top_k": 0},
    "warpers": WARPED,
    "greedy": {"do_sample": False},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beam": {"num_beams": 3},
    "beams returned": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True, "temperature": 0.8},
    "renormalised": {"do_sample": True, "renormalize_logits": True, "repetition_penalty": 1.2},
    "static cache": {"do_sample": True, "cache_implementation": "static"},
}


@pytest.fixture(params=[False, True], ids=["looking", "as on a device"])
def blind(request, monkeypatch):
    """The branch-free way that other devices take."""
    if request.param:
        monkeypatch.setattr(core_logits, "can_read_in_place", lambda values: False)
        for module in (processor, watching):
            monkeypatch.setattr(module, "can_read_in_place", lambda values: False)
    return request.param


def llama(dtype=torch.float32, seed=0, poisoned=False):
    model = tiny_llama(seed=seed, dropout=0.0, dtype=dtype).eval()
    model.generation_config.disable_compile = True
    if poisoned:
        with torch.no_grad():
            model.model.embed_tokens.weight[POISON] = NAN
        model.generation_config.suppress_tokens = [POISON]  # only prompts hold it
    return model


def prompts(num_rows=3, poisoned=()):
    ids = torch.randint(3, 60, (num_rows, 5), generator=torch.Generator().manual_seed(1))
    for row in poisoned:
        ids[row, 2] = POISON
    return ids


def run(model, ids, seed=7, **kwargs):
    torch.manual_seed(seed)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{"max_new_tokens": NEW, **kwargs})


def completions(model, ids, **kwargs):
    return run(model, ids, **kwargs)[:, ids.shape[1] :]


def lengths(tokens):
    """Tokens up to and with the first EOS."""
    return [row.index(EOS) + 1 if EOS in row else len(row) for row in tokens.tolist()]


class Plant:
    """Makes scores non-finite: `where` maps a call of the head to rows and the entries to spoil."""

    def __init__(self, model, where, value=NAN):
        self.calls, self.where, self.value = 0, where, value
        self.hook = model.lm_head.register_forward_hook(self)

    def __call__(self, module, args, output):
        output = output.clone()
        for row, entries in self.where.get(self.calls, {}).items():
            output[row, -1, entries] = self.value
        self.calls += 1
        return output


# ---- a healthy model ----


@pytest.mark.parametrize("kwargs", MODES.values(), ids=MODES)
def test_a_healthy_model_generates_the_same_tokens(kwargs, blind):
    model, ids = llama(), prompts()
    stock = run(model, ids, **kwargs)
    before = dict(vars(model))
    with guard_generation(model) as watch:
        guarded = run(model, ids, **kwargs)
    assert torch.equal(stock, guarded)
    assert vars(model) == before
    assert watch.find_nonfinite([NEW] * len(stock)) == []
    assert (watch.num_repaired, watch.num_ended, watch.describe()) == (0, 0, "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_healthy_half_precision_model_generates_the_same_tokens(dtype):
    model, ids = llama(dtype), prompts()
    stock = run(model, ids, **WARPED)
    with guard_generation(model):
        assert torch.equal(stock, run(model, ids, **WARPED))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_assisted_decoding_generates_the_same_tokens(kind, sampled):
    model, ids = llama(), prompts(1).repeat(1, 3)
    helper = {"prompt_lookup_num_tokens": 3} if kind == "lookup" else {"assistant_model": llama(seed=1)}
    stock = run(model, ids, do_sample=sampled, **helper)
    with guard_generation(model) as watch:
        assert torch.equal(stock, run(model, ids, do_sample=sampled, **helper))
    assert watch.find_nonfinite([NEW]) == []


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=PAD, eos_token_id=EOS,
        decoder_start_token_id=PAD, dropout_rate=0.0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("kwargs", [{"do_sample": True}, {"num_beams": 2}], ids=str)
def test_encoder_decoders(kwargs):
    model, ids = t5(), prompts()
    stock = run(model, ids, **kwargs)
    with guard_generation(model) as watch:
        assert torch.equal(stock, run(model, ids, **kwargs))
    assert watch.find_nonfinite([NEW] * 3) == []
    with torch.no_grad():
        model.shared.weight[POISON] = NAN
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num())
    ids = prompts(3, poisoned=[1])
    with guard_generation(model) as watch:
        tokens = run(model, ids, **kwargs)[:, 1:]
    assert watch.find_nonfinite(lengths(tokens)) == [1]
    assert tokens[1, 0] == EOS


def batch(model, ids, seed=7, **kwargs):
    torch.manual_seed(seed)
    small = replace(SMALL, per_request_processors=kwargs.pop("per_request", False))
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=EOS, pad_token_id=PAD, **kwargs)
    outputs = model.generate_batch(ids.tolist(), generation_config=config, continuous_batching_config=small)
    return [output.generated_tokens for output in outputs.values()]


def batch_llama():
    """A Llama whose head fails where the last token is `POISON`: packed requests would share a NaN of the attention."""
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = 0
        model.model.embed_tokens.weight[POISON, 0] = 1e4

    def spoil(module, args, output):
        return output.masked_fill((args[0][..., :1] > 3.99), NAN)  # the norm leaves all of sqrt(16) to one channel

    model.lm_head.register_forward_hook(spoil)
    return model


def batch_prompts(num_rows, poisoned=()):
    ids = prompts(num_rows)
    ids[list(poisoned), -1] = POISON
    return ids


SMALL = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64)
BATCHES = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7, "top_k": 20, "per_request": True},
    {"do_sample": True, "num_return_sequences": 2},
]


@pytest.mark.parametrize("kwargs", BATCHES, ids=str)
def test_continuous_batching_generates_the_same_tokens(kwargs):
    ids = prompts()
    stock = batch(llama(), ids, **kwargs)
    model = llama()
    with guard_generation(model) as watch:
        assert batch(model, ids, **kwargs) == stock
    assert watch.find_nonfinite([len(tokens) for tokens in stock]) == []


# ---- a broken model ----


@pytest.mark.parametrize("kwargs", MODES.values(), ids=MODES)
def test_the_nonfinite_prompt_and_no_other_is_found(kwargs, blind):
    model, ids = llama(poisoned=True), prompts(3, poisoned=[1])
    with guard_generation(model) as watch:
        tokens = completions(model, ids, **kwargs)
    each = kwargs.get("num_return_sequences", 1)
    assert watch.find_nonfinite(lengths(tokens)) == list(range(each, 2 * each))
    assert watch.num_ended == each
    assert watch.num_repaired == 0
    assert tokens[each, 0] == EOS
    healthy = completions(model, ids[[0, 2]], seed=7, **kwargs)
    if not kwargs.get("do_sample"):  # a draw depends on the rows beside it
        assert torch.equal(tokens[[*range(each), *range(2 * each, 3 * each)]], healthy)


def test_stock_sampling_dies_of_it():
    with pytest.raises(RuntimeError, match="probability tensor"):
        run(llama(poisoned=True), prompts(3, poisoned=[1]), do_sample=True)


@pytest.mark.parametrize(
    "kwargs", [{"do_sample": True}, {"num_beams": 3}, {"num_beams": 3, "do_sample": True}], ids=str
)
def test_a_policy_that_is_all_nan_ends_everything(kwargs):
    model, ids = llama(), prompts()
    with torch.no_grad():
        model.model.norm.weight.fill_(NAN)
    with guard_generation(model) as watch:
        tokens = completions(model, ids, **kwargs)
    assert (tokens[:, 0] == EOS).all()
    assert watch.find_nonfinite(lengths(tokens)) == [0, 1, 2]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("step", [0, 3])
def test_a_partly_nonfinite_row_goes_on_without_its_bad_entries(value, step, blind):
    model, ids = llama(), prompts()
    healthy = completions(model, ids, do_sample=False, eos_token_id=None)
    best = int(healthy[1, step])
    Plant(model, {step: {1: [best]}}, value)
    with guard_generation(model) as watch:
        tokens = completions(model, ids, do_sample=False, eos_token_id=None)
    assert tokens[1, step] != best
    assert torch.equal(tokens[[0, 2]], healthy[[0, 2]])
    assert watch.find_nonfinite([NEW] * 3) == [1]
    assert (watch.num_repaired, watch.num_ended) == (1, 0)
    assert f"completion 1 was repaired at token {step}" in watch.describe()


def test_what_a_row_does_after_its_end_does_not_count():
    model, ids = llama(), prompts()
    Plant(model, {1: {0: slice(None)}, 4: {0: slice(None), 2: [9]}})
    with guard_generation(model) as watch:
        tokens = completions(model, ids, do_sample=False)
    assert tokens[0].tolist()[1:] == [EOS] + [PAD] * (NEW - 2)
    assert lengths(tokens)[0] == 2
    assert watch.find_nonfinite(lengths(tokens)) == [0, 2]
    assert watch.find_nonfinite([1, NEW, 4]) == []
    assert watch.find_nonfinite([2, NEW, 5]) == [0, 2]


@pytest.mark.parametrize("floor", [{"min_new_tokens": 5}, {"min_length": 10}], ids=str)
def test_ending_wins_over_a_masked_end(floor):
    model, ids = llama(poisoned=True), prompts(2, poisoned=[0])
    with guard_generation(model) as watch:
        tokens = completions(model, ids, do_sample=True, **floor)
    assert tokens[0, 0] == EOS
    assert tokens[1, 0] != EOS
    assert watch.find_nonfinite(lengths(tokens)) == [0]


@pytest.mark.parametrize(("eos", "pad", "wanted"), [([5, 2], 0, 5), (None, 7, 7), (None, None, 0)])
def test_which_token_ends_a_row(eos, pad, wanted):
    model, ids = llama(poisoned=True), prompts(1, poisoned=[0])
    model.config.eos_token_id = None
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = eos, pad
    with guard_generation(model) as watch:
        tokens = completions(model, ids, do_sample=True, max_new_tokens=2)
    assert tokens[0, 0] == wanted
    assert watch.find_nonfinite([1]) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_repaired_rows_are_drawn_by_their_surviving_tokens(dtype):
    model, ids = llama(dtype), prompts(1)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # far from uniform
        survivors = model(ids).logits[0, -1].float()
    best = survivors.topk(2).indices.tolist()
    survivors[best] = -INF
    Plant(model, {0: {...: best}})
    num_draws = 20000
    with guard_generation(model) as watch:
        tokens = completions(model, ids, do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=num_draws)
    seen = torch.bincount(tokens.flatten(), minlength=VOCAB).double()
    wanted = survivors.double().softmax(-1) * num_draws
    assert seen[best].sum() == 0
    common = wanted >= 5
    chi_square = ((seen - wanted)[common] ** 2 / wanted[common]).sum()
    degrees = int(common.sum()) - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5, "the draws do not follow the surviving tokens"
    assert degrees > 10
    assert watch.num_repaired == num_draws


@pytest.mark.parametrize("kwargs", BATCHES, ids=str)
def test_continuous_batching_finds_the_nonfinite_request(kwargs, blind):
    model, ids = batch_llama(), batch_prompts(4, poisoned=[2])
    with guard_generation(model) as watch:
        tokens = batch(model, ids, **kwargs)
    each = kwargs.get("num_return_sequences", 1)
    assert watch.find_nonfinite([len(row) for row in tokens]) == list(range(2 * each, 3 * each))
    assert watch.num_ended == each
    assert f"completion {2 * each} was ended" in watch.describe()
    assert all(tokens[row] == [EOS] for row in range(2 * each, 3 * each))


def test_a_kept_manager_begins_anew_and_an_older_one_is_named(caplog):
    model = batch_llama()
    config = GenerationConfig(max_new_tokens=2, eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    kept = {"generation_config": config, "continuous_batching_config": SMALL, "persistent_manager": True}

    def again(ids):
        with guard_generation(model, verbose=False) as watch:
            results = model.generate_batch(ids.tolist(), **kept)
        return watch.find_nonfinite([len(output.generated_tokens) for output in results.values()])

    assert again(batch_prompts(3, poisoned=[1])) == [1]
    assert again(batch_prompts(2)) == []
    assert again(batch_prompts(3, poisoned=[0])) == [0]
    model.destroy_cached_continuous_batching_manager()
    model.generate_batch(batch_prompts(1).tolist(), **kept)
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        again(batch_prompts(1))
    assert "destroy_cached_continuous_batching_manager" in caplog.text
    model.destroy_cached_continuous_batching_manager()


def test_slots_of_earlier_steps_are_cleared():
    notes = RequestNotes(torch.device("cpu"))
    guard = watching.RequestGuard(NumericalStabilityLogitsProcessor(), notes)
    requests = [types.SimpleNamespace(state=types.SimpleNamespace(request_id=f"req_{i}")) for i in range(3)]
    assert guard.prepare_tensor_args(requests).tolist() == [1, 2, 3]
    assert guard.prepare_tensor_args(requests[2:]).tolist() == [3, 0, 0]
    warmup = types.SimpleNamespace(state=types.SimpleNamespace(request_id="__warmup_DECODING_0__"))
    assert guard.prepare_tensor_args([warmup]).tolist() == [0, 0, 0]


# ---- drafts ----


def test_a_broken_assistant_harms_nobody():
    model, ids = llama(), prompts(1, poisoned=[0])
    stock = run(model, ids, do_sample=False)
    with guard_generation(model) as watch:
        tokens = run(model, ids, do_sample=False, assistant_model=llama(seed=1, poisoned=True))
    assert torch.equal(tokens, stock)
    assert watch.find_nonfinite([NEW]) == []


def test_a_nonfinite_draft_that_is_thrown_away_does_not_count():
    model, ids = llama(), prompts(1)
    guard = NumericalStabilityLogitsProcessor(verbose=False)
    listener = watching.Generation([guard], prompt_length=5)
    nonfinite = torch.tensor([[NAN, 1.0, 2.0]])
    for length, scores in (
        (5, torch.zeros(1, 3)),
        (6, nonfinite),
        (7, nonfinite),
        (6, torch.zeros(1, 3)),
        (7, nonfinite),
    ):
        guard(torch.zeros(1, length, dtype=torch.long), scores)
    assert listener.read() == [(2, core_logits.NEVER)]
    with guard_generation(model) as watch:
        run(model, ids.repeat(1, 3), prompt_lookup_num_tokens=3, do_sample=False)
    assert watch.find_nonfinite([NEW]) == []


def test_a_broken_model_in_assisted_decoding_is_found():
    model, ids = llama(poisoned=True), prompts(1, poisoned=[0])
    with guard_generation(model) as watch:
        tokens = completions(model, ids, do_sample=False, assistant_model=llama(seed=1))
    assert tokens.tolist() == [[EOS]]
    assert watch.find_nonfinite([1]) == [0]


# ---- cost ----


@pytest.mark.parametrize("kwargs", [MODES["sampling"], WARPED, MODES["greedy"], MODES["beam"]], ids=str)
@pytest.mark.parametrize("nonfinite", [False, True])
def test_no_host_read_is_added(kwargs, nonfinite, blind):
    model, ids = llama(), prompts()
    with OperationCounter() as stock:
        run(model, ids, eos_token_id=None, **kwargs)
    if nonfinite:
        Plant(model, {step: {1: [5]} for step in range(NEW)})
    with (
        OperationCounter() as guarded,
        guard_generation(model, verbose=False),
    ):  # on a CPU the log shows values of non-finite rows
        run(model, ids, eos_token_id=None, **kwargs)
    assert guarded.num_reads <= stock.num_reads
    if not blind and not nonfinite:
        assert guarded.num_ops - stock.num_ops <= 2 * NEW, "more than one reduction for each of two guards a token"


# ---- leaving no trace ----


def get(model):
    return model._get_logits_processor(GenerationConfig(do_sample=True, temperature=0.5, eos_token_id=EOS))


def num_guards(model):
    return sum(isinstance(processor, NumericalStabilityLogitsProcessor) for processor in get(model))


def test_nothing_stays_after_an_error():
    model = llama()
    before = dict(vars(model))

    def fail():
        with guard_generation(model):
            assert num_guards(model) == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert vars(model) == before
    assert num_guards(model) == 0


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_do_not_carry_the_guard_for_ever(clone):
    model, ids = llama(), prompts()
    stock = run(model, ids, do_sample=True)
    with guard_generation(model) as watch:
        clones = clone(model)
    assert num_guards(clones) == 0
    assert torch.equal(run(clones, ids, do_sample=True), stock)
    assert watch.generations == []
    if clone is copy.deepcopy:
        assert clones._get_logits_processor.__self__ is clones


def test_an_attribute_that_was_there_is_used_and_put_back():
    model, calls = llama(), []
    own = model._get_logits_processor

    def mine(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    model._get_logits_processor = mine
    with guard_generation(model):
        run(model, prompts())
        twin = copy.deepcopy(model)
    assert calls == [1]
    assert vars(model)["_get_logits_processor"] is mine
    assert vars(twin)["_get_logits_processor"] is mine


def test_nested_guards_both_know():
    model, ids = llama(poisoned=True), prompts(3, poisoned=[1])
    with guard_generation(model) as outer:
        with guard_generation(model) as inner:
            assert num_guards(model) == 2
            assert num_guards(copy.deepcopy(model)) == 0
            tokens = completions(model, ids, do_sample=True, temperature=0.5)
        inner.generations.pop(0)  # of the count above
        outer.generations.pop(0)
        assert num_guards(model) == 2
    assert inner.find_nonfinite(lengths(tokens)) == [1]
    outer.generations.pop()
    assert outer.find_nonfinite(lengths(tokens)) == [1]
    assert num_guards(model) == 0


def test_nested_continuous_batches_both_know():
    model, ids = batch_llama(), batch_prompts(3, poisoned=[1])
    with guard_generation(model, verbose=False) as outer, guard_generation(model, verbose=False) as inner:
        tokens = batch(model, ids, do_sample=False)
    found = [watch.find_nonfinite([len(row) for row in tokens]) for watch in (outer, inner)]
    assert found == [[1], [1]]


@pytest.mark.parametrize("wrap", ["peft", "parallel", "compiled", "all"])
def test_the_innermost_model_is_guarded(wrap):
    model, ids = llama(poisoned=True), prompts(3, poisoned=[1])
    outer = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if wrap in ("peft", "all") else model
    caller = outer
    if wrap in ("parallel", "all"):
        outer = torch.nn.DataParallel(outer)
    if wrap in ("compiled", "all"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it imports its compiler
            outer = torch.compile(outer)
    with guard_generation(outer) as watch:
        assert "_get_logits_processor" in vars(model)
        tokens = run(caller, ids, do_sample=True, max_new_tokens=2)
    assert "_get_logits_processor" not in vars(model)
    assert watch.find_nonfinite(lengths(tokens[:, 5:])) == [1]


# ---- places ----


class Mine(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_processors_keep_their_place():
    model, mine = llama(), Mine()
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, repetition_penalty=1.5, eos_token_id=EOS)
    stock = model._get_logits_processor(config, 5, logits_processor=LogitsProcessorList([mine]))
    with guard_generation(model):
        guarded = model._get_logits_processor(config, 5, logits_processor=LogitsProcessorList([mine]))
    names = [type(processor).__name__ for processor in guarded]
    ours = NumericalStabilityLogitsProcessor.__name__
    assert [name for name in names if name != ours] == [type(processor).__name__ for processor in stock]
    assert names[names.index("TemperatureLogitsWarper") - 1] == ours
    assert names[-1] == ours
    assert names.count(ours) == 2
    assert mine in guarded


def test_one_guard_is_enough_where_nothing_spreads():
    assert place_guards([1, 2], "head", "last") == [1, 2, "last"]
    warper = SafeTemperatureLogitsWarper(0.5)
    assert place_guards([1, warper, 2], "head", "last") == [1, "head", warper, 2, "last"]


def test_a_processor_of_the_user_is_listened_to():
    model, ids = llama(poisoned=True), prompts(2, poisoned=[1])
    mine = NumericalStabilityLogitsProcessor(eos_token_id=EOS, verbose=False)
    with guard_generation(model) as watch:
        tokens = completions(model, ids, do_sample=True, logits_processor=LogitsProcessorList([mine]))
    assert watch.find_nonfinite(lengths(tokens)) == [1]
    assert mine.num_ended == NEW
    assert mine.listeners == []


def test_completions_of_several_calls_are_counted_on():
    model = llama(poisoned=True)
    with guard_generation(model) as watch:
        for rows, nonfinite in ((2, []), (3, [2]), (1, [])):
            completions(model, prompts(rows, poisoned=nonfinite), do_sample=True)
    assert watch.find_nonfinite([NEW] * 6) == [4]
    assert watch.find_nonfinite([NEW] * 5) == [0, 1, 2, 3, 4], "rows cannot be assigned"


# ---- modes, arguments, words ----


def test_always_draws_from_bounded_scores():
    model, ids = llama(), prompts()
    with torch.no_grad():
        model.lm_head.weight.mul_(1000)
    with guard_generation(model, mode="always", clip_value=2.0, min_prob=1e-3):
        output = run(model, ids, do_sample=True, top_k=0, return_dict_in_generate=True, output_scores=True)
    assert output.scores
    for scores in output.scores:
        assert scores.min() > -8
        assert torch.allclose(scores.exp().sum(-1), torch.ones(3), atol=1e-5)


def test_what_always_has_bounded_is_counted():
    ids, scores = torch.zeros(2, 1, dtype=torch.long), torch.tensor([[0.0, -70.0, -1.0], [0.0, -2.0, -1.0]])
    for mode, expected in (("always", 2), ("repair", 0)):
        guard = NumericalStabilityLogitsProcessor(mode=mode, min_prob=0.0)
        guard(ids, scores)
        guard(ids, scores)
        assert guard.num_bounded == expected
        assert guard.num_repaired == 0


def test_off_does_nothing():
    model = llama(poisoned=True)
    with guard_generation(model, mode="off") as watch:
        assert num_guards(model) == 0
    assert watch.find_nonfinite([1, 2]) == []


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: NumericalStabilityLogitsProcessor(clip_value=0), "clip_value"),
        (lambda: NumericalStabilityLogitsProcessor(clip_value=NAN), "clip_value"),
        (lambda: NumericalStabilityLogitsProcessor(min_prob=-0.1), "min_prob"),
        (lambda: NumericalStabilityLogitsProcessor(min_prob=2), "min_prob"),
        (lambda: NumericalStabilityLogitsProcessor(mode="clip"), "mode"),
        (lambda: NumericalStabilityLogitsProcessor(eos_token_id=["2"]), "eos_token_id"),
        (lambda: SafeTemperatureLogitsWarper(-1.0), "temperature"),
        (lambda: SafeTemperatureLogitsWarper("hot"), "temperature"),
        (lambda: SafeTemperatureLogitsWarper(1.0, min_temperature=0), "min_temperature"),
        (lambda: guard_generation(llama(), mode="fix").__enter__(), "mode"),
        (lambda: guard_generation(llama(), clip_value=-3).__enter__(), "clip_value"),
        (lambda: guard_generation(torch.nn.Linear(2, 2)).__enter__(), "model"),
    ],
)
def test_wrong_arguments_are_named(make, named):
    with pytest.raises(ArgumentError, match=rf"^{named} must .*, got .*\. [A-Z].*\.$"):
        make()


def test_a_safe_temperature_is_the_hosts_where_that_is_healthy():
    ids, scores = prompts(), torch.randn(3, 9)
    scores[:, 2] = -INF
    for temperature in (0.1, 0.7, 1.0, 3.0):
        wanted = TemperatureLogitsWarper(temperature)(ids, scores)
        assert torch.equal(SafeTemperatureLogitsWarper(temperature)(ids, scores), wanted)
    assert torch.equal(SafeTemperatureLogitsWarper(0.0)(ids, scores), scores / 0.1)
    assert torch.equal(SafeTemperatureLogitsWarper(0.01, min_temperature=0.5)(ids, scores), scores / 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_safe_temperature_keeps_finite_scores_finite_and_masks_masked(dtype):
    limits = torch.finfo(dtype)
    scores = torch.tensor([[limits.max, limits.min, 1.0, -INF, INF, NAN]], dtype=dtype)
    divided = SafeTemperatureLogitsWarper(0.2)(None, scores)[0]
    assert divided[:2].tolist() == [limits.max, limits.min]
    assert divided[3] == -INF
    assert divided[4] == INF, "a non-finite entry must stay one that the guard can see"
    assert divided[5].isnan()
    assert divided.dtype == dtype


def test_the_first_ones_are_logged_with_shape_and_values(caplog):
    guard = NumericalStabilityLogitsProcessor(eos_token_id=EOS)
    scores = torch.tensor([[1.0, NAN, -2.5, INF], [0.0, 1.0, 2.0, 3.0], [NAN, NAN, -INF, NAN]])
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        for _ in range(5):
            guard(torch.zeros(3, 8, dtype=torch.long), scores)
    assert len(caplog.messages) == 3
    first = caplog.messages[0]
    for part in ("[3, 4]", "float32", "8 tokens", "row 0 (1 NaN, 1 inf, 2 finite from -2.5 to 1) was repaired",
                 "row 2 (3 NaN, 1 -inf) was ended"):  # fmt: skip
        assert part in first
    assert "row 1" not in first
    assert (guard.num_repaired, guard.num_ended) == (5, 5)


def test_a_device_logs_when_read_and_a_silent_guard_never(caplog, monkeypatch):
    monkeypatch.setattr(core_logits, "can_read_in_place", lambda values: False)
    for module in (processor, watching):
        monkeypatch.setattr(module, "can_read_in_place", lambda values: False)
    model, ids = llama(poisoned=True), prompts(2, poisoned=[0])
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        for verbose in (False, True):
            with guard_generation(model, verbose=verbose) as watch:
                tokens = completions(model, ids, do_sample=True)
            assert caplog.messages == []
            for _ in range(2):
                watch.find_nonfinite(lengths(tokens))
    assert len(caplog.messages) == 1
    assert "1 of 2 completions" in caplog.messages[0]
    assert "completion 0 was ended at token 0" in caplog.messages[0]


# ---- vLLM ----


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in with vLLM's documented interface."""

    class Interface:
        pass

    module = types.ModuleType("vllm.v1.sample.logits_processor")
    module.LogitsProcessor = Interface
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    from hf_nanguard.hf.generation import vllm_processor as ours

    monkeypatch.delitem(vars(ours), ours.NAME, raising=False)
    yield Interface
    vars(ours).pop(ours.NAME, None)


@pytest.mark.parametrize("ids", [EOS, [EOS, 3]])
def test_the_vllm_processor_repairs(vllm, ids, blind, monkeypatch):
    from hf_nanguard.hf.generation import vllm_processor as ours

    if blind:
        monkeypatch.setattr(ours, "can_read_in_place", lambda values: False)
    cls = ours.VllmStabilityLogitsProcessor
    assert issubclass(cls, vllm)
    assert pickle.loads(pickle.dumps(cls)) is cls
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_config=types.SimpleNamespace(eos_token_id=ids))
    )
    processor = cls(config, torch.device("cpu"), False)
    assert processor.is_argmax_invariant() is False
    assert processor.update_state(None) is None
    assert cls.validate_params(None) is None
    scores = torch.tensor([[1.0, NAN, 0.0, -INF], [NAN] * 4, [1.0, 2.0, 3.0, -INF]])
    with OperationCounter() as count:
        fixed = processor.apply(scores.clone())
    assert fixed.tolist() == [[1.0, -INF, 0.0, -INF], [-INF, -INF, 0.0, -INF], [1.0, 2.0, 3.0, -INF]]
    assert count.num_reads == 0
    assert processor.tally.read() == (1, 1)


def test_a_vllm_processor_that_fails_leaves_the_scores_as_they_are(vllm, monkeypatch, caplog):
    from hf_nanguard.hf.generation import vllm_processor as ours

    monkeypatch.setattr(ours, "repair_scores", lambda *args, **kwargs: 1 / 0)
    processor = ours.VllmStabilityLogitsProcessor(None, torch.device("cpu"), False)  # no config: no end token either
    scores = torch.tensor([[1.0, NAN]])
    assert all(processor.apply(scores) is scores for _ in range(5))
    assert [record.getMessage().count(" failed at hf/generation/vllm_processor.py") for record in caplog.records] == [
        1
    ] * 3


def test_without_vllm_the_way_out_is_named(monkeypatch):
    from hf_nanguard.hf.generation import vllm_processor as ours

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ArgumentError, match="Install vllm"):
        _ = ours.VllmStabilityLogitsProcessor
    with pytest.raises(AttributeError):
        _ = ours.Nothing
