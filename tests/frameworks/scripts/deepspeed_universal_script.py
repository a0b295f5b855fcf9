"""The script with DeepSpeed, whose configuration loads a Universal Checkpoint."""

import deepspeed

plain = deepspeed.initialize


def with_universal(**arguments: object) -> object:
    arguments["config"]["checkpoint"] = {"load_universal": True}  # type: ignore[index]
    return plain(**arguments)


deepspeed.initialize = with_universal
import deepspeed_script  # noqa: E402, F401 - it trains
