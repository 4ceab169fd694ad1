"""What settings of another library become, and the reader that loses none of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from lightning_hetero.errors import ConfigError, did_you_mean

AUTO = "auto"  # transformers' Trainer puts a value of its TrainingArguments there


class NoteKind(Enum):
    """Why a setting is in no line of the result."""

    YOURS = "yours"  # the user has to set something
    NONE = "none"  # it has no counterpart, or one that differs
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A setting, by its dotted key, that the result does not contain; and the reason."""

    key: str
    kind: NoteKind
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer of torch and its arguments; ``stands_for`` names one that torch lacks."""

    class_path: str
    arguments: Mapping[str, object]
    stands_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """A schedule of the learning rate, as Python.

    Attributes:
        name: Its name in the other library.
        values: Names of numbers that the body uses, and their expressions.
        body: Lines of a function of ``step``, counted from 0, that gives the learning rate over
            that of the optimizer.
    """

    name: str
    values: Mapping[str, str]
    body: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ported:
    """Settings of another library in the words of this one.

    Attributes:
        source: Where they come from, for people.
        trainer: Arguments of Lightning's Trainer, without the strategy.
        strategy: Arguments of ``HeteroOffloadStrategy``.
        optimizer: What ``configure_optimizers`` makes; ``None`` if the settings say nothing of it.
        schedule: The schedule of its learning rate.
        notes: All settings that are not in the above.
    """

    source: str
    trainer: Mapping[str, object]
    strategy: Mapping[str, object]
    optimizer: Optimizer | None
    schedule: LrSchedule | None
    notes: tuple[Note, ...]


@dataclass(slots=True)
class Porting:
    """Settings that are taken one by one, and what they become. Those left over become notes.

    Attributes:
        source: As in :class:`Ported`.
        settings: Those not taken yet, by their dotted keys.
        autos: For keys whose value may be ``"auto"``: the argument of transformers'
            ``TrainingArguments`` that replaces it, and its default.
        shown: The user's names of keys that have others here.
    """

    source: str
    settings: dict[str, object]
    autos: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    trainer: dict[str, object] = field(default_factory=lambda: {"devices": 1})
    strategy: dict[str, object] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    schedule: LrSchedule | None = None
    notes: list[Note] = field(default_factory=list)

    def take(self, key: str, default: object = None) -> object:
        """A setting; the default if it is missing. For ``"auto"``, what TrainingArguments have."""
        value = self.settings.pop(key, default)
        if value != AUTO:
            return value
        argument, given = self.autos.get(key, ("", None))
        if not argument:
            self.note(key, NoteKind.YOURS, '"auto" is for transformers\' Trainer; the default is used here.')
            return default
        used = f"its default {given!r} is used here" if given is not None else "nothing is set here"
        self.note(key, NoteKind.YOURS, f'"auto" is {argument} of transformers\' TrainingArguments; {used}.')
        return default if given is None else given

    def number(self, key: str, default: float | None = None) -> float | None:
        """A setting that is a number.

        Raises:
            ConfigError: It is something else.
        """
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | None) or value != value:
            raise ConfigError(f"{self.source}: {key} is {value!r}; allowed: a number.")
        return value

    def count(self, key: str) -> int | None:
        """A setting that is a positive whole number.

        Raises:
            ConfigError: It is something else.
        """
        value = self.number(key)
        if value is not None and not (1 <= value < 2**63 and value == int(value)):
            raise ConfigError(f"{self.source}: {key} is {value!r}; allowed: a whole number above 0.")
        return None if value is None else int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A setting that is true or false. YAML of accelerate writes ``'no'`` too.

        Raises:
            ConfigError: It is something else.
        """
        value = self.take(key, default)
        word = _WORDS.get(str(value).lower())
        if word is None:
            raise ConfigError(f"{self.source}: {key} is {value!r}; allowed: true, false.")
        return word

    def text(self, key: str, default: str = "") -> str:
        """A setting that is a text; missing and ``null`` are the default."""
        value = self.take(key, default)
        return default if value is None else str(value)

    def below(self, prefix: str) -> list[str]:
        """The keys that are left below a prefix, without it."""
        return [key.removeprefix(prefix) for key in self.settings if key.startswith(prefix)]

    def note(self, key: str, kind: NoteKind, why: str) -> None:
        """Says why a setting is not in the result."""
        self.notes.append(Note(key=self.shown.get(key, key), kind=kind, why=why))

    def ported(self, yours: Mapping[str, str], none: Mapping[str, str], known: Iterable[str]) -> Ported:
        """The result. Each setting that nobody has taken gets a note.

        Args:
            yours: What the user has to do, by dotted key; ``"wandb.*"`` is a whole section.
            none: Why there is no counterpart, by dotted key or section.
            known: All other keys that the library has, to find a mistyped one.
        """
        every = [*yours, *none, *known]
        for key in list(self.settings):
            for kind, table in ((NoteKind.YOURS, yours), (NoteKind.NONE, none)):
                if (why := _reason(table, key)) is not None:
                    self.note(key, kind, why)
                    break
            else:
                hint = did_you_mean(key, every) or " It is not in the documentation."
                self.note(key, NoteKind.UNKNOWN, hint.strip())
        self.settings.clear()
        return Ported(
            source=self.source,
            trainer=dict(self.trainer),
            strategy=dict(self.strategy),
            optimizer=self.optimizer,
            schedule=self.schedule,
            notes=tuple(self.notes),
        )


_WORDS = {"true": True, "false": False, "yes": True, "no": False, "none": False, "1": True, "0": False, "": False}


def _reason(table: Mapping[str, str], key: str) -> str | None:
    """The reason of a key, or that of the innermost section that has one for all of its keys."""
    if key in table:
        return table[key]
    parts = key.split(".")
    sections = (".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1))
    return next((table[section] for section in sections if section in table), None)


def flat(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested tables as one, with dotted keys: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``."""
    found: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
