"""What is called otherwise.  Modules are those of the old layout: `rename.py` runs before `move.py`."""

# (module below stepkeeper, name): new name.  Every use follows the imports.
SYMBOLS = {
    ("core.state", "Doubt"): "SlurmReachability",
    ("core.causes", "LeftOut"): "SkippedData",
    ("core.effects", "CallPerson"): "NotifyUser",
    ("core.effects", "TellSlowNode"): "ReportSlowNode",
    ("core.effects", "TellSlowLaunch"): "ReportSlowLaunch",
    ("core.effects", "TellReplay"): "ReportReplay",
    ("core.effects", "AnswerAsk"): "AnswerRequest",
    ("core.events.ours", "StoodStill"): "Suspended",
    ("core.events.ours", "Asked"): "Requested",
    ("core.events.launches", "SaveGaveUp"): "SaveFailed",
    ("core.asked", "on_asked"): "on_requested",
    ("core.usual", "Usual"): "Baseline",
    ("core.robust", "middle"): "median_mad",
    ("core.losses", "heard"): "observe",
    ("core.losses", "rule_told"): "rule_of",
    ("core.stragglers", "heard"): "observe_pace",
    ("core.replays", "TELL"): "REPORT_REPLAY",
    ("core.replays", "ROLLBACK"): "ROLLBACK_REPLAY",
    ("core.anomalies", "TELL"): "REPORT",
    ("core.phases", "ask"): "query_slurm",
    ("core.phases", "ask_unprompted"): "query_slurm_unprompted",
    ("core.judge", "judge"): "judge_eviction",
    ("actions.judging", "Witness"): "EvidenceBuffer",
    ("actions.judging", "judge"): "diagnose",
    ("actions.calling", "call_person"): "notify_user",
    ("actions.crew", "Crew"): "VerifyPool",
    ("actions.shares", "Shares"): "Shards",
    ("actions.standing", "Standing"): "StackCollector",
    ("actions.slurm", "ask"): "query_job",
    ("actions.slurm", "ask_idle"): "query_idle_nodes",
    ("actions.reliability", "tell"): "reliability_variables",
    ("actions.trackers", "tell"): "tracker_variables",
    ("telling", "Telling"): "DecisionLog",
    ("store.allowance", "Allowance"): "RateLimiter",
    ("store.asks", "Ask"): "Request",
    ("node.hasten", "Wish"): "RequeueRequest",
    ("node.hasten", "Hastener"): "RequeueExpediter",
    ("node.hasten", "judge"): "judge_request",
    ("node.protocol", "Hasten"): "ExpediteRequeue",
    ("node.sight", "Sight"): "SensorHealth",
    ("node.judging", "Judging"): "Evaluation",
    ("requeueing", "Again"): "RequeuePlan",
    ("simulating.clockwork", "Clockwork"): "Simulator",
    ("simulating.turns", "Turns"): "EventQueue",
    ("simulating.turns", "Turn"): "QueuedEvent",
    ("verdict.joining", "judge"): "classify",
    ("verdict.logs", "sight"): "log_evidence",
    ("verdict.errorfiles", "sight"): "error_file_evidence",
    ("verdict.recorded", "sight"): "recorded_evidence",
    ("verdict.gathering", "Told"): "Announced",
    ("seeing.history", "Told"): "History",
    ("seeing.history", "tell"): "read_history",
    ("seeing.queue", "ask"): "query",
    ("seeing.queue", "ask_all"): "query_all",
    ("watcher.accounts", "Asked"): "FlightRecorderRequest",
    ("watcher.checking", "Checking"): "NodeChecks",
    ("watcher.senses", "Senses"): "NodeSensors",
    ("watcher.own_senses", "OwnSenses"): "OwnSensors",
    ("watcher.sharing", "ShareReader"): "ShardReader",
    ("watcher.spying", "Spied"): "PySpyStacks",
}

STATE = {"state", "before", "after", "self.state"}
CORE = ("supervisor/stepkeeper/core/", "supervisor/stepkeeper/actions/", "supervisor/stepkeeper/store/", "supervisor/stepkeeper/sources/", "supervisor/stepkeeper/telemetry/", "supervisor/stepkeeper/verdict/", "tests/supervisor/", "supervisor/stepkeeper/simulating/", "supervisor/stepkeeper/supervise.py", "supervisor/stepkeeper/telling.py",
        "supervisor/stepkeeper/commands/run.py",
        "supervisor/stepkeeper/commands/dry_run.py", "supervisor/stepkeeper/seeing/incidents.py", "tests/core/", "tests/simulating/",
        "tests/stories/", "tests/seeing/", "tests/report/", "tests/store/", "tests/supervisor/test_left_out.py", "tests/reading/", "tests/telemetry/")
NOT_STATE = {"losses", "pace", "suspect", "suspended", "stragglers", "silence", "launch"}

# field: (old, new, classes that declare it, receivers of attributes, functions whose keyword it is ("replace": of the right first argument))
FIELDS = [
    ("told", "eviction_confirmed", [("core.state", "State")], STATE, {"replace", "State"}),
    ("heard", "library_seen", [("core.state", "State")], STATE, {"replace", "State"}),
    ("begun", "all_tasks_started", [("core.state", "State")], STATE, {"replace", "State"}),
    ("again", "requery", [("core.state", "State")], STATE, {"replace", "State"}),
    ("charged", "failure_counted", [("core.state", "State")], STATE, {"replace", "State"}),
    ("doubt", "slurm_reachability", [("core.state", "State")], STATE, {"replace", "State"}),
    ("otherwise", "fallback_plan", [("core.state", "State")], STATE, {"replace", "State"}),
    ("usual", "baseline", [("core.state", "State"), ("core.events.ours", "AttemptStarted"), ("store.journal", "Record"), ("store.journal", "Carried"),
                           ("core.effects", "TellSlowLaunch"), ("core.usual", "Slower")],
     STATE | {"event", "carried", "last", "record", "effect", "slower"},
     {"replace", "State", "AttemptStarted", "Record", "Carried", "TellSlowLaunch", "Slower", "warning", "record"}),
    ("left_out", "skipped_data", [("core.state", "State"), ("core.events.ours", "AttemptStarted"), ("store.journal", "Record"), ("store.journal", "Carried"),
                                  ("core.effects", "StartLaunch"), ("core.effects", "RollBack")],
     STATE | {"event", "carried", "last", "record", "effect", "start", "reconstruct()"},
     {"replace", "State", "AttemptStarted", "Record", "Carried", "StartLaunch", "RollBack", "record"}),
]

# (globs, old, new): identifiers that mean one thing in these files (never names that are imported)
IDENTIFIERS = [
    (("supervisor/stepkeeper/core/usual.py",), "usual", "baseline"),
    (("supervisor/stepkeeper/supervise.py", "tests/"), "witness", "evidence_buffer"),
    (("supervisor/stepkeeper/supervise.py", "supervisor/stepkeeper/commands/run.py", "tests/supervisor/", "tests/bench"), "telling", "decision_log"),
    (("supervisor/stepkeeper/supervise.py", "supervisor/stepkeeper/actions/launch.py", "tests/supervisor/", "tests/slurm_client/"), "skip_data", "skipped_data"),
    (("supervisor/stepkeeper/seeing/", "tests/seeing/", "supervisor/stepkeeper/report/", "tests/report/"), "begun", "all_tasks_started"),
    (("supervisor/stepkeeper/store/recorder.py",), "_allowances", "_limiters"),
    (("supervisor/stepkeeper/node/agent.py",), "_sight", "_sensor_health"),
    (("supervisor/stepkeeper/node/agent.py",), "_note_sight", "_note_sensor_health"),
    (("supervisor/stepkeeper/node/agent.py", "supervisor/stepkeeper/node/socket/", "supervisor/stepkeeper/node/sources.py", "supervisor/stepkeeper/node/hasten.py", "tests/node/"), "wish", "job_request"),
]

# (globs, class or None, old method, new, receivers)
METHODS = [
    ("actions.crew", "Crew", "heard", "receive", {"crew", "_crew"}),
    ("actions.standing", "Standing", "heard", "receive", {"standing", "_standing"}),
    ("actions.shares", "Shares", "heard", "receive", {"shares", "_shares"}),
    ("sources.paces", "Paces", "heard", "receive", {"paces", "_paces"}),
    ("actions.judging", "Witness", "hear", "add", {"witness"}),
]

# Serialised tags: old -> new (msgspec's `tag=`); journals of before are read by run_store/old_names.py.
TAGS = {
    "call_person": "notify_user",
    "tell_slow_node": "report_slow_node",
    "tell_slow_launch": "report_slow_launch",
    "tell_replay": "report_replay",
    "answer_ask": "answer_request",
    "stood_still": "suspended",
    "asked": "requested",
    "save_gave_up": "save_failed",
}
# Only as `tag="..."` and as the value of "event"/"effect" (the words are common ones).
COMMON_TAGS = {"asked"}

# Names of log events and keys, and words in strings, comments, docs: everywhere as whole words.
WORDS = {
    "ask_not_answered": "request_not_answered",
    "asks_unreadable": "requests_unreadable",
    "hasten_accepted": "expedite_accepted",
    "hasten_over": "expedite_over",
    "hasten_waits_for_slurm": "expedite_waits_for_slurm",
    "hastened_job_requeued": "expedited_job_requeued",
    "job_hastened": "job_expedited",
    "CallPerson": "NotifyUser",
    "TellSlowNode": "ReportSlowNode",
    "TellSlowLaunch": "ReportSlowLaunch",
    "TellReplay": "ReportReplay",
    "AnswerAsk": "AnswerRequest",
    "StoodStill": "Suspended",
    "SaveGaveUp": "SaveFailed",
}

# (file glob, regex, replacement) in text, after everything else
TEXT = [
    ("tests/core/scenarios/", r"(?m)^([\d.]+ )Asked\b", r"\1Requested"),
    ("tests/core/scenarios/", r"\bleft_out=", "skipped_data="),
    ("tests/", r'(["`])Asked(["`:])', r"\1Requested\2"),
    ("supervisor/", r'(["`])Asked(["`:])', r"\1Requested\2"),
    ("docs/", r"`Asked`", "`Requested`"),
    ("supervisor/stepkeeper/core/events/__init__.py", r"(?m)^    Asked    ", "    Requested"),
    ("supervisor/stepkeeper/core/events/__init__.py", r'"Asked"', '"Requested"'),
    ("tests/core/test_told.py", r'"left_out" in said', '"skipped_data" in said'),
    ("supervisor/stepkeeper/simulating/clockwork.py", r'"usual", "left_out"', '"baseline", "skipped_data"'),
]

TEXT += [
    ("supervisor/stepkeeper/store/journal.py", r"since the record before \(`store\.recorder`\)", "since the record before (`recorder`)"),
    ("supervisor/stepkeeper/core/events/__init__.py", r"this process and the watchers \(`actions\.crew`\)", "this process and the watchers\n                        (`actions.crew`)"),
    ("supervisor/stepkeeper/node/sensors/nvml_child.py", r"nvml_child \[--once\]", "nvml_child\n[--once]"),
]

# What old journals call otherwise: see files/old_names.py
