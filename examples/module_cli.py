"""LightningCLI for the modules of `vit_digits.py` and `pretrain_gpt.py`; a file sets everything.

    python module_cli.py fit --config configs/vit_disk.yaml
    python module_cli.py fit --config configs/pretrain_gpt.yaml

The file names the classes of module and data, so this works with a module of your own too.
"""

from __future__ import annotations

import lightning as L
from lightning.pytorch.cli import ArgsType, LightningCLI


def main(args: ArgsType = None) -> LightningCLI:
    return LightningCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        save_config_callback=None,
        args=args,
    )


if __name__ == "__main__":
    main()
