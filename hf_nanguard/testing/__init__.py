"""Tools to test a guarded run: plant a fault in a trainer, and count what code asks of the device."""

from .fault_injector import INF, NAN, Fault, PlantedFaults, add_bad_gradient, plant
from .operation_counter import OperationCounter

__all__ = ["INF", "NAN", "Fault", "OperationCounter", "PlantedFaults", "add_bad_gradient", "plant"]
