"""`docs/metrics.md`: every metric, from its declaration."""

from __future__ import annotations

from stepkeeper.run_analytics.metrics import METRICS
from tests.pages.tables import MADE

_TEXT = """# Metrics for Prometheus

{made}

    stepkeeper run --metrics-textfile /var/lib/node_exporter/textfile -- CMD
    stepkeeper run --metrics-port 9400 -- CMD

The first one writes a file for node_exporter. The second one answers at
`http://127.0.0.1:9400/metrics`.

Both come from the supervisor, on the batch node, and neither can slow or end the run. The supervisor logs what it
cannot write or serve (`metrics_not_written`, `metrics_not_served`), and training continues. Sites set them once, in
`/etc/stepkeeper` ([configuration](configuration.md)).

The file is `stepkeeper-RUNID.prom`. The supervisor replaces it atomically every 15 s. It removes the file at its end,
because the next attempt may run on another node. Where the run has stopped and needs manual repair (codes from 20 on),
the file stays for an alert. The next attempt on that node replaces it. After a `kill -9` it stays too, and
`stepkeeper_updated_timestamp_seconds` says since when.
node_exporter must be able to read it, and you must be able to write the directory.

The port is open to its own node only, unless `metrics_port` names an address (`0.0.0.0:9400`). It answers
`GET /metrics`, to eight callers at a time.

[grafana-dashboard.json](grafana-dashboard.json) is a dashboard of these metrics,
[prometheus-alerts.yml](prometheus-alerts.yml) a beginning of alerts. Every metric has the labels `run` (name of the run
directory) and `job`. Counters count within an attempt: after a requeue they begin at 0, as `rate()` and `increase()`
expect. Of saves more frequent than one in 10 s, not all are counted.
"""


def page() -> str:
    """Return the page."""
    rows = [
        f"| `{each.name}` | {'counter' if each.is_counter else 'gauge'} | "
        f"{', '.join(f'`{label}`' for label in each.labels)} | {each.help} |"
        for each in METRICS
    ]
    head = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    return _TEXT.replace("{made}", MADE) + "\n" + "\n".join([*head, *rows]) + "\n"
