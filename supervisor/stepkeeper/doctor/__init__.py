"""What works and what does not on this cluster, before a week of training depends on it: site -> rules -> findings."""
