"""The training state: what each rank has, by name, and how it gets back exactly that.

parts        a module, an optimizer, anything with `state_dict`: each gives named tensors and a JSON skeleton
keys         a name whose value is not equal on all ranks: which rank has which copy; names of older versions
training     all parts together, the counters and the random generators
"""

from stepkeeper_trainer.state.module import plain_name, tied_names
from stepkeeper_trainer.state.training import HISTORY_STEPS, Counters, TrainingState
from stepkeeper_trainer.state.tree import Stateful

__all__ = ["HISTORY_STEPS", "Counters", "Stateful", "TrainingState", "plain_name", "tied_names"]
