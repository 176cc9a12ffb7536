"""Callbacks for any stock trainer, one a file."""

from .activation_monitor import ActivationMonitorCallback
from .checkpoint_guard import CheckpointGuardCallback
from .gradient_monitor import GradientMonitorCallback
from .nan_guard import NanGuardCallback
