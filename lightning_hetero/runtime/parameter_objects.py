"""The parameters and modules of a session, as objects: others in their place are refused."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.store.live.blocks import Block, parts_of

_QUANTIZED = ("quant_state", "SCB")  # attributes of bitsandbytes' weights


class ParameterObjects:
    """Where modules hold the parameters of blocks, and other modules.

    A session moves, counts and keeps these objects. Another one would compute, and would be neither
    on a tier nor in a kept step. A parameter that a module no longer has may have become part of a
    parametrization. A module in the place of another may have parameters of the session alone, or
    none: it wraps the other one, or the model leaves something out from then on.
    """

    def __init__(self, root: nn.Module, blocks: Sequence[Block]) -> None:
        self._places = [
            (parent._modules, key, module, f"{path}.{key}" if path else key)
            for path, parent in root.named_modules()
            for key, module in parent._modules.items()
        ]
        names = {id(param): name for part in parts_of(blocks) for name, param in zip(part.names, part.params, strict=True)}
        self._rows = [
            (module._parameters, key, param, names[id(param)])
            for module in root.modules()
            for key, param in module._parameters.items()
            if id(param) in names
        ]

    def check(self) -> None:
        """Refuses a model that has another parameter in the place of one, alone or in a module.

        Raises:
            UnsupportedError: Names the first one.
        """
        for held, key, param, name in self._rows:
            found = held.get(key)
            if found is not param and found is not None:
                raise UnsupportedError(_refusal(name, found))
        for modules, key, module, name in self._places:
            other = modules.get(key)
            if other is not module and other is not None:
                self._check_parameters(name, other)

    def _check_parameters(self, name: str, module: nn.Module) -> None:
        ours = {id(param) for *_, param, _ in self._rows}
        unknown = next((own for own, param in module.named_parameters() if id(param) not in ours), None)
        if unknown is not None:
            raise UnsupportedError(
                f"{name!r} has been replaced by another {type(module).__name__}, whose {unknown!r} is on no tier and in no kept "
                f"step. To change its values, load them into the module that it was, as in `module.load_state_dict(values)`; "
                f"another module takes its place before the fit."
            )


def _refusal(name: str, found: Tensor) -> str:
    replaced = f"{name!r} has been replaced by another {type(found).__name__}, which is on no tier and in no kept step."
    if any(key in vars(found) for key in _QUANTIZED):
        return (
            f"{replaced} PEFT's merge_adapter() and unmerge_adapter() do that with layers of bitsandbytes. Merge after the fit, or "
            f"with `lightning-hetero export --merge`."
        )
    return f"{replaced} To change its values, write them into the parameter that it was, as in `weight.data = values`."
