"""The adapters of `lora_smollm2.py` through LightningCLI.

    python lora_cli.py fit --config configs/lora_disk.yaml

After a kill, the same command with `--ckpt_path lora-run` goes on from the last step.
"""

from __future__ import annotations

from cli import SmolLM2CLI
from lightning.pytorch.cli import ArgsType
from lora_smollm2 import LoraSmolLM2
from smollm2 import PythonTopics


def main(args: ArgsType = None) -> SmolLM2CLI:
    return SmolLM2CLI(LoraSmolLM2, PythonTopics, seed_everything_default=0, save_config_callback=None, args=args)


if __name__ == "__main__":
    main()
