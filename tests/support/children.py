"""Children that kill themselves: forked from a process that has imported everything, since that takes longer than they live."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any


def in_child(call: Callable[[], object]) -> bool:
    """Forks and runs ``call`` there; whether that killed itself."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "see above"
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def around(
    owner: Any, name: str, *, before: Callable[..., object] = lambda *_: None, after: Callable[..., object] = lambda *_: None
) -> None:
    """Has a function of a class or a module call others before and after itself, with its arguments."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        before(*arguments)
        result = original(*arguments, **options)
        after(*arguments)
        return result

    setattr(owner, name, call)
