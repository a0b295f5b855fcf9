#!/bin/sh
# Slurm's HealthCheckProgram.  Slurm ignores its exit code; sites that run it from NHC or the like use it:
# 0 fit or not known, 1 not fit.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
timeout 5 "$(dirname "$(readlink -f "$0")")/verdict.sh"
[ $? -ne 1 ] # out of time, or verdict.sh is missing: fail open
