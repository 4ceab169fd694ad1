"""Models of any architecture, built by transformers on the meta device: shapes without memory.

Modules with weights are found in the model. It is built in bfloat16: what transformers makes wider
all the same, as many routers, has that width in models of 16 bit. What backward keeps is not known
without running it, so it is estimated: the output of each of these modules, its input if its
weights train, and attention's output.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.profiling.presets.families import KNOWN, Config
from lightning_hetero.profiling.presets.rows import BlockRows, Kind, Layout, Module, Operator
from lightning_hetero.store.partition import BlockSpec, partition


def layout(config: Config) -> Layout:
    """A model's blocks in the order of registration, as ``store.partition`` finds them.

    Args:
        config: Its ``config.json``.

    Raises:
        ConfigError: transformers does not know the architecture, or cannot build it.
        UnsupportedError: transformers is not installed.
    """
    built = _built(config)
    found = [_Reader(built, spec).rows() for spec in partition(built.model)]
    if isinstance(built.head, nn.Linear) and not any(m.head for rows in found for m in rows.modules):  # tied to the embedding
        found[-1] = _with_head(found[-1], built.head)
    return Layout(blocks=tuple(found), experts=built.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A model on the meta device.

    Attributes:
        model: The model.
        head: Its output layer.
        width: Its hidden size.
        used: Experts of one token; 0: it has none, or does not say.
        experts: The family after which PEFT names its experts.
    """

    model: nn.Module
    head: nn.Module | None
    width: int
    used: int
    experts: str


def _built(config: Config) -> _Built:
    kind, where = str(config.values.get("model_type")), config.where
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedError(
            f"{where}: model_type={kind!r} is not among those that are read without other packages ({', '.join(KNOWN)}), and "
            f"transformers, which would build it, is not installed. Install it: pip install transformers."
        ) from error
    values = {key: value for key, value in config.values.items() if key != "model_type"}
    try:
        settings = transformers.AutoConfig.for_model(kind, **values)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    except Exception as error:  # whatever a class raises for settings that it does not take
        reason = str(error).partition(". ")[0].rstrip(".")  # a list of all models follows
        code = " Code that the folder has for it (auto_map) is not run." if "auto_map" in values else ""
        raise ConfigError(
            f"{where}: transformers {transformers.__version__} cannot build model_type={kind!r} as a causal language model: "
            f"{reason}.{code} Install a version that knows it, or measure the model and give --model-profile."
        ) from error
    text = settings.get_text_config()
    return _Built(
        model=model,
        head=model.get_output_embeddings(),
        width=text.hidden_size,
        used=getattr(text, "num_experts_per_tok", None) or 0,
        experts=experts_of(kind),
    )


def experts_of(kind: str) -> str:
    """The family after which PEFT names a model's experts; transformers 4 has none."""
    where = "transformers.conversion_mapping"
    if importlib.util.find_spec(where) is None:
        return ""
    names: dict[str, str] = getattr(importlib.import_module(where), "_MODEL_TO_CONVERSION_PATTERN", {})
    return names.get(kind, "")


class _Reader:
    """Reads one block of a model.

    Args:
        built: The model.
        spec: The block.
    """

    def __init__(self, built: _Built, spec: BlockSpec) -> None:
        self._spec, self._head, self._used, self._width = spec, built.head, built.used, built.width

    def rows(self) -> BlockRows:
        """The block."""
        spec, own = self._spec, {id(p) for p in self._spec.params.values()}
        operators = [o for inner, module in spec.module.named_modules() for o in self._operators(inner, module, own)]
        widest = max((o.width for o in operators if o.kept), default=0)
        is_table = not spec.pinned or isinstance(spec.module, nn.Embedding)
        if not spec.pinned:
            operators.append(Operator(name="attention", width=self._width, pair_flop=4 * self._width))
        is_head = any(o.module is not None and o.module.head for o in operators)
        return BlockRows(
            name=spec.name,
            operators=tuple(operators),
            boundary_width=0 if is_table and spec.pinned else self._width,
            transient_width=widest if spec.pinned else self._width + 3 * widest,
            transient_fp32=widest if is_head else 0,
            pinned=spec.pinned,
        )

    def _operators(self, inner: str, module: nn.Module, own: set[int]) -> Iterator[Operator]:
        """A module's input and output; a parameter of no known module is one by itself."""
        params = {name: p for name, p in module._parameters.items() if p is not None and id(p) in own}
        if not params:
            return
        name = f"{self._spec.name}.{inner}" if inner else self._spec.name
        weight = params.get("weight")
        if weight is not None and (sizes := _linear_sizes(module)) is not None:
            linear = Module(
                name=name,
                kind=Kind.LINEAR,
                inputs=sizes[0],
                outputs=sizes[1],
                bias="bias" in params,
                head=module is self._head,
                itemsize=_itemsize(weight),
            )
            yield from _in_and_out(inner or "weight", linear)
        elif isinstance(module, nn.Embedding) and weight is not None:
            table = Module(
                name=name, kind=Kind.EMBEDDING, inputs=weight.shape[0], outputs=weight.shape[1], used=0, itemsize=_itemsize(weight)
            )
            yield Operator(name=inner or "weight", width=table.outputs, kept=False, module=table)
        else:
            for key, param in params.items():
                kind = Kind.OTHER if key == "weight" else Kind.PARAMETER
                short = f"{inner}.{key}" if inner else key
                yield from self._other(short, name if kind is Kind.OTHER else f"{name}.{key}", kind, param)

    def _other(self, short: str, name: str, kind: Kind, param: nn.Parameter) -> Iterator[Operator]:
        if param.dim() < 2:
            vector = Module(
                name=name, kind=kind, inputs=1, outputs=param.numel(), used=0, itemsize=_itemsize(param),
                frozen=not param.requires_grad,
            )  # fmt: skip
            yield Operator(name=short, width=param.numel(), module=vector, itemsize=vector.itemsize)
            return
        copies = param.shape[0] if param.dim() == 3 and self._used else 1
        inputs = param[0].numel() if copies == 1 else param.shape[2]
        outputs = param.shape[0] if copies == 1 else param.shape[1]
        used = min(self._used, copies) if copies > 1 else 1
        matrices = Module(
            name=name, kind=kind, inputs=inputs, outputs=outputs, copies=copies, used=used, itemsize=_itemsize(param),
            frozen=not param.requires_grad,
        )  # fmt: skip
        yield from _in_and_out(short, matrices)


def _linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Width of input and output of a linear layer; GPT-2's has its weight transposed."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(weight := getattr(module, "weight", None), nn.Parameter):
        return weight.shape[0], weight.shape[1]
    return None


def _itemsize(param: nn.Parameter) -> int:
    """Bytes of an element that is wider than the rest of a model of 16 bit; else 0."""
    return param.dtype.itemsize if param.dtype.itemsize > torch.bfloat16.itemsize else 0


def _in_and_out(short: str, module: Module) -> Iterator[Operator]:
    itemsize = 4 if module.head else module.itemsize  # cross entropy takes fp32
    yield Operator(name=f"{short}.input", width=module.used * module.inputs, kept=False)
    yield Operator(name=short, width=module.used * module.outputs, module=module, reads=f"{short}.input", itemsize=itemsize)


def _with_head(rows: BlockRows, head: nn.Linear) -> BlockRows:
    """The last block with a head whose weights are the embedding's."""
    module = Module(name="lm_head", kind=Kind.LINEAR, inputs=head.in_features, outputs=head.out_features, tied=True, head=True)
    return BlockRows(
        name=rows.name,
        operators=(*rows.operators, *_in_and_out("lm_head", module)),
        boundary_width=rows.boundary_width,
        transient_width=max(rows.transient_width, module.outputs),
        transient_fp32=module.outputs,
        pinned=rows.pinned,
    )
