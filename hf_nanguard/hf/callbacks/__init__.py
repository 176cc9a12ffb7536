"""Callbacks for any stock trainer, one a file."""

from .activation_monitor import ActivationMonitorCallback as ActivationMonitorCallback
from .checkpoint_guard import CheckpointGuardCallback as CheckpointGuardCallback
from .gradient_monitor import GradientMonitorCallback as GradientMonitorCallback
from .nan_guard import NanGuardCallback as NanGuardCallback
