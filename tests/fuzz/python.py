"""Fuzzes what the Python side parses, by coverage (atheris): ``pip install atheris``, then

    python tests/fuzz/python.py TARGET [--corpus DIR] [-- libFuzzer's options, such as
    -max_total_time=60 -runs=100000]

TARGET is one of those in ``tests/support/fuzzing.py``. What an input raises beside this package's
errors is a fault; libFuzzer writes the input to ``crash-…`` in a directory of its own under the
temporary ones, and says where.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["lightning_hetero"]):
    from support.fuzzing import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--corpus", type=Path, help="a directory that keeps what was found; default: a temporary one")
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]
    found = Path(tempfile.mkdtemp(prefix="hetero-fuzz-"))
    corpus = arguments.corpus or found / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(target.examples()):
        (corpus / f"example-{number}").write_bytes(example)
    atheris.Setup([sys.argv[0], f"-artifact_prefix={found}/", str(corpus), *arguments.options], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
