#!/bin/sh
# Says whether the Stepkeeper node agent holds this node for fit: for Slurm's hooks, which link to it (README.md).
#   0  fit, or not known: no agent, an old or unreadable verdict, an agent that only observes
#   1  not fit: a GPU has failed, and the agent drains the node or has done so
# It reads one small file, in two seconds at most, and asks neither the agent nor Slurm.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
file=${STEPKEEPER_VERDICT:-/run/stepkeeper/verdict.json}
old_s=300

[ -f "$file" ] || exit 0
line=$(timeout 2 head -c 4096 "$file" 2>/dev/null) || exit 0
case $line in
'{"fit":false,"updated_at":'*) ;;
*) exit 0 ;;
esac
at=${line#*\"updated_at\":}
at=${at%%[!0-9]*}
now=$(date +%s) || exit 0
case $at in
[1-9]?????????) ;; # ten digits: seconds since 1970
*) exit 0 ;;
esac
age=$((now - at))
[ "$age" -le "$old_s" ] && [ "$age" -ge "-$old_s" ] || exit 0

why=${line#*\"why\":\"}
why=${why%%\"*}
echo "stepkeeper: not fit: ${why#stepkeeper: }" >&2
exit 1
