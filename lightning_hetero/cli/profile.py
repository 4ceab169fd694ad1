"""``lightning-hetero profile``: measures this machine, or shows the cached profile."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from lightning_hetero.cli.output import console, count, print_json, table, working, write_text
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.units import format_bytes


def run(path: Path | None, *, out: Path | None, refresh: bool, device: str | None, as_json: bool) -> None:
    """Measures, prints, and writes the profile to ``out``.

    Args:
        path: A directory on the disk to measure; ``None``: the working directory, if it can be a
            disk tier.
        out: A file for the profile, beside the cache.
        refresh: Measure even if there is a cached profile.
        device: ``"cpu"`` or the kind of an accelerator; ``None``: the accelerator if there is one.
        as_json: Print the profile's JSON.

    Raises:
        ConfigError: ``path`` is no directory, there is no such device, or ``out`` cannot be
            written.
        StoreError: The disk failed.
    """
    from lightning_hetero.profiling.hardware import measure

    with working("measuring this machine"):
        profile = measure(path=path, refresh=refresh, device=device)
    if out is not None:
        write_text(out, profile.to_json())
    if as_json:
        print_json(profile)
        return
    screen = console()
    screen.print(table(profile.name, ("figure", "value", "source"), rows(profile), right=("value",)))
    if "noise" in profile.source:
        screen.print(f"While it was measured: {profile.source['noise']}.", markup=False)
    if out is not None:
        screen.print(f"Wrote the profile to {out}.", markup=False)


def rows(profile: HardwareProfile) -> list[tuple[str, str, str]]:
    """Each figure with its unit and its source."""
    out = []
    for f in fields(profile):
        if f.name in ("name", "contention", "source"):
            continue
        name = f.name
        for suffix in ("_bytes_per_s", "_params_per_s", "_flop_per_s", "_bytes"):
            name = name.removesuffix(suffix)
        text = _text(f.name, getattr(profile, f.name))
        out.append((name.replace("_", " "), text, profile.source.get(f.name, "")))
    for pair, factor in sorted(profile.contention.items()):
        work, beside = pair.split("|")
        source = profile.source.get(f"contention.{pair}", profile.source.get("contention", ""))
        out.append((f"{work} beside {beside}", f"{factor:.2f} x as long", source))
    return out


def _text(key: str, value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_per_s") and not value:
        return "none"
    if key.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if key.endswith("_bytes"):
        return format_bytes(value)
    if not key.endswith("_per_s"):
        return f"{value:g}"
    unit = key.split("_")[-3]
    return count(value, f"{'FLOP' if unit == 'flop' else unit}/s")
