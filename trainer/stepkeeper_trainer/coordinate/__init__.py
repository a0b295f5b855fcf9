"""How the ranks act as one: what they are asked for, what they agree on, when they save, how they end."""
