"""The run directory as the supervisor uses it: journal, lease, status, logs."""
