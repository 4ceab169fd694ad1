"""The cache of this machine's measured profile, keyed by a fingerprint of the machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.codec import check_format, check_keys, number, parse_object
from lightning_hetero.ir.hardware import HardwareProfile

FORMAT = "lightning-hetero-measurement"
VERSION = 3
STALE_S = 30 * 24 * 3600.0  # a machine changes over time: other drives, other neighbours
BUSY_STALE_S = 3600.0  # other work was running: the rates soon change

Fingerprint = Mapping[str, str | int]

log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/lightning-hetero``, by default under ``~/.cache``.

    Source: XDG Base Directory Specification 0.8; it ignores a path that is not absolute.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lightning-hetero"


def cache_file(fingerprint: Fingerprint) -> Path:
    """The file for one machine in its current state; another kernel or version has another file."""
    key = hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory() / f"hardware-{key}.json"


def load(fingerprint: Fingerprint) -> HardwareProfile | None:
    """The cached profile of this machine, if there is one that is still valid."""
    path = cache_file(fingerprint)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    try:
        data = parse_object(text, what="measurement", source=str(path))
        check_format(data, FORMAT, VERSION, what="measurement", source=str(path))
        check_keys(data, required=("measured_s", "busy", "fingerprint", "profile"), optional=(), where=str(path))
        age_s = time.time() - number(data["measured_s"], key="measured_s", where=str(path))
        if not isinstance(data["busy"], bool):
            raise ConfigError(f"{path}: busy={data['busy']!r}; allowed: true, false.")
        if data["fingerprint"] != dict(fingerprint) or not 0 <= age_s < (BUSY_STALE_S if data["busy"] else STALE_S):
            return None
        return HardwareProfile.from_json(json.dumps(data["profile"]), source=str(path))
    except ConfigError as error:
        log.info("measuring again: %s", error)
        return None


def save(fingerprint: Fingerprint, profile: HardwareProfile, *, busy: bool = False) -> None:
    """Keeps a profile. If the cache cannot be written, the next run measures again.

    Args:
        fingerprint: The machine's fingerprint.
        profile: The measured profile.
        busy: Whether the machine was busy meanwhile: the profile is then valid for an hour instead
            of a month.
    """
    data = {
        "format": FORMAT,
        "version": VERSION,
        "measured_s": time.time(),
        "busy": busy,
        "fingerprint": dict(fingerprint),
        "profile": json.loads(profile.to_json()),
    }
    path = cache_file(fingerprint)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
        os.replace(name, path)
    except OSError as error:
        log.info("the profile of this machine is not kept: %s", error)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Waits until no other process of this user measures: two at once would disturb each other."""
    try:
        cache_directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(cache_directory() / "measuring", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
