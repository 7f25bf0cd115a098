"""All that this room takes from the experiments, in one place."""

from gradproof.experiments.evidence import Evidence as Evidence
from gradproof.experiments.instruments.arms import copied as copied
from gradproof.experiments.instruments.arms import is_known as is_known
from gradproof.experiments.instruments.changed import find_changes as find_changes
from gradproof.experiments.instruments.changed import table_of as table_of
from gradproof.experiments.instruments.digits import against_float64 as against_float64
from gradproof.experiments.instruments.digits import swallowed_updates as swallowed_updates
from gradproof.experiments.instruments.source import lines_behind as lines_behind
from gradproof.experiments.instruments.swap import describe_swap as describe_swap
from gradproof.experiments.instruments.swap import swap as swap
from gradproof.experiments.instruments.update import at_work as at_work
from gradproof.experiments.instruments.update import is_by_hand as is_by_hand
from gradproof.experiments.instruments.update import named_parameters as named_parameters
from gradproof.experiments.instruments.weights import pull as pull
from gradproof.experiments.instruments.weights import take_apart as take_apart
from gradproof.experiments.loaders import Fetched as Fetched
from gradproof.experiments.loaders import slots_of as slots_of
from gradproof.experiments.needs import why_not as why_not
