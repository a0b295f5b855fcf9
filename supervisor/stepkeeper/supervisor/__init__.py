"""The batch process: its loop, what it logs of each decision, where events come from, what carries out effects."""
