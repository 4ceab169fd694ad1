"""Adapters as PEFT makes them: which modules get one, and what it adds to them.

PEFT makes the adapters of 16-bit weights in fp32 (``autocast_adapter_dtype``), so each of them also
keeps an fp32 copy of its input.

[Note: Experts in one tensor]
transformers 5 holds all experts of a layer in two tensors, which were linear layers before. PEFT
translates the earlier names (:data:`EXPERTS`): each expert of such a tensor gets an adapter, of
twice the rank where gate and up are one tensor. Linear layers of the same name, such as those of a
shared expert, then get none. In a forward the tensor and the products of its adapters are added up.
The sum is a tensor as large as the experts, and its gradient is computed in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.profiling.presets.rows import Kind, Layout, Module

ITEMSIZE = 4
EXPERTS: dict[str, dict[str, str]] = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen2_moe": {"gate": "gate.weight", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"},
}
"""What PEFT targets instead of names of earlier versions, by family.

Source: PEFT 0.21, ``utils/transformers_weight_conversion.py``.
"""
_ALL = "all-linear"
_SUFFIX = "_proj"
_EXAMPLE = "such as 'r=16,targets=q,v'"
_LISTS = ("targets", "modules_to_save", "rank_pattern", "alpha_pattern")
_ALLOWED = f"r=N,targets=NAME,..., dora=true, modules_to_save=NAME,..., rank_pattern=NAME:N,..., {_EXAMPLE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters on some modules of a frozen model.

    Attributes:
        rank: ``r``.
        targets: Names of modules, as PEFT's ``target_modules`` takes them: the end of the module's
            name; or ``"all-linear"``. ``"q"`` stands for ``"q_proj"`` in models that have no
            ``"q"``.
        dora: Whether each adapter has a vector of magnitudes too.
        saved: Ends of the names of modules that train as a whole, PEFT's ``modules_to_save``: each
            has a copy that trains beside the frozen one, and no adapter.
        pattern: Names, or regular expressions that end them, and ranks of their own, as PEFT's
            ``rank_pattern``. The first that fits counts.
    """

    rank: int
    targets: tuple[str, ...]
    dora: bool = False
    saved: tuple[str, ...] = ()
    pattern: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Reads ``"r=16,targets=q,v"``, with other settings of PEFT perhaps.

        What follows a list's first name without a key are further names of it. An
        ``alpha_pattern`` changes no size.

        Raises:
            ConfigError: A key is unknown or missing, or a rank is no positive whole number.
        """
        lists: dict[str, list[str]] = {name: [] for name in _LISTS}
        single: dict[str, str] = {}
        key = ""
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = (p.strip() for p in part.partition("="))
            if not equals:
                name, value = key, name
            key = name
            if name in lists:
                lists[name].append(value)
            elif name in ("r", "dora") and name not in single:
                single[name] = value
            else:
                hint = did_you_mean(name, ["r", "dora", *_LISTS])
                raise ConfigError(f"--lora {text!r}: {part!r} is not understood; allowed: {_ALLOWED}.{hint}")
        if single.get("dora", "false") not in ("true", "false"):
            raise ConfigError(f"--lora {text!r}: dora={single['dora']}; allowed: true, false.")
        pattern = tuple((name, _rank(text, rank)) for name, _, rank in (p.rpartition(":") for p in lists["rank_pattern"]))
        targets = tuple(lists["targets"])
        if not targets or not all((*targets, *lists["modules_to_save"], *(name for name, _ in pattern))):
            raise ConfigError(f"--lora {text!r} names nothing; allowed: {_ALLOWED}.")
        return cls(
            rank=_rank(text, single.get("r", "")), targets=targets, dora=single.get("dora") == "true",
            saved=tuple(lists["modules_to_save"]), pattern=pattern,
        )  # fmt: skip

    def adapted(self, layout: Layout) -> dict[str, int]:
        """Names of the modules that get an adapter, and its rank.

        Args:
            layout: The model.

        Raises:
            ConfigError: A target names no module, or one that takes no adapter.
        """
        earlier = EXPERTS.get(layout.experts, {})
        names = {name for target in self.targets for name in _names(target, layout, earlier)}
        taking = {m.name for name in names - set(earlier) for m in _taking(name, layout) if not self.saves(m)}
        ranks = {name: self._rank_of(name) for name in taking}
        for pattern, _ in self.pattern:
            if not any(_ends(pattern, name) for name in taking):
                raise ConfigError(f"--lora: rank_pattern {pattern!r} fits no linear layer or embedding that has an adapter.")
        for new, old in _fused(earlier).items():
            given = old & names
            if given and given != old:
                raise ConfigError(
                    f"--lora: {', '.join(sorted(given))} without {', '.join(sorted(old - given))}: the experts of this model have "
                    f"them in one tensor, so PEFT adapts all of these or none. Give all of them."
                )
            found = [m for m in layout.modules if is_tensor(m) and _holds(m, new)] if given else []
            if found and self.dora:
                raise ConfigError(
                    f"--dora: {', '.join(sorted(given))} are experts in one tensor, on which PEFT makes no DoRA. Name other "
                    f"targets."
                )
            ranks |= {m.name: self.rank * len(old) for m in found}
        return ranks

    def saves(self, module: Module) -> bool:
        """Whether a module, or one that it is in, trains as a whole."""
        parts = module.name.split(".")
        around = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
        return bool(self.saved) and any(name.endswith(self.saved) for name in around)

    def check_saved(self, layout: Layout) -> None:
        """Refuses names in ``saved`` that no module with weights has.

        Raises:
            ConfigError: There is none.
        """
        for name in self.saved:
            if not any(Lora(rank=1, targets=(), saved=(name,)).saves(m) for m in layout.modules):
                known = sorted({m.name.rsplit(".", 1)[-1] for m in layout.modules})
                raise ConfigError(
                    f"--lora: modules_to_save={name}: the model has no such module.{did_you_mean(name, known)} "
                    f"It has {', '.join(known)}."
                )

    def _rank_of(self, name: str) -> int:
        return next((rank for pattern, rank in self.pattern if _ends(pattern, name)), self.rank)

    def params(self, module: Module, rank: int) -> int:
        """Elements that an adapter adds to a module, all of them trained."""
        magnitudes = module.outputs if self.dora else 0
        return rank * module.copies * (module.inputs + module.outputs) + magnitudes

    def flop(self, module: Module, rank: int) -> int:
        """FLOP of one token of forward; backward has twice as many."""
        if is_tensor(module):
            return 0
        inputs = 0 if module.kind is Kind.EMBEDDING else module.inputs
        return 2 * rank * (inputs + module.outputs)

    def sum_flop(self, module: Module, rank: int) -> int:
        """FLOP of one forward for sums of weights: [Note: Experts in one tensor]."""
        return 2 * rank * module.copies * module.inputs * module.outputs if is_tensor(module) else 0

    def forward_only_flop(self, module: Module, rank: int) -> int:
        """FLOP of one forward whatever its tokens, without backward.

        DoRA multiplies both adapters for the norms. A sum of experts is worked out once more when
        torch registers it.
        """
        if is_tensor(module):
            return self.sum_flop(module, rank) if module.copies > 1 else 0
        if not self.dora:
            return 0
        rows = module.inputs if module.kind is Kind.LINEAR else 0
        return 2 * rank * module.inputs * (rows + module.outputs)

    def kept_bytes(self, module: Module, rank: int, *, tokens: int, itemsize: int) -> int:
        """Bytes that an adapter keeps for backward.

        Args:
            module: The module.
            rank: The adapter's rank.
            tokens: Tokens of a forward.
            itemsize: Bytes of an element of the model's activations.
        """
        if is_tensor(module):
            return module.weight_params * (module.itemsize or itemsize)
        copy = module.inputs * ITEMSIZE if module.kind is Kind.LINEAR and itemsize != ITEMSIZE else 0
        scaled = module.outputs * (itemsize + ITEMSIZE) if self.dora else 0  # its magnitudes multiply both results
        return tokens * (copy + rank * ITEMSIZE + scaled)

    def transient_bytes(self, module: Module, tokens: int, itemsize: int) -> int:
        """Bytes that an adapter needs for a time: fp32 results, and DoRA's sums of weights."""
        if is_tensor(module):
            return module.weight_params * (module.itemsize or itemsize)
        results = ITEMSIZE * tokens * module.outputs if itemsize != ITEMSIZE else 0
        sums = 3 * ITEMSIZE * module.inputs * module.outputs if self.dora else 0
        return results + sums


def _rank(text: str, rank: str) -> int:
    if not rank.isdecimal() or int(rank) < 1:
        raise ConfigError(f"--lora {text!r}: the rank {rank!r}; allowed: r=N with N of at least 1, {_EXAMPLE}.")
    return int(rank)


def _ends(pattern: str, name: str) -> bool:
    """Whether a pattern fits a module's name. Source: PEFT 0.21, ``get_pattern_key``."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def is_tensor(module: Module) -> bool:
    """Whether an adapter is added to the weights: [Note: Experts in one tensor]."""
    return module.kind in (Kind.PARAMETER, Kind.OTHER)


def _holds(module: Module, parameter: str) -> bool:
    name = module.name if module.kind is Kind.PARAMETER else f"{module.name}.weight"
    return name.endswith(f".{parameter}")


def _names(target: str, layout: Layout, earlier: Mapping[str, str]) -> Iterable[str]:
    """What one target stands for: ends of names of modules, or names of earlier linear layers."""
    if target.lower() == _ALL:
        names = [m.name for m in layout.modules if m.kind is Kind.LINEAR and not m.head]
        return {*(n.rsplit(".", 1)[-1] for n in names), *earlier} if earlier else names
    for name in (target, target + _SUFFIX):
        if (last := name.rsplit(".", 1)[-1]) in earlier:
            return [last]
        if _ending(name, layout):
            return [name]
    known = sorted({m.name.rsplit(".", 1)[-1] for m in layout.modules if not is_tensor(m)} | set(earlier))
    hint = did_you_mean(target, [*known, _ALL])
    raise ConfigError(f"--lora: the model has no module {target!r}.{hint} It has {', '.join(known)}; or all-linear.")


def _taking(name: str, layout: Layout) -> list[Module]:
    """The modules that a name ends, all of which take an adapter."""
    found = _ending(name, layout)
    unable = next((m.name for m in found if m.kind is Kind.OTHER), None)
    if unable is not None:
        raise ConfigError(
            f"--lora: target {name!r} names {unable}, which is no linear layer and no embedding, so PEFT's target_modules refuses "
            f"it. Name linear layers."
        )
    return found


def _ending(name: str, layout: Layout) -> list[Module]:
    named = (m for m in layout.modules if m.kind is not Kind.PARAMETER)
    return [m for m in named if m.name == name or m.name.endswith(f".{name}")]


def _fused(earlier: Mapping[str, str]) -> dict[str, set[str]]:
    """Names of earlier linear layers by the tensor that holds them now."""
    return {new: {old for old, now in earlier.items() if now == new} for new in earlier.values()}
