"""NumPy views of CPU tensors, so that checks in a dataloader's worker add no torch operation."""

import numpy as np
import torch
from torch import Tensor


def is_viewable(tensor: Tensor) -> bool:
    """Returns whether NumPy can view the tensor, which must not be empty, sparse, nested, quantized, of an 8-bit float, or a
    conjugate or negative view."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.numel() > 0 and not (tensor.is_floating_point() and tensor.element_size() < 2)


def view(tensor: Tensor) -> np.ndarray:
    """Returns the memory of a CPU tensor as an array; bfloat16 as a copy in float32."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return np.from_dlpack(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
