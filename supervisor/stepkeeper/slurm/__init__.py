"""Slurm's side: one client, the command lines of our Slurm steps, and the environment they get."""
