"""The documents of a packed or padding-free batch, which lie one after the other in a single entry.

Their positions begin at 0 again. Attention does not reach across, so each can be run without the others. Packing that cuts
texts into blocks of one length (TRL's `wrapped`) keeps no positions of its documents, and such a batch stays one sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...rerun.nested_inputs import map_tensors

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")  # where each document begins, and the end; what attention kernels take


@dataclass(frozen=True)
class FlatDocuments:
    """Where the documents of a batch begin and end."""

    starts: tuple[int, ...]
    length: int

    def __len__(self) -> int:
        return len(self.starts)

    def locate(self, position: int) -> tuple[int, int]:
        """Returns the document at a position of the batch, and the position in the document."""
        document = sum(start <= position for start in self.starts) - 1
        return document, position - self.starts[document]

    def take(self, inputs: Any, chosen: Sequence[int]) -> dict[str, Any]:
        """Returns inputs with some documents only."""
        ends = (*self.starts[1:], self.length)
        positions = [i for document in chosen for i in range(self.starts[document], ends[document])]
        sizes = [0, *(ends[document] - self.starts[document] for document in chosen)]

        def cut(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[:2] != (1, self.length):
                return tensor
            return tensor[:, torch.tensor(positions, device=tensor.device)]

        taken = map_tensors(dict(inputs), cut)
        for name in LENGTHS:
            if isinstance(before := taken.get(name), Tensor):
                taken[name] = torch.tensor(sizes, device=before.device).cumsum(0).to(before.dtype)
        return taken


def find_documents(inputs: object) -> FlatDocuments | None:
    """Returns the documents of a batch, `None` if it does not have several in one entry. Reads the positions on the host."""
    is_flat = isinstance(inputs, Mapping) and "attention_mask" not in inputs  # a mask says that there is padding
    positions = inputs.get("position_ids") if is_flat else None  # type: ignore[attr-defined]
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[0] != 1:
        return None
    numbers = positions[0].tolist()
    starts = tuple(index for index, number in enumerate(numbers) if number == 0)
    follows = all(number in (0, before + 1) for before, number in pairwise(numbers))
    return FlatDocuments(starts, len(numbers)) if len(starts) > 1 and starts[0] == 0 and follows else None
