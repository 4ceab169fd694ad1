"""Errors for plans that need too much memory: what, where, how much, and a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_hetero.errors import OutOfMemoryBudgetError, PlanError
from lightning_hetero.lowering.needs import Purpose, Rows, total_bytes
from lightning_hetero.units import format_bytes, size_option

_SMALLER_BATCH = "use a smaller batch"
_REMEDIES = {  # cheapest first
    ("device", Purpose.CACHE): "a smaller device_cache_bytes",
    ("device", Purpose.GRADIENTS): "update during backward (no clipping by norm, one micro-batch)",
    ("device", Purpose.MOVING): "update the largest blocks on the 'cpu'",
    ("device", Purpose.BUCKETS): "a smaller bucket_cap_mb",
    ("device", Purpose.STATE): "place state on 'host', with updates on the 'cpu'",
    ("device", Purpose.WEIGHTS): "place weights on 'host'",
    ("device", Purpose.ACTIVATIONS): f"recompute or swap more of what forward saves (saved), or {_SMALLER_BATCH}",
    ("host", Purpose.CACHE): "a smaller host_cache_bytes",
    ("host", Purpose.GRADIENTS): "a smaller gradient_depth, or update during backward (no clipping by norm, one micro-batch)",
    ("host", Purpose.ACTIVATIONS): f"recompute more of what forward saves (saved), or {_SMALLER_BATCH}",
    ("host", Purpose.STATE): "place state on 'disk'",
    ("host", Purpose.WEIGHTS): "place weights on 'disk'",
    ("host", Purpose.RANKS): "a smaller prefetch_depth, or smaller blocks (block_cls)",
    ("disk", Purpose.MIRRORS): 'keep no steps (durability="none")',
    ("disk", Purpose.ACTIVATIONS): "swap activations to the host, or recompute them (saved)",
    ("disk", Purpose.WEIGHTS): "place weights on 'host'",
    ("disk", Purpose.STATE): "place state on 'host'",
}


_MOVED_TO_DISK = {Purpose.WEIGHTS, Purpose.STATE}  # where the host or the disk itself is too small
_NO_DISK = "add a disk, of which the machine has none (--disk NAME on the command line), or raise host memory"


def plan_error(
    plan: str,
    tier: str,
    rows: Rows,
    *,
    machine: str,
    capacity_bytes: int,
    shared_memory: bool,
    has_disk: bool,
    spare: Mapping[Purpose, int],
) -> PlanError:
    """Names the shortfall, and the cheapest remedy that is large enough.

    Args:
        plan: The plan's name.
        tier: ``"device"``, ``"host"`` or ``"disk"``.
        rows: What it needs there.
        machine: The machine's name.
        capacity_bytes: What the machine has there.
        shared_memory: The device is the host's own CPU.
        has_disk: The machine has a disk tier.
        spare: By how much what is needed for a purpose can shrink, where that is less than all.
    """
    rows = {purpose: size for purpose, size in rows.items() if size}
    short = total_bytes(rows) - capacity_bytes
    remedies = {purpose: text for (name, purpose), text in _REMEDIES.items() if name == tier and purpose in rows}
    if shared_memory and Purpose.ACTIVATIONS in remedies:
        remedies[Purpose.ACTIVATIONS] = _SMALLER_BATCH
    if not has_disk:
        remedies |= dict.fromkeys(_MOVED_TO_DISK & remedies.keys(), _NO_DISK) if tier != "device" else {}
    helps = [text for purpose, text in remedies.items() if spare.get(purpose, rows[purpose]) >= short]
    largest = remedies.get(max(rows, key=lambda purpose: rows[purpose]), f"more {tier} memory")
    return PlanError(
        f"plan {plan!r} needs {format_bytes(total_bytes(rows))} of {tier} memory; {machine!r} has "
        f"{format_bytes(capacity_bytes)}, {format_bytes(short)} too little: "
        f"{', '.join(f'{purpose} {format_bytes(size)}' for purpose, size in rows.items())}. "
        f"Cheapest remedy: {(*helps, largest)[0]}.",
        tier=tier,
        shortfall_bytes=short,
    )


_KNOBS = {
    Purpose.CONSTANT: "double quantization: these are the scales of quantized weights",
    Purpose.WEIGHTS: 'weights on "disk" (plan="disk")',
    Purpose.STATE: 'state on "disk" (plan="disk")',
    Purpose.ACTIVATIONS: "a smaller batch",
    Purpose.GRADIENTS: "gradient_depth; no clipping by norm, no accumulation",
    Purpose.BUCKETS: "a smaller bucket_cap_mb",
    Purpose.STAGING: "blocks of fewer than 262,144 parameters (block_cls)",
    Purpose.CACHE: "smaller blocks (block_cls), host_cache_bytes",
    Purpose.READING: "layers made in bfloat16: one is read in its dtype, twice, and quantized",
}
_KNOBS_OF_DISK = {  # what still lives in memory under plan "disk" has to
    Purpose.WEIGHTS: "fewer weights outside repeated blocks (block_cls); these stay in memory",
    Purpose.STATE: "fewer weights outside repeated blocks (block_cls)",
}


_MOVED = (Purpose.WEIGHTS, Purpose.STATE, Purpose.MOVING)  # what can be on another tier


def too_small(
    plan: str, rows: Rows, *, host_memory: int, given: bool, profiled: bool, less_on_disk: bool, ranks: int = 1
) -> OutOfMemoryBudgetError:
    """A budget of host memory that is too small, with a table of what is needed.

    Args:
        plan: The plan's name.
        rows: What it needs, by purpose.
        host_memory: The budget in bytes.
        given: It is the user's; else what the machine has free.
        profiled: Activations are known.
        less_on_disk: Plan "disk" would run here, and needs less.
        ranks: Ranks that share the model, of which these are one's figures; the option is for all.
    """
    need = total_bytes(rows)
    size = format_bytes(host_memory)
    allowed = f"host_memory allows {size}" if given else f"{size} are free beside a reserve for the process and a batch"
    remedy = "Free memory, or set host_memory (then nothing is held back)"
    if given:
        remedy = f'Raise host_memory to "{size_option(need * ranks)}"' + (f", for {ranks} devices together" if ranks > 1 else "")
    lines = [("what", "where", "how much", "less with")]
    knobs = dict(_KNOBS | _KNOBS_OF_DISK if plan == "disk" else _KNOBS)
    if plan != "disk" and not less_on_disk:
        knobs = {purpose: text for purpose, text in knobs.items() if purpose not in _MOVED}
    lines += [(p.value, "host", format_bytes(size), knobs.get(p, "")) for p, size in rows.items() if size]
    if given:
        lines.append((Purpose.ACTIVATIONS.value, "host", "on top", _KNOBS[Purpose.ACTIVATIONS]))
    elif not profiled:
        lines.append((Purpose.ACTIVATIONS.value, "host", "unknown", f"{_KNOBS[Purpose.ACTIVATIONS]}; known once a batch has run"))
    return OutOfMemoryBudgetError(
        f"plan {plan!r} needs {format_bytes(need)} of host memory; {allowed}, {format_bytes(need - host_memory)} too little:\n"
        f"{_table(lines)}\n"
        f"{remedy}, or need less of something in the table.",
        needed_bytes=need,
    )


def device_too_small(plan: str, rows: Rows, *, device_memory: int, profiled: bool, tied_to_device: bool) -> OutOfMemoryBudgetError:
    """A device whose memory is too small, with a table of what is needed there.

    Args:
        plan: The plan's name.
        rows: What it needs, by purpose.
        device_memory: What the device has for it, in bytes.
        profiled: Activations are known.
        tied_to_device: An optimizer runs by its own code, and finds weights and state only on the
            device.
    """
    need = total_bytes(rows)
    lines = [("what", "where", "how much", "less with")]
    knobs = {purpose: text for (tier, purpose), text in _REMEDIES.items() if tier == "device"}
    if tied_to_device:
        knobs |= dict.fromkeys(_MOVED, "torch.optim.Adam or AdamW, whose weights and state may be elsewhere")
    lines += [(p.value, "device", format_bytes(size), knobs.get(p, "")) for p, size in rows.items() if size]
    if not profiled:
        knob = _REMEDIES["device", Purpose.ACTIVATIONS]
        lines.append((Purpose.ACTIVATIONS.value, "device", "unknown", f"{knob}; known once a batch has run"))
    return OutOfMemoryBudgetError(
        f"plan {plan!r} needs {format_bytes(need)} of device memory; {format_bytes(device_memory)} may be used, "
        f"{format_bytes(need - device_memory)} too little:\n"
        f"{_table(lines)}\n"
        f"Raise device_memory where the device has more, or need less of something in the table.",
        needed_bytes=need,
        tier="device",
    )


def _table(lines: Sequence[tuple[str, str, str, str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in lines)
