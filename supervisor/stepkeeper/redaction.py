"""What looks like a token, key or password is never written: logs and journals are read by others."""

from __future__ import annotations

import re

_SECRETS = re.compile(
    r"""
    (?P<name>(?:api[_-]?key|access[_-]?key|secret|token|passw(?:or)?d|authorization|credential)s?["']?\s*[=:]\s*["']?
        (?:bearer\s+|basic\s+)?)[^\s"',;&]{4,}
    | (?P<bearer>bearer\s+)[A-Za-z0-9._~+/=-]{8,}
    | (?P<url>://[^\s/:@]+:)[^\s/@]+(?=@)
    | \b(?:sk-|hf_|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA|wandb_v1_)[A-Za-z0-9_-]{8,}
    """,
    re.IGNORECASE | re.VERBOSE,
)


def redact(text: str) -> str:
    """Return the text with secrets replaced.

    >>> redact("WANDB_API_KEY=0123456789abcdef https://me:pw1234@host/x sk-abcdefgh123")
    'WANDB_API_KEY=*** https://me:***@host/x ***'
    >>> redact("tokens 1024 step_00000100 is committed")
    'tokens 1024 step_00000100 is committed'
    """
    return _SECRETS.sub(lambda m: (m.group("name") or m.group("bearer") or m.group("url") or "") + "***", text)
