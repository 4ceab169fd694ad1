"""Breaks one wait, event or mark of the product at a time, and what finds it.

A break replaces a piece of one function's source. The functions that exist get the new code, so it
holds for every caller.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

LANES = tuple(f"lightning_hetero.lanes.{name}" for name in ("streams", "op", "queue", "memory", "base", "engine", "emulated"))
_ALL = "__import__('lightning_hetero.lanes.base', fromlist=['All']).All"


@dataclass(frozen=True)
class Break:
    """In one function of a module, ``old`` becomes ``new``."""

    name: str
    module: str
    function: str  # its qualified name
    old: str
    new: str
    line: int = 0  # of the module, where ``old`` begins; 0: it is in the function once

    @contextmanager
    def made(self) -> Iterator[None]:
        """Inside, the product is broken."""
        module = importlib.import_module(self.module)
        source = inspect.getsource(module)
        lines = source.splitlines(keepends=True)
        found = []  # of a property's two functions one has it
        for name, node in functions_of(source):
            begin = self.line or node.lineno
            if name == self.function and node.lineno <= begin <= node.end_lineno:
                text = "".join(lines[begin - 1 : node.end_lineno])
                if self.old in text:
                    found.append((node, begin - 1, text))
        assert len(found) == 1, f"{self.function} has no {self.old!r} any more"
        ((node, begin, text),) = found
        assert self.line or text.count(self.old) == 1, f"{self.function} has {self.old!r} more than once"
        broken = "".join([*lines[:begin], text.replace(self.old, self.new, 1), *lines[node.end_lineno :]])
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        (code,) = [c for c in _codes(compile(broken, module.__file__ or "", "exec")) if c.co_firstlineno == first]
        assert code.co_qualname == self.function
        (function,) = [f for f in _functions(module, self.function) if f.__code__.co_firstlineno == first]
        whole, function.__code__ = function.__code__, code
        try:
            yield
        finally:
            function.__code__ = whole


def functions_of(source: str) -> Iterator[tuple[str, Any]]:
    """The functions of a module with their qualified names."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Any]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")

    yield from walk(ast.parse(source), "")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)
            if const.co_name.isidentifier():  # neither a lambda nor a comprehension, which may begin in the same line
                yield const


def _functions(module: ModuleType, function: str) -> list[FunctionType]:
    """The function, or those of the property, of this name."""
    place: Any = module
    *outer, name = function.split(".")
    for part in outer:
        place = getattr(place, part)
    found = vars(place)[name]
    found = getattr(found, "__wrapped__", found)  # a context manager
    return [f for f in (found.fget, found.fset) if f] if isinstance(found, property) else [found]


_NOT_FOR_COPIES = "elif event.moment is not None and not (isinstance(event, _Mark) and stream in self._streams.values()):"
_NOT_FOR_COMPUTE = "elif event.moment is not None and stream in self._streams.values():"
_ISSUED = "event.issued() if isinstance(event, QueuedOp) else event.wait()"
_STREAMS, _RUNTIME = LANES[0], "lightning_hetero.runtime."
_DRAIN, _LEFT = "self.lanes.drain()", "[*needs, *self.left]"
_NEXT = "self._next_origin is not None and self._next_origin.query()"
_MOMENT, _KEEP = "stream.wait_event(moment)", "queued.keep += (*targets, *sources)"
_HELD = "event.keep = [t for t in event.keep if t.is_cpu]"
_MARK, _CATCH_UP = "return _Mark(self._record(self._compute_stream()))", "self._record(self._compute_stream()).synchronize()"
LISTED = tuple(
    Break(name, module, function, old, new)
    for module, name, function, old, new in (
        (_STREAMS, "copy streams do not wait for compute", "StreamLanes._order", "elif event.moment is not None:", _NOT_FOR_COPIES),
        (_STREAMS, "compute does not wait for copies", "StreamLanes._order", "elif event.moment is not None:", _NOT_FOR_COMPUTE),
        (_STREAMS, "memory is taken before another stream gives it back", "_StreamArena._wait", _MOMENT, "pass"),
        (_STREAMS, "a copy keeps nothing alive for its stream", "StreamLanes.copies", _KEEP, "pass"),
        (_STREAMS, "a copy does not keep its target alive", "StreamLanes.copies", _KEEP, "queued.keep += sources"),
        (_STREAMS, "compute's wait frees the host's memory too", "StreamLanes.compute_waits", _HELD, "event.keep = []"),
        (_STREAMS, "host lanes wait until copies are issued", "StreamLanes._work", "event.wait()", _ISSUED),
        (_STREAMS, "a mark passes at once", "StreamLanes.mark", _MARK, f"return {_ALL}(())"),
        (_STREAMS, "catching up does nothing", "StreamLanes.catch_up", _CATCH_UP, "pass"),
        (_STREAMS, "a copy outside an op does not wait", "StreamLanes.copies", "self.catch_up()", "pass"),
        (_STREAMS, "a time is asked for before it is known", "StreamLanes.now", " if event.query() else None", ""),
        (_STREAMS, "times begin where no stream has come yet", "StreamLanes._renew_origin", _NEXT, "self._next_origin is not None"),
        (f"{_RUNTIME}executor", "a use that the schedule does not foresee waits for no op", "Executor._stray", _DRAIN, "pass"),
        (f"{_RUNTIME}step", "weights that the last step left out are not waited for", "Step.reach", _LEFT, "[*needs]"),
    )
)
"""Breaks that a device would not forgive."""

_COLLECTIVES, _SLICES = "lightning_hetero.lanes.collectives", "lightning_hetero.runtime.slices"
_GRADIENTS, _HANDLERS = "lightning_hetero.runtime.slice_gradients", "lightning_hetero.runtime.handlers"
_OPS, _ON_RANKS = "lightning_hetero.runtime.rank_ops", "lightning_hetero.runtime.residency.ranks"
_ENGINE = "lightning_hetero.lanes.engine"
RANKS = tuple(
    Break(name, module, function, old, new)
    for module, name, function, old, new in (
        (_ENGINE, "lane net does not wait for the ops before a collective", "EngineLanes._work", "event.wait()", "pass"),
        (_ENGINE, "the engine does not wait for a REDUCE", "EngineLanes._tickets_of", "event.wait()", "pass"),
        (_ENGINE, "compute does not wait for a GATHER", "EngineLanes.compute_waits", "event.wait()", "pass"),
        (_ENGINE, "draining leaves lane net out", "EngineLanes.drain", "one.wait()", "isinstance(one, EngineOp) and one.wait()"),
        (_ENGINE, "closing lanes leaves a collective behind", "EngineLanes.close", "close_queues([net])", "pass"),
        (_OPS, "an update does not wait for the block's REDUCE", "RankOps.await_reduced", "reduced.wait()", "pass"),
        (
            _OPS,
            "an update does not wait for gradients that others were late with",
            "RankOps.await_reduced",
            "self.slices.collectives.settle()",
            "pass",
        ),
        (_HANDLERS, "nobody follows lane net", "Handlers.submit", "self._on_ranks.slices.collectives.follow(end)", "pass"),
        (_COLLECTIVES, "compute calls a collective beside lane net", "Collectives._naming", "self.settle()", "pass"),
        (_COLLECTIVES, "compute meets beside lane net", "Collectives.meet", "self.settle()", "pass"),
        (_COLLECTIVES, "nothing waits for lane net", "Collectives.settle", "last.wait()", "pass"),
        (_SLICES, "ranks meet for a GATHER before its turn", "Slices.gather", "barrier=self.is_shared", "barrier=False"),
        (_GRADIENTS, "gradients are shown before others' are known", "SliceGradients.expose", "self.settle()", "pass"),
        (_GRADIENTS, "a sum is read while it is made", "SliceGradients.run_of", "self.settle()", "pass"),
        (_GRADIENTS, "a norm is made of old sums", "SliceGradients.norm_of", "self.settle()", "pass"),
        (_ON_RANKS, "weights settle while lane net works", "RanksResidency.settle", "self._lanes.drain()", "pass"),
        (_ON_RANKS, "slices leave while lane net works", "RanksResidency._leave", "self._lanes.drain()", "pass"),
    )
)
"""Waits of lane ``net``, which no device has part in."""

_WAITING = {
    "wait", "wait_event", "synchronize", "issued", "handed", "record", "passes", "_order", "_wait", "catch_up", "compute_waits",
    "_follow_allocator", "drain", "_record", "set", "join", "release",
}  # fmt: skip
_POLLS = {"poll", "query", "is_set", "done", "_has_returned"}


def every_other(modules: tuple[str, ...] = LANES, words: frozenset[str] = frozenset(_WAITING)) -> list[Break]:
    """One break for each statement that waits, records or wakes, but for those above: it is left
    out. A poll finds that all has ended.
    """
    found, known = [], {(one.module, one.function, one.old) for one in (*LISTED, *RANKS)}
    for name in modules:
        source = inspect.getsource(importlib.import_module(name))
        for function, node in functions_of(source):
            for statement in ast.walk(node):
                text = ast.get_source_segment(source, statement) or ""
                polls = _polls(statement)
                if not (polls or _waits(statement, words)) or "closing.wait(" in text:  # which is how a lane sleeps
                    continue
                if (name, function, text) in known:
                    continue
                title = f"{name.rpartition('.')[2]}.py, {function}: {' '.join(text.split())}"
                nothing = "return True" if polls else "__class__" if "super()" in text else "pass"  # the code keeps its cell
                found.append(Break(title, name, function, text, nothing, line=statement.lineno))
    return found


def _polls(statement: ast.AST) -> bool:
    is_value = isinstance(statement, ast.Return) and statement.value is not None and not isinstance(statement.value, ast.Lambda)
    return is_value and _asks(statement.value)


def _asks(expression: ast.AST) -> bool:
    """Whether it asks how far something is."""
    return any(isinstance(node, ast.Attribute) and node.attr in _POLLS for node in ast.walk(expression))


def _waits(statement: ast.AST, words: frozenset[str]) -> bool:
    if isinstance(statement, ast.With):
        return all(isinstance(one, ast.Pass) for one in statement.body)  # a lock that is only waited for
    if isinstance(statement, ast.Expr):
        call: Any = statement.value
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
        call = statement.value
    elif isinstance(statement, ast.If) and len(statement.body) == 1 and isinstance(statement.body[0], ast.Return):
        return _asks(statement.test) and not any(
            isinstance(n, ast.Attribute) and n.attr == "closing" for n in ast.walk(statement.test)
        )
    else:
        return False
    calls = [n for n in ast.walk(call) if isinstance(n, ast.Call)]
    return any(isinstance(n.func, ast.Attribute) and n.func.attr in words for n in calls) or any(
        isinstance(n, ast.Attribute) and n.attr in {"synchronize"} for n in ast.walk(call)
    )
