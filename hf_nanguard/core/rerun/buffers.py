"""What the passes of a group write, kept so that it can be put back: buffers (BatchNorm statistics), parameters (a momentum
encoder, weights that are moved uphill), plain attributes of modules, what an optimizer inside the loop's own step updates, and
what a loss writes outside the model.

Which ones those are is learned, from torch's write counters and, once, from the values: all buffers and attributes are kept
for the first group, afterwards only those that a group has written. A model whose passes write nothing costs nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..torch_private import StateSlot, is_norm_layer, list_state_slots, write_count
from .host_copy import HostCopy, OptimizerState, copy_tensor, count_bytes, find_tensors, restore_tensor, wait_for_copies
from .kept_attributes import KeptAttributes, WatchedAttributes, keep_module

MOST_BYTES = 2**30  # of weights, and of optimizers, that are copied each step; a rewind repairs larger ones


class KeptOptimizer:
    """An optimizer and its parameters as they were before a step; `reused` is an earlier copy whose memory is no longer needed."""

    def __init__(self, optimizer: Optimizer, reused: "KeptOptimizer | None" = None):
        before = {} if reused is None else reused.parameters
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.state = OptimizerState(optimizer)
        self.saved: tuple[dict, list] = self.state.copy(None if reused is None else reused.saved)
        self.parameters: dict[Tensor, HostCopy] = {
            parameter: copy_tensor(parameter, before.get(parameter)) for parameter in trained
        }

    def restore(self) -> None:
        """Puts the optimizer and its parameters back."""
        wait_for_copies()
        self.state.restore(self.saved, 0)
        for parameter, value in self.parameters.items():
            restore_tensor(parameter, value)


class BufferKeeper:
    """Keeps and restores what the passes of a group write beside gradients.

    `others` are modules outside the model that a loss uses, `watched` the attributes of other objects that it may write.
    """

    def __init__(self, model: nn.Module, others: Sequence[nn.Module] = (), watched: Sequence[WatchedAttributes] = ()):
        self.model, self.others = model, others
        self.watched = list(watched)
        own = list_state_slots(model)
        self.slots = [*own, *(slot for root in others for slot in list_state_slots(root))]
        # Fused batch norm kernels write their running statistics without counting it; those of a teacher do not train.
        norms = {i for i, slot in enumerate(self.slots) if slot.is_buffer and is_norm_layer(slot.module)}
        self.written = {i for i in norms if i < len(own) or self.slots[i].module.training}
        self.seen: dict[int, tuple[int, int, int]] = {}  # what identifies the tensor of each slot, and its writes
        self.kept: list[tuple[StateSlot, Tensor, Tensor]] = []  # each with the tensor and a copy
        bare = model.module if isinstance(model, (DistributedDataParallel, nn.DataParallel)) else model
        self.modules = list(dict.fromkeys(module for root in (bare, *others) for module in root.modules()))
        self.writers: set[nn.Module] = set()  # whose attributes were put back
        self.attributes: list[KeptAttributes] = []
        self.optimizers: dict[Optimizer, KeptOptimizer] = {}  # that step inside the group
        self._spare: dict[Optimizer, KeptOptimizer] = {}  # of the group before
        self._num_bytes = 0  # of the optimizers of this group
        self.num_groups = 0

    @torch.no_grad()
    def keep(self) -> None:
        """Keeps the values of now."""
        first = self.num_groups == 0
        before, self.kept = self.kept, []  # what was kept for another group is not put back if this fails
        attributes, self.attributes = self.attributes, []
        self._spare, self.optimizers, self._num_bytes = self.optimizers, {}, 0
        if self.num_groups == 1:
            uncounted = {id(slot) for slot, tensor, value in before if not _is_same(tensor, value)}  # through `.data`
            self.written |= {i for i, slot in enumerate(self.slots) if id(slot) in uncounted}
            self.modules = [k.owner for k in attributes if k.changed or k.owner in self.writers]
        self.num_groups += 1
        tensors = {i: tensor for i, slot in enumerate(self.slots) if (tensor := slot.get()) is not None}
        self.seen = {i: _identify(tensor) for i, tensor in tensors.items()}
        chosen = [i for i in tensors if i in self.written or (first and self.slots[i].is_buffer)]
        weights = {i for i in chosen if not self.slots[i].is_buffer}
        if sum(count_bytes(tensors[i]) for i in weights) > MOST_BYTES:
            chosen = [i for i in chosen if i not in weights]
        self.kept = [(self.slots[i], tensors[i], tensors[i].clone()) for i in chosen]
        self.attributes = [keep_module(module) for module in self.modules]
        for watched in self.watched:
            watched.begin_group()

    def abandon(self) -> None:
        """Forgets a group whose passes were not completed: a first one shows nothing about the next."""
        if self.num_groups == 1:
            self.num_groups = 0

    def begin_loss(self) -> None:
        """Keeps what the loss may write outside the model, before each call of it."""
        for watched in self.watched:
            watched.begin_call()

    def end_loss(self, has_returned: bool) -> None:
        """Learns, in the first group, what the loss has written, which may have raised."""
        for watched in self.watched:
            watched.end_call(has_returned)

    def note_writes(self) -> None:
        """Notes what the group has written, once its passes are done and before its optimizer steps."""
        now = {i: tensor for i, slot in enumerate(self.slots) if (tensor := slot.get()) is not None}
        self.written |= {i for i, tensor in now.items() if i in self.seen and self.seen[i] != _identify(tensor)}

    def keep_optimizer(self, optimizer: Optimizer) -> None:
        """Keeps an optimizer that is about to step inside the group, as it was before its first step there."""
        if optimizer in self.optimizers:
            return
        for tensor in find_tensors([optimizer.param_groups, optimizer.state]):
            self._num_bytes += count_bytes(tensor)
        if self._num_bytes > MOST_BYTES:
            self.optimizers.clear()  # some of them alone would not go together
        else:
            self.optimizers[optimizer] = KeptOptimizer(optimizer, self._spare.pop(optimizer, None))

    @property
    def has_updates(self) -> bool:
        """Whether passes update weights themselves, so that gradients that are left say nothing."""
        written = [self.slots[i].get() for i in self.written]
        return bool(self.optimizers) or any(tensor is not None and tensor.requires_grad for tensor in written)

    def keep_apart(self) -> "BufferKeeper":
        """Returns another keeper of the values of now."""
        other = BufferKeeper(self.model, self.others)
        other.written |= self.written if len(other.slots) == len(self.slots) else set()
        other.keep()
        other.attributes += [watched.copy() for watched in self.watched]
        for optimizer in self.optimizers:
            other.keep_optimizer(optimizer)
        return other

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, also a tensor that was replaced by another one since."""
        for optimizer in self.optimizers.values():
            optimizer.restore()
        for attributes in self.attributes:
            if self.num_groups == 1 and isinstance(attributes.owner, nn.Module) and attributes.changed:
                self.writers.add(attributes.owner)
            attributes.restore()
        for watched in self.watched:
            watched.restore()
        for slot, tensor, value in self.kept:
            if slot.get() is not tensor or not _is_same(tensor, value):
                slot.put(tensor)
                tensor.copy_(value)
                self.written.add(self.slots.index(slot))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Makes `restore` do nothing inside the block, while other tensors stand in for the buffers."""
        before = self.kept, self.attributes, self.optimizers, self.watched
        self.kept, self.attributes, self.optimizers, self.watched = [], [], {}, []
        try:
            yield
        finally:
            self.kept, self.attributes, self.optimizers, self.watched = before


def _identify(tensor: Tensor) -> tuple[int, int, int]:
    address = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided else 0
    return id(tensor), write_count(tensor), address


def _is_same(buffer: Tensor, value: Tensor) -> bool:
    """Returns whether all entries are equal; NaN equals NaN."""
    return torch.equal(buffer, value) or bool(((buffer == value) | ((buffer != buffer) & (value != value))).all())
