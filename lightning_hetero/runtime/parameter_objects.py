"""The parameters and modules of a session, as objects: others in their place are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.store.live.blocks import Block, parts_of

_COLLECTIONS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential)
_QUANTIZED = ("quant_state", "SCB")  # attributes of bitsandbytes' weights


class ParameterObjects:
    """Where modules hold the parameters of blocks, and other modules.

    A session moves, counts and keeps these objects. Another one would compute, and would be neither
    on a tier nor in a kept step. A parameter that a module no longer has may have become part of a
    parametrization. A module in the place of another may have parameters of the session alone, or
    none: it wraps the other one, or the model leaves something out from then on. Collections with
    parameters of the session get no others, as PEFT's ``add_adapter`` adds them.
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
        self._collections = [
            (module, frozenset([*module._modules, *module._parameters]), path)
            for path, module in root.named_modules()
            if isinstance(module, _COLLECTIONS) and any(id(param) in names for param in module.parameters())
        ]

    def check(self) -> None:
        """Refuses a model that has other parameters, in the place of one or beside it.

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
                self._check_replaced(name, other)
        for collection, keys, name in self._collections:
            for key in (collection._modules.keys() | collection._parameters.keys()) - keys:
                self._check_added(name, key, collection)

    def _unknown(self, module: nn.Module) -> Iterator[str]:
        ours = {id(param) for *_, param, _ in self._rows}
        return (name for name, param in module.named_parameters() if id(param) not in ours)

    def _check_added(self, name: str, key: str, collection: nn.Module) -> None:
        unknown = next((own for own in self._unknown(collection) if own == key or own.startswith(f"{key}.")), None)
        if unknown is not None:
            added = f"{name}.{unknown}"
            raise UnsupportedError(
                f"{added!r} has been added to the model, and is on no tier and in no kept step. Add it before the fit, as with "
                f"PEFT's add_adapter() and load_adapter(); set_adapter() may choose it during the fit."
            )

    def _check_replaced(self, name: str, module: nn.Module) -> None:
        unknown = next(self._unknown(module), None)
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
