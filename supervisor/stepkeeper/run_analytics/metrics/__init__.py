"""Figures of a running supervisor for Prometheus: as a file for node_exporter, and over HTTP.

`tally` counts in the loop, a few dictionary updates a record; everything that can wait is on threads of its own.
"""
