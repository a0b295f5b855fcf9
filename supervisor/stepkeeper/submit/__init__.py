"""From a command to a job in the queue: a batch script for this cluster, checked before it is submitted."""
