"""A bad micro-batch under examination: it can be run again, whole or in part, any number of times."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ....boundary import attempt
from ...finite import find_nonfinite, local, read_host
from ...rerun.micro_batch import MicroBatch
from ...rerun.nested_inputs import map_parts, map_tensors, name_tensors
from ...rerun.runner import Runner
from ...torch_private import unwrap_compiled
from ..trace.origin import Origin, find_origin
from .flat_documents import find_documents

WRAPPERS = (DistributedDataParallel, nn.DataParallel)
# Fields whose first dimension is the number of samples, the most reliable first.
MAIN_FIELDS = (
    "input_ids",
    "completion_ids",
    "labels",
    "pixel_values",
    "input_values",
    "input_features",
    "inputs_embeds",
)


@dataclass(frozen=True)
class Outcome:
    """The result of a replay."""

    loss: float
    bad: dict[str, str]  # the gradients that are not finite, each "nan" or "inf"

    @property
    def healthy(self) -> bool:
        """Whether loss and gradients are finite."""
        return math.isfinite(self.loss) and not self.bad


class SuspectBatch:
    """A held micro-batch that can be run again.

    One sample may have several entries: a preference trainer gives its pairs as two halves. `num_samples`, if it is known, is
    used only if the entries can be divided into as many. Of a packed or padding-free batch, the samples are its documents. `others_pass` says that other micro-batches were finite with the
    same weights.
    """

    def __init__(
        self,
        runner: Runner,
        micro: MicroBatch,
        weight: object,
        num_samples: int | None = None,
        others_pass: bool = False,
    ):
        self.runner = runner
        self.micro = micro
        self.weight = weight
        self.others_pass = others_pass
        self.fields = name_tensors(runner.inputs_of(micro))
        self.num_entries = count_entries(self.fields)
        self.documents = find_documents(runner.inputs_of(micro))
        if self.documents is not None:
            self.num_samples: int | None = len(self.documents)
            self.rows = runner.rows_of(micro, len(self.documents))
            self.num_runs = 0
            return
        rows = micro.rows
        wanted = len(rows) if rows else None
        self.num_samples = self.num_entries
        for number in (wanted, num_samples):
            if number and self.num_entries and self.num_entries % number == 0:
                self.num_samples = number
        self.rows = rows if self.num_samples == wanted else None
        self.num_runs = 0

    @property
    def is_replaceable(self) -> bool:
        """Whether a sample can be replaced by a copy of another: what is not the same for all has one entry per sample.

        The patches of all images of a batch in one tensor, for example, would stay those of the sample that is replaced.
        """
        if self.documents is not None or self.num_entries is None:
            return False
        sizes = (self.num_samples, self.num_entries)
        return all(tensor.ndim == 0 or tensor.shape[0] in sizes for tensor in self.fields.values())

    @property
    def model(self) -> nn.Module:
        """The model without wrappers, as the user knows it."""
        model = self.runner.model
        while (inner := unwrap_compiled(model)) is not model or isinstance(model, WRAPPERS):
            model = inner if inner is not model else model.get_submodule("module")
        return model

    def run(self, samples: Sequence[int] | None = None, compiled: bool = False) -> Outcome:
        """Runs forward and backward of all samples or of some with the original random state; eagerly, unless `compiled`.

        A sample may be given several times, so that copies of it take the places of others.
        """
        loss = self._probe(self.part(samples), compiled)
        [value] = read_host([loss])
        return Outcome(value, find_nonfinite(self.runner.named_gradients()))

    def raises(self, samples: Sequence[int], kind: type[Exception]) -> bool:
        """Returns whether the forward of some samples raises an exception of a kind."""
        micro = self.part(samples)
        self.runner.reset()
        micro.rng.restore()
        self.num_runs += 1

        def forward() -> bool:
            self.runner.forward(micro)
            return False

        with self.runner.isolated():
            return attempt(forward, lambda error: type(error) is kind)

    def measure(self, samples: Sequence[int] | None = None) -> tuple[float, float]:
        """Returns loss and gradient norm of all samples or of some, as if they were the whole step."""
        micro = self.part(samples)
        loss = self._probe(micro, weight=self.runner.weigh_alone(micro))
        loss_host, norm = read_host([loss, local(self.runner.measure())])
        return loss_host, norm

    def find_origin(self, samples: Sequence[int] | None = None) -> Origin | None:
        """Runs it under a trace and returns where its first non-finite value came from, `None` if all values were finite."""
        self.runner.reset()  # before the trace, which would attribute the writes of a reset, or of a cut, to the loss
        micro = self.part(samples)
        named = name_tensors(self.runner.inputs_of(micro))
        return find_origin(lambda: self._probe(micro), self.model, self.runner.named_gradients, named)

    @contextmanager
    def changed_inputs(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Changes the float tensors among the inputs for the runs inside the block."""
        micro = self.micro
        inputs = map_tensors(self.runner.inputs_of(micro), lambda t: change(t) if t.is_floating_point() else t)
        self.micro = replace(micro, payload=self.runner.with_inputs(micro, inputs))
        try:
            yield
        finally:
            self.micro = micro

    def part(self, samples: Sequence[int] | None) -> MicroBatch:
        """Returns the micro-batch reduced to some samples: what has one entry per sample is cut, everything else is kept."""
        if samples is None:
            return self.micro
        if self.documents is not None:
            taken = self.documents.take(self.runner.inputs_of(self.micro), samples)
            return replace(self.micro, payload=self.runner.with_inputs(self.micro, taken))
        assert self.num_entries is not None
        assert self.num_samples is not None
        entries = [first + s for first in range(0, self.num_entries, self.num_samples) for s in samples]
        inputs = take_entries(self.runner.inputs_of(self.micro), {self.num_samples: samples, self.num_entries: entries})
        return replace(self.micro, payload=self.runner.with_inputs(self.micro, inputs))

    def decode(self, sample: int) -> str | None:
        """Returns the text of a sample, `None` if it has none."""
        if self.documents is None:
            return self.runner.decode(self.micro, sample)
        return self.runner.decode(self.part([sample]), 0)

    def _probe(self, micro: MicroBatch, compiled: bool = False, weight: object = None) -> Tensor:
        self.num_runs += 1
        as_it_is = compiled or "torch._dynamo" not in sys.modules
        # a compiled graph has no modules and no source lines
        with nullcontext() if as_it_is else torch.compiler.set_stance("force_eager"):
            return self.runner.probe(micro, self.weight if weight is None else weight)


def find_fields(fields: dict[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """Returns the tensors with these names, nested or not, in the order of the names."""
    return [tensor for name in names for key, tensor in fields.items() if key.rsplit(".", 1)[-1] == name]


def count_entries(fields: dict[str, Tensor]) -> int | None:
    """Returns how many entries a batch has, `None` if it has no tensor to count them by."""
    ranked = [*find_fields(fields, MAIN_FIELDS), *fields.values()]
    return next((int(tensor.shape[0]) for tensor in ranked if tensor.ndim and tensor.shape[0]), None)


def take_entries(inputs: object, chosen: Mapping[int, Sequence[int]]) -> object:
    """Returns nested inputs with only some entries of every tensor or list that has one entry per sample.

    `chosen` maps a length to the entries to take from what has this length: a preference trainer gives two rows for each pair,
    but one reference log-probability.
    """
    if isinstance(inputs, Tensor):
        if inputs.ndim == 0 or inputs.shape[0] not in chosen:
            return inputs
        return inputs[torch.tensor(chosen[inputs.shape[0]], device=inputs.device)]
    if isinstance(inputs, (list, tuple)) and len(inputs) in chosen and not any(isinstance(i, Tensor) for i in inputs):
        return type(inputs)(inputs[entry] for entry in chosen[len(inputs)])
    return map_parts(inputs, lambda part: take_entries(part, chosen))
