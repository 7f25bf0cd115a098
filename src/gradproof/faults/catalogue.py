"""Every planted fault, and every healthy run that only looks odd."""

from gradproof.faults import by_hand, data, gradients, network, steps
from gradproof.faults.fault import Fault, Healthy, plant
from gradproof.faults.healthy import HEALTHY as WITH_OPTIMIZERS

FAULTS: tuple[Fault, ...] = (
    *gradients.FAULTS,
    *steps.FAULTS,
    *data.FAULTS,
    *network.FAULTS,
    *by_hand.FAULTS,
)
HEALTHY: tuple[Healthy, ...] = (*WITH_OPTIMIZERS, *by_hand.HEALTHY)

__all__ = ["FAULTS", "HEALTHY", "Fault", "Healthy", "plant"]
