"""Training, evaluation and generation see the same model: forwards agree at dropout 0, dropout is on in training only, and a frozen
reference draws nothing."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from ...boundary import attempt
from ...hf.compat.online_trainer import REFERENCE, policy_logps
from ...hf.compat.trainer import metric_lists
from ..trial.borrowed_trainer import borrowed, find_models
from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.moved_output import measure_move
from ..trial.quiet_forward import has_rate
from ..trial.trial_bench import TrialBench, find_output
from ..trial.trial_rows import IDS, measure

GENERATED, MAX_GENERATED = 4, 64  # tokens that are generated, and of the whole text
REFERENCES = ("ref_model", "teacher_model")
COMPUTED = ("ref_chosen_logps", "ref_logps")  # columns of rows


def check_modes(bench: TrialBench) -> LawResult:
    """Compares the outputs of the model in training mode, with dropout off, with those in evaluation mode."""
    if bench.has_batch_statistics:
        raise NotApplicable("batch normalisation uses other statistics in training by design")
    inputs = bench.find_inputs()
    drawn = _measure_evaluation_noise(bench, inputs)
    if drawn > bench.tolerance:
        return broken(ERROR, f"Two forwards of the same batch in evaluation mode differ by {drawn:.1e} of the outputs' spread: "
                      "something random, such as dropout, stays on.", move=drawn, bound=bench.tolerance)  # fmt: skip
    training = [_forward_seeded(bench, inputs, seed) for seed in (0, 1)]
    evaluation = bench.forward(inputs)
    if training[0].shape != evaluation.shape:
        raise NotApplicable("its model returns something else in training")
    noise, bound = measure_move(training[0], training[1]), bench.tolerance
    if noise > bound:
        raise NotApplicable(
            f"its forward draws random numbers in training with all dropout off (outputs differ by {noise:.1e})"
        )
    move = measure_move(evaluation, training[0])
    if move <= bound + 10 * noise:
        return held(
            f"outputs in training and in evaluation agree within {move:.1e} of their spread", move=move, bound=bound
        )
    return broken(ERROR, f"Outputs in training mode, with dropout off, differ from those in evaluation mode by {move:.1e} of their "
                  f"spread (rounding explains {bound:.0e}).", move=move, bound=bound)  # fmt: skip


def _measure_evaluation_noise(bench: TrialBench, inputs: dict[str, object]) -> float:
    """Returns how far two forwards in evaluation mode differ, with all rates of dropout as they are."""
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        bench.model.eval()
        with torch.no_grad(), bench.trainer.compute_loss_context_manager():
            outputs.append(find_output(bench.model(**bench.without_loss(inputs))))
    return measure_move(outputs[0], outputs[1]) if outputs[0].shape == outputs[1].shape else 0.0


def check_generation(bench: TrialBench) -> LawResult:
    """Lets the model generate the last tokens of a row, which are forced, and compares the logits with those of one forward."""
    inputs = bench.find_inputs()
    ids, mask = inputs.get(IDS), inputs.get("attention_mask")
    if not bench.is_generator or not hasattr(bench.bare, "generate") or not isinstance(ids, Tensor) or ids.ndim != 2:
        raise NotApplicable("its model does not generate text")
    if any(isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2 for value in inputs.values()):
        raise NotApplicable("its inputs are not text alone")
    real = (
        mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    )
    row = int(real.sum(1).argmax())
    text = {IDS: ids[row][real[row]].unsqueeze(0)[:, -MAX_GENERATED:]}
    size = text[IDS].shape[1]
    if size < GENERATED + 2:
        raise NotApplicable("its rows are too short to generate a part of them")
    text["attention_mask"] = torch.ones_like(text[IDS])
    generated = attempt(lambda: _generate(bench, text), lambda error: None)  # whatever its class or its config refuses
    if generated is None:
        raise NotApplicable("its model cannot generate from a row")
    bound, moves = bench.allow(), {}
    for training in (False, True):
        whole = bench.forward(text, training)
        if whole.shape[1] < size:
            raise NotApplicable("its outputs cannot be matched with tokens")
        whole = whole[:, -GENERATED - 1 : -1][:, : generated.shape[1]].float()
        moves["training" if training else "evaluation"] = measure_move(whole, generated)
    mode = max(moves, key=lambda each: moves[each])
    if moves[mode] <= bound:
        return held(
            f"logits of generated tokens agree with those of one forward within {moves[mode]:.1e}",
            move=moves[mode],
            bound=bound,
        )
    return broken(
        WARNING, f"The logits with which the model generates differ by {moves[mode]:.1e} of their spread (rounding explains {bound:.0e}) from those of "
        f"one forward over the same text in {mode} mode: what is trained is not what generates. Do layers depend on the cache or on use_cache?",
        move=moves[mode], bound=bound, mode=mode,
    )  # fmt: skip


class _Forced(LogitsProcessor):
    """Lets the next token of a given text be the only one."""

    def __init__(self, ids: Tensor):
        self.ids = ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[min(input_ids.shape[1], len(self.ids) - 1)]] = 0.0
        return forced


def _generate(bench: TrialBench, text: dict[str, Tensor]) -> Tensor | None:
    """Returns the logits of the last tokens of a text as `generate` computes them, one token after the other with a cache."""
    bench.model.eval()
    start = text[IDS].shape[1] - GENERATED
    with torch.no_grad(), bench.steady(), bench.trainer.compute_loss_context_manager():
        found = bench.bare.generate(
            **{name: each[:, :start] for name, each in text.items()},
            logits_processor=LogitsProcessorList([_Forced(text[IDS][0])]),
            max_new_tokens=GENERATED, do_sample=False, num_beams=1, use_cache=True, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return torch.stack(found.logits, 1).float() if found.logits else None


def check_dropout(bench: TrialBench) -> LawResult:
    """Asks in which mode the modules with a rate of dropout are while the trainer takes a step."""
    names = {module: name for name, module in bench.bare.named_modules() if has_rate(module)}
    if not names:
        raise NotApplicable("no module of its model has dropout")
    modes: dict[str, bool] = {}

    def note(module: nn.Module, args: object, output: object) -> None:
        modes[names[module]] = modes.get(names[module], False) or module.training

    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_hook(note))
        bench.run(steady=False)
    off = [name for name, is_training in modes.items() if not is_training]
    if not modes:
        raise NotApplicable("a training step calls no module with dropout")
    if not off:
        return held(f"dropout is on in all {len(modes)} modules that have it", modules=len(modes))
    frozen = {name for name, module in bench.bare.named_modules() if name in off and not _is_trained(bench, name)}
    severity = NOTE if frozen.issuperset(off) else ERROR if len(off) == len(modes) else WARNING
    return broken(
        severity, f"{len(off)} of {len(modes)} modules with dropout are in evaluation mode in a training step, first {off[0]}: their "
        "dropout has no effect.", modules=off[:20], count=len(off),
    )  # fmt: skip


def _is_trained(bench: TrialBench, name: str) -> bool:
    """Whether a weight beside or below a module is trained."""
    owner = name.rpartition(".")[0]
    return any(each.startswith(f"{owner}." if owner else "") for each in bench.trainable())


def _forward_seeded(bench: TrialBench, inputs: dict[str, object], seed: int) -> Tensor:
    torch.manual_seed(seed)
    return bench.forward(inputs, training=True)


def check_references(bench: TrialBench) -> LawResult:
    """Asks whether a frozen model of the trainer, as its loss runs it, gives the same outputs twice."""
    own = {id(parameter) for parameter in bench.bare.parameters()}
    models = {
        name: model
        for name, model in find_models(bench.trainer).items()
        if name != "model" and not any(id(parameter) in own for parameter in model.parameters())
    }
    trained = {id(parameter) for parameter in bench.bare.parameters() if parameter.requires_grad}
    for name in REFERENCES:
        reference = getattr(bench.trainer, name, None)
        shared = (
            sum(id(parameter) in trained for parameter in reference.parameters())
            if isinstance(reference, nn.Module)
            else 0
        )
        if shared:
            return broken(ERROR, f"{name} shares {shared} trained parameters with the model, so it moves along with it and every "
                          "difference between the two is 0. Give it a copy.", model=name, count=shared)  # fmt: skip
    if bench.is_online:
        return _check_sampled_reference(bench)
    if not models:
        return _check_computed_reference(bench) or _check_own_reference(bench)
    first, second = ({name: _outputs(bench, model, seed) for name, model in models.items()} for seed in (0, 1))
    ran = [name for name in models if first[name]]
    if not ran:
        raise NotApplicable("its loss does not run its frozen models in a training step")
    for name in ran:
        for a, b in zip(first[name], second[name], strict=False):
            move = measure_move(a, b) if a.shape == b.shape else 0.0
            if move > bench.tolerance:
                mode = "it is in training mode" if models[name].training else "though it is in evaluation mode"
                return broken(ERROR, f"The frozen {name} gives other outputs for the same batch (by {move:.1e} of their spread): "
                              f"{mode}, with dropout on.", move=move, model=name)  # fmt: skip
    return held(f"{', '.join(ran)} gives the same outputs twice", models=ran)


def _check_computed_reference(bench: TrialBench) -> LawResult | None:
    """Log-probabilities of a reference that rows already have must be those of the policy, as long as it has not moved: both are
    one model then, and all rewards are 0."""
    rows = sorted((row for row in bench.all_rows if isinstance(row, Mapping)), key=measure)[
        :2
    ]  # whole: they are sums over rows
    if bench.has_trained or not rows or not any(name in rows[0] for name in COMPUTED):
        return None
    lists = metric_lists(bench.trainer)
    with torch.no_grad(), bench.steady():
        bench.compute_loss(bench.collate(rows))
    found = {name: lists[name][-1] for kind in ("rewards", "logps") for part in ("chosen", "rejected")
             if lists.get(name := f"{kind}/{part}")}  # fmt: skip
    parts = [part for part in ("chosen", "rejected") if f"rewards/{part}" in found]
    beta = float(getattr(bench.trainer, "beta", 1.0)) or 1.0
    offs = {part: abs(found[f"rewards/{part}"]) / beta / max(abs(found[f"logps/{part}"]), 1.0) for part in parts}
    if not offs:
        return None
    part, bound = max(offs, key=lambda each: offs[each]), max(bench.tolerance, 0.02)
    if offs[part] <= bound:
        return held(f"the reference's log-probabilities in the rows are those of the policy before its first step (within {offs[part]:.1e})",
                    difference=offs[part])  # fmt: skip
    return broken(
        WARNING, f"The rows' log-probabilities of the reference differ by {offs[part]:.0%} from those of the policy, which has not moved yet: {part} answers "
        f"begin with a reward of {found[f'rewards/{part}']:.3g} instead of 0. Were they computed with another model or another preparation of the rows?",
        difference=offs[part],
    )  # fmt: skip


def _check_own_reference(bench: TrialBench) -> LawResult:
    """The model without its adapter, or with another one, is the reference: it must stay as it is when the adapter moves."""
    if not hasattr(bench.bare, "peft_config") or not hasattr(bench.trainer, REFERENCES[0]):
        raise NotApplicable("the trainer has no model beside the trained one")
    before = _outputs_without_gradient(bench)
    if not before:
        raise NotApplicable("its loss does not run a reference in a training step")
    with borrowed(bench.trainer):
        bench.disturb()
        after = _outputs_without_gradient(bench)
    moves = [measure_move(a, b) for a, b in zip(before, after, strict=True)]
    if min(moves) <= bench.tolerance:
        return held("the reference inside the model stays as it is when the adapter moves", move=min(moves))
    return broken(ERROR, f"The reference moves along with the adapter that is trained (by {min(moves):.1e} of its outputs' spread), so every "
                  "difference between the two is 0. Turn the adapter off where the reference is computed.", move=min(moves))  # fmt: skip


def _outputs_without_gradient(bench: TrialBench) -> list[Tensor]:
    """Returns the outputs of the trained model's own passes without gradients, while the trainer computes its loss."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():
            found.append(find_output(output))

    with bench.model.register_forward_hook(note), bench.steady():
        bench.compute_loss()
    return found


def _check_sampled_reference(bench: TrialBench) -> LawResult:
    """Once the policy has moved, the log-probabilities of the reference must be others than its own."""
    if bench.sampled.batch.get(REFERENCE) is None:
        raise NotApplicable("its completions have no log-probabilities of a reference")
    with borrowed(bench.trainer):
        bench.disturb()
        batch = bench.sample().batch
        with bench.steady():
            bench.model.train()
            own = policy_logps(bench.trainer, bench.model, batch)
    off = float((own - batch[REFERENCE])[batch["completion_mask"].bool()].abs().max())
    if off > 64 * bench.eps:
        return held(
            f"log-probabilities of the reference differ from those of a moved policy by up to {off:.1e}", move=off
        )
    return broken(ERROR, "The log-probabilities of the reference are those of the policy, also after the policy has moved: the KL term is always "
                  "0. Compute them with the reference model, or with the adapter turned off.", move=off)  # fmt: skip


def _outputs(bench: TrialBench, model: nn.Module, seed: int) -> list[Tensor]:
    """Returns the outputs of a model while the trainer computes its loss, with everything random left on."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: object, output: object) -> None:
        found.append(find_output(output))

    torch.manual_seed(seed)
    with model.register_forward_hook(note), torch.no_grad():
        bench.compute_loss()
    return found
