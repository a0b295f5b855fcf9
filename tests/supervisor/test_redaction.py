"""Secrets as they appear on command lines, in tracebacks and in URLs; and what only looks like one."""

import json
import time

import pytest

from stepkeeper.redaction import HIDDEN, redact, redact_words

SECRET = "S3cr3tValueThatNobodyMaySee42"  # noqa: S105 - what the tests look for
HEX = "0123456789abcdef0123456789abcdef01234567"
TEXTS = [
    f"WANDB_API_KEY={SECRET}",
    f"export HF_TOKEN='{SECRET}'",
    f"AWS_SECRET_ACCESS_KEY={SECRET} AWS_SESSION_TOKEN={SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"'Authorization': 'Basic {SECRET}'",
    f"authorization: token {SECRET}",
    f"curl -H 'X-Api-Key: {SECRET}'",
    f"password is wrong: password={SECRET}",
    f"PGPASSWORD={SECRET} psql",
    f'{{"api_key": "{SECRET}"}}',
    f'{{\\"token\\": \\"{SECRET}\\"}}',
    f"https://me:{SECRET}@host/path",
    f"postgresql://me:pa@{SECRET}@host:5432/db",
    f"https://{SECRET}@github.com/x.git",
    f"redis://:{SECRET}@cache:6379/0",
    f"https://host/x?sig={SECRET}&y=1",
    f"https://host/x?a=1&key={SECRET}",
    f"https://s3/x?X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}",
    f"DefaultEndpointsProtocol=https;AccountKey={SECRET};EndpointSuffix=x",
    f"train.py --hub-token {SECRET}",
    f"train.py --api-key={SECRET}",
    f"python login.py -password {SECRET}",
    f"RuntimeError: credentials: {SECRET}",
    f"hf_{SECRET}",
    f"ghp_{SECRET}",
    f"nvapi-{SECRET}",
    f"glpat-{SECRET}",
    f"xoxb-{SECRET}",
    f"wandb login --relogin {HEX}{SECRET}",
    f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET}",
    f"secret_key = {SECRET}",
    f"client_secret: {SECRET}",
]
PLAIN = [
    "tokens=4096 loss=3.2 tokens: 1.5e9, tokens_per_second: 12000",
    "tokens 1024 step_00000100 is committed",
    "max_tokens=4k/s token: 17",
    "node asia-southeast1-b lost; task-12345678 and disk-abcdefgh stay",
    f"commit {HEX} of https://github.com/a/b",
    "git@github.com:a/b.git ssh://git@host/x http://node1:29500/x",
    "rank 0 on gpu-3 ended with exit code 2",
    "KeyError: 'model.layers.0.weight' /run/checkpoints/step_00000100",
    "the key is missing: use --keyfile or ask",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "tokenizer: /data/tokenizer.json sentencepiece",
]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_secret_is_hidden(text: str) -> None:
    assert SECRET not in redact(text)
    assert HIDDEN in redact(text)


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_an_aws_key_id_is_hidden() -> None:
    assert redact("id AKIAIOSFODNN7EXAMPLE used") == f"id {HIDDEN} used"


@pytest.mark.parametrize("text", TEXTS)
def test_twice_is_once(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_line_of_json_stays_one(text: str) -> None:
    """Lines of the log and the journal are redacted field by field; a whole line must survive it as well."""
    assert SECRET not in json.dumps(json.loads(redact(json.dumps({"why": text, "next": 1}))))


def test_a_value_that_is_a_word_of_its_own_is_hidden() -> None:
    line = ["python", "t.py", "--wandb-api-key", SECRET, "--hub_token", SECRET, "-password", SECRET, "--steps", "500"]

    shown = redact_words(line)

    assert SECRET not in " ".join(shown)
    assert shown[-2:] == ["--steps", "500"]
    assert redact_words(["--max-tokens", "4096", "--token", "--fast"]) == ["--max-tokens", "4096", "--token", "--fast"]


@pytest.mark.parametrize(
    "piece", ["token", "://a:", "secret_", "--token ", "bearer ", "eyJ", "a@", "key=", "wandb login --x "]
)
def test_a_long_line_takes_no_long_time(piece: str) -> None:
    """A rank prints what it likes; the supervisor must not be busy with it for seconds."""
    text = piece * (100_000 // len(piece))
    _assert_quick(text)


@pytest.mark.parametrize(
    "text", ["--" + "token" * 20_000, "eyJ-" * 25_000, "token" + "\\" * 100_000, "://" + "a" * 100_000]
)
def test_a_long_word_takes_no_long_time(text: str) -> None:
    _assert_quick(text)


def _assert_quick(text: str) -> None:
    times = []
    for part in (text[: len(text) // 4], text):
        began = time.thread_time()  # other threads' work is not ours
        redact(part)
        times.append(time.thread_time() - began)

    assert times[1] < max(16 * times[0], 1.0), "worse than linear by far"
