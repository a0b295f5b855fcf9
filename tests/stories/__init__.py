"""Stories on a real Slurm: what users live through, from sbatch to the last loss."""
