"""Callbacks for any stock trainer, one a file."""

from .gradient_monitor import GradientMonitorCallback as GradientMonitorCallback
from .nan_guard import NanGuardCallback as NanGuardCallback
