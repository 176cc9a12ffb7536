"""Trial runs of a borrowed trainer: a few rows through its collator, its loss and its backward pass."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...core.rerun.kept_attributes import untouched
from ...hf.compat.accelerate import replaced_method
from ...hf.compat.model_config import is_encoder_decoder, without_adapter
from ...hf.compat.online_trainer import has_policy_logps, is_online
from ...hf.compat.trainer import prepare_inputs, set_accumulation_steps
from ...own_fields import own_fields
from .borrowed_trainer import find_models, list_parts
from .law_result import NotApplicable
from .quiet_forward import without_randomness
from .sampled_completions import Sampled, sample_completions
from .trial_rows import MASKED, choose_rows, identify, read_rows, repeatable, shorten, vary_labels, vary_lengths

NUM_ROWS = 4
NOISE = 0.05  # of a weight's spread, by which weights are disturbed
ZERO = 0.016  # of the loss, in half precision: two roundings of bfloat16; a gradient of less is zero but for rounding
WORK = 4e9  # parameters times tokens of a row: a run of four rows takes about a second on two cores
SHORTEST, LONGEST = 24, 256
GENERATORS = ("CausalLM", "LMHead", "ConditionalGeneration")
LABELS, FUSED = ("labels", "shift_labels"), ("fused_lm_head", "num_items_in_batch", "logits_to_keep")
# Parts of the names of parameters that belong to an adapter.
ADAPTERS = (
    "lora_",
    "adapter",
    "prompt_encoder",
    "modules_to_save",
    "ia3_",
    "vera_",
    "oft_",
    "hada_",
    "trainable_tokens",
)
Batch = Any
Inputs = dict[str, Any]


@dataclass
class Run:
    """Loss and gradients of one accumulation group. The loss of sampled completions is not compared: with advantages of both signs it is
    a difference of equal terms."""

    loss: float
    gradients: dict[str, Tensor] = field(repr=False)
    compares_loss: bool = True

    @property
    def norm(self) -> float:
        """The norm over all gradients."""
        return float(torch.stack([g.float().norm() for g in self.gradients.values()] or [torch.zeros(())]).norm())


class TrialBench:
    """A trainer, inside [`borrowed`] and after [`prepare`], with a few rows of its data."""

    def __init__(self, trainer: Any, has_trained: bool = False, own_forward: object = None):
        self.trainer = trainer
        self.has_trained = has_trained  # whether it had taken steps before
        self.own_forward = own_forward  # what somebody else than accelerate has put in place of the model's forward
        self.model: nn.Module = trainer.model_wrapped
        self.bare: Any = trainer.model  # without what accelerate and others wrap around it
        self.device = trainer.args.device
        self.is_online = is_online(trainer)

    # ---- data ----

    @cached_property
    def limit(self) -> int:
        """Tokens of a row, so that trials take seconds also with larger models."""
        size = sum(p.numel() for p in self.bare.parameters())
        return int(min(max(WORK / max(size, 1), SHORTEST), LONGEST))

    @cached_property
    def loader(self) -> Any:
        return self.trainer.get_train_dataloader()

    @cached_property
    def all_rows(self) -> list[object]:
        """Some rows of the dataset, as they are."""
        return read_rows(self.loader.dataset)

    @cached_property
    def short_rows(self) -> list[object]:
        """These rows, shortened."""
        return [shorten(row, self.limit) for row in self.all_rows]

    @cached_property
    def rows(self) -> list[Any]:
        """Four short rows of different lengths."""
        if self.is_online:
            raise NotApplicable("its data are sampled completions, not rows")
        rows = choose_rows(self.short_rows, NUM_ROWS)
        varied = vary_lengths(rows)
        try:
            self.collate(varied)
        except Exception:  # the collator may be the user's, and stack rows of one length only
            return vary_labels(rows)
        return varied

    def collate(self, rows: list[Any]) -> Batch:
        """Returns a batch of the trainer's own collator. The token after padding on the left is no label: nothing real comes
        before it, so what it is predicted from means nothing."""
        batch = self._collate(rows)
        mask, labels = (
            (batch.get(name) for name in ("attention_mask", "labels")) if isinstance(batch, Mapping) else (None, None)
        )
        if isinstance(mask, Tensor) and isinstance(labels, Tensor) and self.is_causal and mask.shape == labels.shape:
            labels[:, 1:][(mask[:, 1:] != 0) & (mask[:, :-1] == 0)] = MASKED
            if self.pads_left:  # so that a row has as many labels alone, where some losses count its first one
                labels[:, 0] = MASKED
        return batch

    def _collate(self, rows: list[Any]) -> Batch:
        return repeatable(self.loader.collate_fn)([copy.deepcopy(row) for row in rows])

    @cached_property
    def pads_left(self) -> bool:
        """Whether the collator puts padding before the tokens of a row."""
        batch = self._collate(choose_rows(self.short_rows, NUM_ROWS))
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        return isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, 0].all())

    @cached_property
    def collator_draws(self) -> bool:
        """Whether the collator draws random numbers, as for masked language models."""
        one, other = (repeatable(self.loader.collate_fn, seed)(copy.deepcopy(self.rows)) for seed in (0, 1))
        return bool(identify(one) != identify(other))

    @cached_property
    def batch(self) -> Batch:
        """One batch of all trial rows; of an online trainer, sampled completions with advantages of both signs."""
        if not self.is_online:
            return self.collate(self.rows)
        batch = self.sampled.batch
        if "advantages" not in batch:
            return batch
        signs = torch.ones_like(batch["advantages"])
        signs[1::2] = -1
        return {**batch, "advantages": signs}

    @cached_property
    def sampled(self) -> Sampled:
        """Completions of an online trainer, drawn once."""
        if not self.is_online:
            raise NotApplicable("it does not sample completions")
        return self.sample()

    def sample(self, stop_at: int | None = None) -> Sampled:
        """Returns completions of an online trainer; with `stop_at`, every second one ends with a stop token at that place."""
        torch.manual_seed(0)
        with untouched(self.trainer), self.steady():
            return sample_completions(self.trainer, self.all_rows, stop_at)

    # ---- runs ----

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.bare.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def disturb(self) -> None:
        """Gives all trainable weights other values, as training does: a new adapter is 0, and tied copies are still equal. The trainer must
        be given back afterwards."""
        torch.manual_seed(0)
        for parameter in self.trainable().values():
            spread = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
            parameter.add_(torch.randn_like(parameter) * NOISE * (spread or 1.0))

    def need_policy_logps(self) -> None:
        """Raises if the trainer computes no log-probabilities of completions."""
        if not has_policy_logps(self.trainer):
            raise NotApplicable("its loss does not take log-probabilities of completions")

    def run(self, batches: list[Batch] | None = None, steady: bool = True, seed: int = 0) -> Run:
        """Runs batches as one accumulation group through `training_step` and returns their gradients."""
        parameters = self.trainable()
        for parameter in parameters.values():
            parameter.grad = None
        with self.steady(steady):
            loss = self._run_group([self.batch] if batches is None else batches, seed)
        return Run(loss, _release_gradients(parameters), not self.is_online)

    def _run_group(self, batches: list[Batch], seed: int) -> float:
        trainer = self.trainer
        torch.manual_seed(seed)
        set_accumulation_steps(trainer, len(batches))
        copies, num_items = [copy.copy(batch) for batch in batches], None
        with ExitStack() as stack:
            if self.is_online:
                hold = lambda prepare: lambda inputs: inputs  # noqa: E731 - its preparation would sample anew
                stack.enter_context(replaced_method(trainer, "_prepare_inputs", hold))
            else:
                copies, num_items = trainer.get_batch_samples(iter(copies), len(copies), self.device)
            losses = [trainer.training_step(self.model, batch, num_items) for batch in copies]
        return float(sum(float(loss) for loss in losses))

    def compute_loss(self, batch: Batch | None = None) -> Tensor:
        """Returns the trainer's own loss of a batch, with a graph if gradients are on."""
        self.model.train()
        set_accumulation_steps(self.trainer, 1)
        inputs, num_items = copy.copy(self.batch if batch is None else batch), None
        if not self.is_online:
            (inputs,), num_items = self.trainer.get_batch_samples(iter([inputs]), 1, self.device)
            inputs = prepare_inputs(self.trainer, inputs)
        with self.trainer.compute_loss_context_manager():
            return self.trainer.compute_loss(self.model, inputs, num_items_in_batch=num_items)

    @contextmanager
    def steady(self, active: bool = True, auxiliary: float = 0.0) -> Iterator[None]:
        """Turns off dropout and other random parts of the models inside the block, and auxiliary losses, which are no sums
        over samples: their weights are multiplied by `auxiliary`."""
        models = find_models(self.trainer).values() if active else ()
        owners = [self.trainer, *(part for model in models for part in list_parts(model))]
        with without_randomness(owners if active else [], auxiliary):
            yield

    @contextmanager
    def untouched_modules(self) -> Iterator[None]:
        """Leaves settings and hooks of the model's modules as they were before the block; weights are not looked at."""
        with ExitStack() as stack:
            for part in list_parts(self.bare):
                stack.enter_context(untouched(part, by_reference=()))
            yield

    @cached_property
    def usual(self) -> Run:
        """The trial batch, run as the trainer would."""
        return self.run()

    @cached_property
    def noise(self) -> float:
        """How far two runs of the same batch differ, relatively, from kernels or from random parts that stay on."""
        return compare(self.usual, self.run(seed=1))[0]

    def need_steady(self) -> None:
        """Raises if two equal runs differ so much that nothing can be concluded from a difference."""
        if not self.noise <= self.tolerance:
            raise NotApplicable(
                f"two runs of one batch with dropout off differ by {self.noise:.1e}: its loss is random or not finite"
            )

    # ---- the model's own inputs ----

    def find_inputs(self, batch: Batch | None = None) -> Inputs:
        """Returns the keyword arguments of the first call of the model in the trainer's loss."""
        calls: list[Inputs] = []
        batch = self.batch if batch is None else batch  # made before the hook, since sampling calls the model too

        names = list(inspect.signature(without_adapter(self.bare).forward).parameters)

        def note(module: nn.Module, args: tuple, kwargs: Inputs) -> None:
            if len(args) <= len(names) and all(isinstance(each, Tensor) for each in args):
                calls.append({**dict(zip(names, args, strict=False)), **kwargs})

        with self.model.register_forward_pre_hook(note, with_kwargs=True), torch.no_grad(), self.steady():
            self.compute_loss(batch)
        if not calls:
            raise NotApplicable("its loss does not call the model with named inputs")
        return calls[0]

    def forward(self, inputs: Inputs, training: bool = False) -> Tensor:
        """Returns the model's output for inputs of [`find_inputs`]: logits, or what it has in their place."""
        self.model.train(training)
        with torch.no_grad(), self.steady(), self.trainer.compute_loss_context_manager():
            return find_output(self.model(**self.without_loss(inputs)))

    def without_loss(self, inputs: Inputs) -> Inputs:
        """Returns the inputs without those that only concern the loss. Other models than causal ones may need labels: a decoder
        makes its inputs of them."""
        names = (*FUSED, *LABELS) if self.is_causal and "input_ids" in inputs else FUSED
        return {name: value for name, value in inputs.items() if name not in names}

    @cached_property
    def is_causal(self) -> bool:
        """Whether the model predicts the next token of its inputs."""
        name = type(without_adapter(self.bare)).__name__
        others = ("MaskedLM", "Classification", "QuestionAnswering", "MultipleChoice")
        return not self.is_seq2seq and not any(other in name for other in others)

    @property
    def is_generator(self) -> bool:
        """Whether the model has a head that predicts the next token of its inputs, by the names of its classes."""
        names = [cls.__name__ for cls in type(without_adapter(self.bare)).__mro__]
        return self.is_causal and any(part in name for part in GENERATORS for name in names)

    @property
    def has_batch_statistics(self) -> bool:
        return any("batchnorm" in type(module).__name__.lower() for module in self.bare.modules())

    @property
    def is_seq2seq(self) -> bool:
        return is_encoder_decoder(self.bare)

    # ---- bounds ----

    def use_float32(self) -> None:
        """Makes the model hold its weights and compute in float32; the trainer must be given back afterwards."""
        for tensor in (*self.bare.parameters(), *self.bare.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.float()
        own_fields(self.bare).pop("forward", None)
        if self.own_forward is not None:
            own_fields(self.bare)["forward"] = self.own_forward
        own_fields(self.trainer.accelerator)["autocast"] = nullcontext

    @cached_property
    def dtype(self) -> torch.dtype:
        """The precision of the run: that of autocast, or the lowest of the weights."""
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(self.trainer.accelerator.mixed_precision))
        found = [p.dtype for p in self.bare.parameters() if p.is_floating_point()]
        return mixed or max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    @property
    def eps(self) -> float:
        """The rounding of that precision."""
        return float(torch.finfo(self.dtype).eps)

    @property
    def tolerance(self) -> float:
        """Relative difference of gradients or outputs that rounding explains, where sums are taken in another order:
        1e-3 in float32, 1.6e-2 in float16, 0.06 in bfloat16."""
        return min(max(16 * self.eps, 1e-3), 0.06)

    def is_negligible(self, run: Run) -> bool:
        """Returns whether gradients are zero but for rounding, as those of a pair of two equal answers."""
        return run.norm <= min(16 * self.eps, ZERO) * max(abs(run.loss), 1e-3)

    def allow(self, factor: float = 1.0) -> float:
        """Returns the tolerance together with ten times the noise that was measured."""
        return factor * self.tolerance + 10 * min(self.noise, self.tolerance)


def find_output(output: Any, detached: bool = True) -> Tensor:
    """Returns logits or the first float tensor of a model's output, with its graph unless it is to be `detached`."""
    named = output if isinstance(output, Mapping) else {}
    values = [named[name] for name in ("logits", "log_probs", "last_hidden_state") if named.get(name) is not None]
    values += list(named.values()) if named else [output] if isinstance(output, Tensor) else list(output)
    found = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 0), None)
    if found is None:
        raise NotApplicable("its model returns no logits")
    return found.detach() if detached else found


def take_gradients(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients of a loss by name; through `backward`, which reentrant checkpointing needs."""
    _release_gradients(parameters)
    loss.backward()
    return _release_gradients(parameters)


def _release_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients that parameters have, and takes them off."""
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def compare(one: Run, other: Run) -> tuple[float, float, str]:
    """Returns the relative difference of all gradients (or of the loss, if larger), the largest of a single parameter and
    its name. A parameter counts with at least a thousandth of the whole norm, below which there is only rounding."""
    whole = max(one.norm, 1e-30)
    total, worst, name = 0.0, 0.0, ""
    for each in one.gradients.keys() | other.gradients.keys():
        a, b = one.gradients.get(each), other.gradients.get(each)
        zero = torch.zeros((), device=(b if a is None else a).device)  # type: ignore[union-attr]
        a, b = (zero if a is None else a.float()), (zero if b is None else b.float())
        off = float((a - b).norm())
        total += off**2
        share = off / max(float(a.norm()), float(b.norm()) * 1e-3, 1e-3 * whole)
        if not share <= worst:
            worst, name = share, each
    off_loss = abs(one.loss - other.loss) / max(abs(one.loss), 1e-12) if one.compares_loss else 0.0
    return max(total**0.5 / whole, off_loss), worst, name
