"""The same recipe through LightningCLI. A config file sets everything, the strategy included.

    python cli.py fit --config configs/finetune_disk.yaml

Any option can be overridden on the command line, for instance `--trainer.max_steps 100`.
"""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from smollm2 import PythonTopics, SmolLM2


class SmolLM2CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.size", "data.size")


def main(args: ArgsType = None) -> SmolLM2CLI:
    return SmolLM2CLI(SmolLM2, PythonTopics, seed_everything_default=0, save_config_callback=None, args=args)


if __name__ == "__main__":
    main()
