"""This library, DeepSpeed, FSDP2, bitsandbytes, torchao and plain Lightning, side by side.

All of them train the same GPT-2, from the same weights, on the same tokens, and take turns in one
run. Each has a process and an environment of its own, which the command makes below ``--dir``. What
each one runs is a file in ``programs``: what a user would write.

Per contestant and precision: seconds of a step, tokens per second, peak memory of the process,
bytes on disk and moved to and from it in a step, losses. Per contestant: seconds of the set-up, and
lines that differ from the plain program.

    # everything: DeepSpeed compiles for minutes; it needs g++ and libaio-dev
    python benchmarks/peers --dir DIR --save benchmarks/results/peers_NAME.json
    # what is installed already
    python benchmarks/peers --dir DIR --no-install
    # the tables, the picture and the README's rows, from a result
    python benchmarks/peers --publish benchmarks/results/peers_NAME.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # names are those of benchmarks

from peers.command import main  # noqa: E402

if __name__ == "__main__":
    main(__doc__)
