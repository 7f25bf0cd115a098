"""Every planted fault, and every healthy run that only looks odd."""

from gradproof.faults import data, gradients, network, steps
from gradproof.faults.fault import Fault, Healthy, plant
from gradproof.faults.healthy import HEALTHY

FAULTS: tuple[Fault, ...] = (*gradients.FAULTS, *steps.FAULTS, *data.FAULTS, *network.FAULTS)

__all__ = ["FAULTS", "HEALTHY", "Fault", "Healthy", "plant"]
