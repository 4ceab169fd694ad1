"""Calls as text, such as ``FSDPStrategy(auto_wrap_policy={Block})``. Nothing is executed."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from lightning_hetero.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Expression:
    """An argument that is no literal.

    Attributes:
        text: Its source.
        classes: Names in sets, lists and tuples inside it, without their modules.
        arguments: Keyword arguments of the call that it is, and positional ones by their position.
    """

    text: str
    classes: tuple[str, ...]
    arguments: tuple[tuple[str, object], ...]

    def __repr__(self) -> str:
        return self.text

    def argument(self, name: str, position: int) -> object:
        """An argument of the call that it is; ``None`` if it is missing."""
        found = dict(self.arguments)
        return found.get(name, found.get(str(position)))


def is_call(text: str) -> bool:
    """Whether a text is meant as a call, and not as the name of a file."""
    return re.fullmatch(r"\s*[A-Za-z_][\w.]*\s*\(.*\)\s*", text, re.DOTALL) is not None


def parse_call(text: str, *, allowed: str) -> tuple[str, dict[str, object]]:
    """The name of what is called, and its keyword arguments.

    Args:
        text: Python.
        allowed: An example, for the message.

    Raises:
        ConfigError: It is not a call, or has arguments without a name.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"{text!r} is not Python: {error.msg}. Allowed: {allowed}.") from error
    if not isinstance(call, ast.Call):
        raise ConfigError(f"{text!r} is no call. Allowed: {allowed}.")
    if any(keyword.arg is None for keyword in call.keywords):
        raise ConfigError(f"{text!r} has arguments by **; write them out, such as {allowed}.")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func).rpartition(".")[2], arguments


def _value(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    arguments: list[tuple[str, object]] = []
    if isinstance(node, ast.Call):
        arguments = [(str(position), _value(value)) for position, value in enumerate(node.args)]
        arguments += [(str(keyword.arg), _value(keyword.value)) for keyword in node.keywords]
    groups = [n for n in ast.walk(node) if isinstance(n, ast.Set | ast.List | ast.Tuple)]
    names = [ast.unparse(item) for group in groups for item in group.elts if isinstance(item, ast.Name | ast.Attribute)]
    classes = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return Expression(ast.unparse(node), tuple(classes), tuple(arguments))
