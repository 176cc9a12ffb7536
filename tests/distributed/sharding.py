"""FSDP without a device, for launches on a CPU."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def shard_on_cpu() -> None:
    """Makes accelerate take FSDP on the CPU, which it never picks by itself."""
    original = AcceleratorState.__init__

    def __init__(self, *args, fsdp_plugin=None, **kwargs):  # noqa: N807 - it becomes the method of that name
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            for store in (AcceleratorState._shared_state, PartialState._shared_state):
                store["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = __init__
