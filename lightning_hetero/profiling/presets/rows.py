"""A model as rows: the modules that hold weights, and the tensors that pass between them.

Families of models (``families``) and models built without memory (``meta_models``) are described
this way. Adapters, quantization and cost see only the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a module is, for adapters and quantization.

    PEFT and bitsandbytes both look for ``nn.Linear``. A ``PARAMETER`` is no module: PEFT adapts it
    only where an earlier version of the model had linear layers in its place.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    PARAMETER = "parameter"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One module with weights.

    Attributes:
        name: Its name inside the model, such as ``"model.layers.0.self_attn.q_proj"``.
        kind: What it is.
        inputs: Width of its input; rows of an embedding; 1 of a vector, such as a norm's weight.
        outputs: Width of its output.
        bias: Whether it adds a vector of the output's width.
        copies: Matrices of this size: the experts that one tensor holds.
        used: Matrices that each token is multiplied with; 0 of vectors and embeddings.
        tied: Whether its weights belong to another module.
        head: Whether it is the model's output layer.
        itemsize: Bytes of one element of its parameters; 0: those of the compute dtype.
        frozen: Whether the model is built with its parameters frozen.
    """

    name: str
    kind: Kind
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    used: int = 1
    tied: bool = False
    head: bool = False
    itemsize: int = 0
    frozen: bool = False

    @property
    def weight_params(self) -> int:
        """Elements of its matrices, without the bias."""
        return 0 if self.tied else self.copies * self.inputs * self.outputs

    @property
    def num_params(self) -> int:
        """Elements of all its own parameters."""
        return self.weight_params + (self.outputs if self.bias else 0)

    @property
    def flop(self) -> int:
        """FLOP of one token: two for each multiply and add."""
        return 2 * self.used * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of a block, and its output.

    Attributes:
        name: Unique in its block, such as ``"self_attn.q_proj"``.
        width: Elements of its output, of one token.
        kept: Whether backward needs the output whatever is trained. If not, only the gradient of a
            weight needs it: of a module that ``reads`` it.
        module: Its weights; ``None`` of a function.
        reads: The operator whose output it reads; empty: the block's input.
        pair_flop: FLOP for each pair of tokens of a sequence: attention.
        itemsize: Bytes of one output element; 0: those of the compute dtype.
    """

    name: str
    width: int
    kept: bool = True
    module: Module | None = None
    reads: str = ""
    pair_flop: int = 0
    itemsize: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """One block.

    Attributes:
        name: Its module's name, such as ``"model.layers.0"``.
        operators: Its operators, in the order of execution.
        boundary_width: Elements of its input, of one token; 0: it reads ids of tokens.
        transient_width: Elements of one token that backward holds at its peak beside what forward
            saved, in the compute dtype.
        transient_fp32: The same in fp32.
        pinned: Whether it lies outside the repeated blocks.
    """

    name: str
    operators: tuple[Operator, ...]
    boundary_width: int
    transient_width: int = 0
    transient_fp32: int = 0
    pinned: bool = False

    @property
    def modules(self) -> Iterator[Module]:
        """Its modules, in the order of execution."""
        return (o.module for o in self.operators if o.module is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A whole model.

    Attributes:
        blocks: Its blocks, in the order of forward.
        experts: The family after which PEFT names its experts, a key of ``adapters.EXPERTS``; empty
            if they cannot be targets.
    """

    blocks: tuple[BlockRows, ...]
    experts: str = ""

    @property
    def modules(self) -> tuple[Module, ...]:
        """All modules, in the order of execution."""
        return tuple(m for block in self.blocks for m in block.modules)


def linear(name: str, prefix: str, inputs: int, outputs: int, *, reads: str, kept: bool = True, bias: bool = False) -> Operator:
    """A linear layer ``prefix.name``."""
    module = Module(name=f"{prefix}.{name}", kind=Kind.LINEAR, inputs=inputs, outputs=outputs, bias=bias)
    return Operator(name=name, width=outputs, kept=kept, module=module, reads=reads)


def norm(name: str, prefix: str, width: int, *, kept: bool = False, bias: bool = False) -> Operator:
    """A norm with one weight for each element; its input is kept as the output before it."""
    module = Module(name=f"{prefix}.{name}", kind=Kind.OTHER, inputs=1, outputs=width, used=0, bias=bias)
    return Operator(name=name, width=width, kept=kept, module=module)
