"""A tier in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure.  The door to `obstore`.

Below the tier's URL each step has a folder, `step_00000100.<first 8 of its save_id>`, with the very files of the
step directory, so that any tool that copies the folder gets a step directory.  An object appears when it is sent in
full; the manifest is sent last, and without it a folder is no step.  With `zstd_level`, files are stored as `.zst`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import from_url

from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, FileEntry, ManifestError, parse_step_name, step_name
from stepkeeper_trainer.formats.reading import never
from stepkeeper_trainer.tiers.tier import DamagedCopyError, Held, Staging, TierError, check_file

PART_BYTES = 16 * 1024 * 1024  # of a large object: sent, and sent again after an error, on its own
PARTS_AT_ONCE = 4
REQUEST_WITHIN = timedelta(seconds=120)
RETRY_WITHIN = timedelta(seconds=180)
RETRIES_MAX = 8
_COMPRESSED = ".zst"


class ObjectTier:
    """The steps below a URL."""

    def __init__(self, url: str, *, zstd_level: int | None = None, read_back: bool = True, **config: Any) -> None:
        """Connect to nothing yet.

        Args:
            url: such as `s3://bucket/runs/my-run`, `gs://...`, `az://...`.
            zstd_level: compress files, for a cold tier; None leaves them as they are.
            read_back: read what was sent before it counts.
            config: for the store, as obstore names it; it finds credentials in the environment by itself.

        Raises:
            TierError: the URL, an option or the credentials make no sense.
        """
        self._url, self.zstd_level, self.read_back = url, zstd_level, read_back
        client: Any = {"timeout": REQUEST_WITHIN, **_from_environment(), **config.pop("client_options", {})}
        retry: Any = {"max_retries": RETRIES_MAX, "retry_timeout": RETRY_WITHIN, **config.pop("retry_config", {})}
        with _named_errors(url):
            self.store: Any = from_url(url, **{"client_options": client, "retry_config": retry, **config})

    @property
    def name(self) -> str:
        """The URL."""
        return self._url

    def steps(self) -> list[Held]:
        """Return the committed steps, newest first.  Raises TierError."""
        found = []
        for directory in self._directories():
            with _named_errors(self.name), _maybe(), suppress(ManifestError):  # on its way, or damaged: no step
                found.append(self.held(directory))
        return sorted(found, key=lambda held: (held.manifest.step, held.manifest.created_at), reverse=True)

    def held(self, directory: str) -> Held:
        """Return one step.  Raises ManifestError, or what obstore raises."""
        key = f"{directory}/{MANIFEST_NAME}"
        return Held.read(directory, bytes(obstore.get(self.store, key).bytes()), source=f"{self.name}/{key}")

    def _directories(self) -> list[str]:
        with _named_errors(self.name):
            prefixes = obstore.list_with_delimiter(self.store)["common_prefixes"]
        return [name for name in (prefix.rstrip("/") for prefix in prefixes) if parse_step_name(name) is not None]

    def problems(self, held: Held, *, deep: bool) -> list[str]:
        """Say what is wrong with a step: the first thing only, if `deep`."""
        lacking = [
            f"{self.name}/{held.directory}/{name}: missing, or of another size"
            for name, entry in held.manifest.files.items()
            if not self.has_file(held, name, entry)
        ]
        if lacking or not deep:
            return lacking
        try:
            self.check(held)
        except DamagedCopyError as error:
            return [str(error)]
        return []

    def check(self, held: Held) -> None:
        """Read every byte of a step.  Raises DamagedCopyError or TierError."""
        for name, entry in held.manifest.files.items():
            check_file(self, held, name, entry, never)

    def has_file(self, held: Held, name: str, entry: FileEntry) -> bool:
        """Whether a file of a step is there.  Raises TierError."""
        return self.find(held.directory, name, entry) is not None

    def find(self, directory: str, name: str, entry: FileEntry) -> str | None:
        """Return the key under which a file is stored in full.  Raises TierError."""
        with _named_errors(self.name):
            for suffix in ("", _COMPRESSED):
                with _maybe():
                    size = obstore.head(self.store, f"{directory}/{name}{suffix}")["size"]
                    if suffix or size == entry.bytes:
                        return f"{directory}/{name}{suffix}"
        return None

    def chunks(self, held: Held, name: str, entry: FileEntry, first: int) -> Iterator[bytes]:
        """Yield the chunks of a file.  Raises TierError."""
        key = self.find(held.directory, name, entry)
        if key is None:
            raise TierError(f"{self.name}/{held.directory}/{name}: not there")
        start = first * entry.chunk_bytes
        if start >= entry.bytes:
            return
        compressed = key.endswith(_COMPRESSED)
        with _named_errors(self.name):
            options: Any = {} if compressed or not start else {"range": {"offset": start}}
            stream: Iterator[bytes] = map(bytes, obstore.get(self.store, key, options=options).stream(PART_BYTES))
            if compressed:
                stream = _decompressed(stream, f"{self.name}/{key}")
            chunks = _regrouped(stream, entry.chunk_bytes)
            for index, chunk in enumerate(chunks):
                if not compressed or index >= first:
                    yield chunk

    def remove(self, held: Held) -> None:
        """Remove a step: its manifest first, so that it is none at once.  Raises TierError."""
        for name in (MANIFEST_NAME, *held.manifest.files):
            self.remove_file(held.directory, name)

    def remove_file(self, directory: str, name: str) -> None:
        """Remove one file of a step, under either name.  Raises TierError."""
        for suffix in ("", _COMPRESSED):
            with _named_errors(self.name), _maybe():
                obstore.delete(self.store, f"{directory}/{name}{suffix}")

    def sweep(self, steps: Sequence[Held]) -> list[str]:
        """Remove what is left of steps older than the newest of `steps` that are none of them."""
        whole = {held.directory for held in steps}
        removed = []
        for directory in self._directories() if steps else []:
            number = parse_step_name(directory)
            if directory in whole or number is None or number >= steps[0].manifest.step:
                continue
            with _named_errors(self.name):
                keys = [str(found["path"]) for batch in obstore.list(self.store, f"{directory}/") for found in batch]
                if any(key.endswith(f"/{MANIFEST_NAME}") for key in keys):
                    continue  # damaged, or not to be read now: somebody should look at it
                obstore.delete(self.store, keys)
            removed.append(directory)
        return removed

    def staging(self, held: Held, *, despite: Collection[str] = ()) -> Staging:
        """Begin to take in a step, or go on: files that were sent in full are not sent again."""
        directory = f"{step_name(held.manifest.step)}.{held.manifest.save_id[:8]}"
        if directory in despite:
            raise TierError(f"{self.name}/{directory}: is there already, and damaged: remove it")
        return _ObjectStaging(self, held, directory)


class _ObjectStaging:
    def __init__(self, tier: ObjectTier, held: Held, directory: str) -> None:
        self._tier, self._held, self._directory = tier, held, directory
        self._done: set[str] = set()

    def done(self, name: str, entry: FileEntry) -> bool:
        if name not in self._done and self._tier.find(self._directory, name, entry) is not None:
            self._done.add(name)
        return name in self._done

    def present(self, _name: str, _entry: FileEntry) -> int:
        return 0  # an object is there in full or not at all

    def write(self, name: str, _entry: FileEntry, first: int, chunks: Iterator[bytes]) -> None:
        assert first == 0, "objects are written from their begin"
        tier, key = self._tier, f"{self._directory}/{name}"
        pieces = chunks
        if tier.zstd_level is not None:
            key += _COMPRESSED
            pieces = map(_compressor(tier.zstd_level), chunks)
        source = _Remembering(pieces)
        try:
            with _named_errors(tier.name):  # an iterator that raises ends the upload: nothing of it becomes an object
                obstore.put(
                    tier.store,
                    key,
                    source,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                    use_multipart=True,
                )
        except TierError:
            if source.error is not None:
                raise source.error from None
            raise
        self._done.add(name)

    def missing(self) -> list[str]:
        return [name for name, entry in self._held.manifest.files.items() if not self.done(name, entry)]

    def check(self, name: str, entry: FileEntry, should_stop: Callable[[], bool]) -> None:
        held = Held(self._directory, self._held.manifest, self._held.raw)
        try:
            check_file(self._tier, held, name, entry, should_stop)
        except DamagedCopyError:
            self._done.discard(name)
            self._tier.remove_file(self._directory, name)
            raise

    def commit(self) -> str:
        tier = self._tier
        key = f"{self._directory}/{MANIFEST_NAME}"
        self._done.clear()  # whatever was seen before, the store has the word
        if missing := self.missing():
            raise TierError(f"{tier.name}/{self._directory}: {len(missing)} files are missing, such as {missing[0]}")
        with _named_errors(tier.name), _maybe():
            if bytes(obstore.get(tier.store, key).bytes()) == self._held.raw:
                return self._directory
        if tier.read_back:
            try:
                tier.check(Held(self._directory, self._held.manifest, self._held.raw))
            except DamagedCopyError:
                self._remove()
                raise
        with _named_errors(tier.name):
            obstore.put(tier.store, key, self._held.raw)
        return self._directory

    def _remove(self) -> None:
        """Remove what reads back otherwise, so that the next try sends all of it again."""
        for name in self._held.manifest.files:
            self._tier.remove_file(self._directory, name)


class _Remembering:
    """An iterator that keeps the error which ended it: the library would tell of it in its own words."""

    def __init__(self, inner: Iterator[bytes]) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._inner)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise


def _from_environment() -> dict[str, Any]:
    """Return what the stores' own variables say of the connection: options given at the call would hide it."""
    names = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
    allowed = any(os.environ.get(name, "").lower() in {"1", "true", "yes", "on"} for name in names)
    return {"allow_http": True} if allowed else {}


@contextmanager
def _named_errors(where: str) -> Iterator[None]:
    """Turn the store's errors into ours."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise TierError(f"{where}: {_line(error)}") from error


@contextmanager
def _maybe() -> Iterator[None]:
    """Go on where an object is not there."""
    with suppress(NotFoundError, FileNotFoundError):  # the library uses either
        yield


def _line(error: Exception) -> str:
    """Return what an error says, on one line: the library prints its inner parts too."""
    return " ".join(str(error).partition("Debug source")[0].split())[:400] or type(error).__name__


def _regrouped(stream: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Yield the same bytes in pieces of `size`; the last may be shorter."""
    waiting = bytearray()
    for part in stream:
        waiting += part
        while len(waiting) >= size:
            yield bytes(waiting[:size])
            del waiting[:size]
    if waiting:
        yield bytes(waiting)


def _compressor(level: int) -> Callable[[bytes], bytes]:
    zstandard = _zstandard()
    return lambda chunk: bytes(zstandard.ZstdCompressor(level=level, write_checksum=True).compress(chunk))


def _decompressed(stream: Iterator[bytes], where: str) -> Iterator[bytes]:
    zstandard = _zstandard()
    decompressor = None
    try:
        for part in stream:
            rest = part
            while rest:
                decompressor = decompressor or zstandard.ZstdDecompressor().decompressobj()
                yield decompressor.decompress(rest)
                rest = decompressor.unused_data
                if decompressor.eof:
                    decompressor = None
    except zstandard.ZstdError as error:
        raise DamagedCopyError(f"{where}: cannot be decompressed: {error}") from error


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415 - for compressed tiers only
    except ImportError as error:
        raise TierError("files are compressed: pip install 'stepkeeper[zstd]'") from error
    return zstandard
