"""All that this room takes from the experiments, in one place."""

from gradproof.experiments.data.loaders import Fetched as Fetched
from gradproof.experiments.data.loaders import slots_of as slots_of
from gradproof.experiments.needs import why_not as why_not
from gradproof.instruments.arms import copied as copied
from gradproof.instruments.arms import is_known as is_known
from gradproof.instruments.changed import find_changes as find_changes
from gradproof.instruments.changed import table_of as table_of
from gradproof.instruments.digits import against_float64 as against_float64
from gradproof.instruments.digits import swallowed_updates as swallowed_updates
from gradproof.instruments.evidence import Evidence as Evidence
from gradproof.instruments.source import lines_behind as lines_behind
from gradproof.instruments.swap import describe_swap as describe_swap
from gradproof.instruments.swap import swap as swap
from gradproof.instruments.update import at_work as at_work
from gradproof.instruments.update import is_by_hand as is_by_hand
from gradproof.instruments.update import named_parameters as named_parameters
from gradproof.instruments.weights import pull as pull
from gradproof.instruments.weights import take_apart as take_apart
