"""Healthy runs."""

from gradproof.faults.fault import Healthy

HEALTHY: tuple[Healthy, ...] = ()
