"""How often to save, and what failures will cost: from given figures, or from those that a run has measured."""
