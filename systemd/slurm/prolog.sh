#!/bin/sh
# Slurm's Prolog.  Exit code 1 keeps the job off this node: Slurm requeues it (held, without nohold_on_prolog_fail in
# SchedulerParameters) and drains the node, if it is not drained yet.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
timeout 5 "$(dirname "$(readlink -f "$0")")/verdict.sh"
[ $? -ne 1 ] # out of time, or verdict.sh is missing: fail open
