"""The limit of open files, checked before training: a run that meets it later cannot go on."""

from __future__ import annotations

import logging
import os
import resource

from lightning_hetero.errors import ConfigError

log = logging.getLogger(__name__)

_SPARE = 128  # data, checkpoints, directories, fresh files of linked slots


def make_room(needed: int) -> None:
    """Sees to it that so many more files can be open; raises the soft limit as far as that takes.

    Args:
        needed: Files that the store will have open at the same time, beside what is open now.

    Raises:
        ConfigError: The hard limit is too low.

    Source: getrlimit(2), ``RLIMIT_NOFILE``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + needed + _SPARE
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ConfigError(
            f"the store needs {needed} open files, with what else is open {wanted}; this process may have {hard}. Raise the limit "
            f"(`ulimit -Hn {wanted}`, or LimitNOFILE= of a service), choose block_cls= so that there are fewer blocks, or keep "
            f'fewer of them on disk; durability="none" needs no files for what is in memory.'
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    log.info("the limit of open files is raised from %d to %d: the store has %d.", soft, wanted, needed)
