"""What looks like a token, key or password is never written: logs and journals are read by others."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAMES = (
    r"(?:api|access|account|private|signing|encryption|shared)[_-]?key|secret|passw(?:or)?d|passphrase"
    r"|authorization|credential|x-amz-signature"
)
_TOK = r"token(?!i[sz])"  # a tokenizer is none
_COUNT = r"(?!-?[\d.,_]+(?:e[+-]?\d+)?[kmbgt]?(?:[\s\"',;&/)\]}]|$))"  # tokens=4096 is no secret
_SECRETS = re.compile(
    rf"""
    (?P<name>(?:{_NAMES})\w{{0,40}}\\*["']?\s{{0,9}}[=:]>?\s{{0,9}}\\*["']?(?:(?:bearer|basic|token)\s{{1,9}})?)
        (?!(?:bearer|basic|token)\s|\*\*\*)[^\s"',;&\\]{{4,}}
    | (?P<token>tokens?\\*["']?\s{{0,9}}[=:]\s{{0,9}}\\*["']?){_COUNT}[^\s"',;&\\]{{4,}}
    | (?P<option>(?:^|(?<=\s))--?[\w-]{{0,40}}(?:{_NAMES}|{_TOK})[\w-]{{0,40}}\s{{1,9}}["']?)
        (?![\s"']|--){_COUNT}[^\s"',;&\\]{{4,}}
    | (?P<bearer>bearer\s+)[A-Za-z0-9._~+/=-]{{8,}}
    | (?P<login>wandb\s+login\s+(?:--\S+\s+)*)[0-9a-z_]{{20,}}
    | (?P<url>://[^\s/:@"']*:)[^\s/"']+(?=@)
    | (?P<user>://)[^\s/:@"']{{20,}}(?=@)
    | (?P<query>[?&](?:sig|signature|key|code)=)[^\s"',;&\\]{{8,}}
    | \b(?:sk-|hf_|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|wandb_v1_|nvapi-|npm_|pypi-)[A-Za-z0-9_-]{{8,}}
    | \b(?-i:AKIA|ASIA)(?-i:[A-Z0-9]{{12,}})
    | \b(?-i:AIza)[A-Za-z0-9_-]{{30,}}
    | \b(?-i:eyJ)[A-Za-z0-9_-]{{10,500}}\.[A-Za-z0-9_-]{{10,}}(?:\.[A-Za-z0-9_-]*)?
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SECRET_OPTION = re.compile(rf"--?[\w-]*(?:{_NAMES}|{_TOK})[\w-]*", re.IGNORECASE)
_A_COUNT = re.compile(rf"(?!{_COUNT}).*", re.IGNORECASE)
HIDDEN = "***"


def redact(text: str) -> str:
    """Return the text with secrets replaced.

    >>> redact("WANDB_API_KEY=0123456789abcdef https://me:pw1234@host/x sk-abcdefgh123")
    'WANDB_API_KEY=*** https://me:***@host/x ***'
    >>> redact("tokens 1024 step_00000100 is committed")
    'tokens 1024 step_00000100 is committed'
    """
    return _SECRETS.sub(lambda m: (m.group(m.lastgroup) if m.lastgroup else "") + HIDDEN, text)


def redact_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with secrets replaced, also where the value is a word of its own.

    >>> redact_words(["train.py", "--hub-token", "abcd", "--max-tokens", "4096", "--tokenizer", "gpt2"])
    ['train.py', '--hub-token', '***', '--max-tokens', '4096', '--tokenizer', 'gpt2']
    """
    shown: list[str] = []
    hide = False
    for word in words:
        is_value = hide and not word.startswith("-") and not _A_COUNT.fullmatch(word)
        shown.append(HIDDEN if is_value else redact(word))
        hide = _SECRET_OPTION.fullmatch(word) is not None
    return shown
