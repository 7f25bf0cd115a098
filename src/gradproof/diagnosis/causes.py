"""Every family of causes; catalogue/ has them in the four groups of the planted faults."""

from gradproof.diagnosis.catalogue import data, gradients, network, steps
from gradproof.diagnosis.catalogue.cause import Cause

CAUSES: tuple[Cause, ...] = (*gradients.CAUSES, *steps.CAUSES, *data.CAUSES, *network.CAUSES)
BY_FAMILY = {cause.family: cause for cause in CAUSES}
