"""Bytes of quantized weights as bitsandbytes stores them.

As transformers loads them, all ``nn.Linear`` but the model's head are quantized; their biases,
norms, embeddings and experts in one tensor keep their dtype. Compute has that dtype too: a product
first restores its weights.
"""

from __future__ import annotations

from enum import StrEnum

from lightning_hetero.profiling.presets.rows import Kind, Module

_BLOCK, _NESTED = 64, 256  # elements that share a scale; scales that share one
_NF4_VALUES, _NESTED_VALUES = 16, 256  # entries of the fp32 tables of values
_FP32 = 4


class Quantization(StrEnum):
    """How frozen weights are stored.

    ``NF4_DOUBLE`` is ``bnb_4bit_use_double_quant``, which QLoRA uses; ``NF4`` is without it.
    """

    NF4 = "nf4"
    NF4_DOUBLE = "nf4-double"
    INT8 = "int8"

    def weight_bytes(self, module: Module) -> int:
        """Bytes of a module's matrix, with everything that restores it.

        Args:
            module: A module that :func:`is_quantized`.

        Source: bitsandbytes 0.50, ``functional.quantize_4bit`` and ``QuantState``: two weights in
        one byte, one fp32 scale for 64 of them, a table of 16 fp32 values. Scales that are
        quantized take a byte each, one fp32 scale for 256 of them, a table of 256 fp32 values, and
        an fp32 offset. ``nn.Int8Params``: a byte for each weight, one fp32 scale for each row.
        """
        count = module.weight_params
        if self is Quantization.INT8:
            return count + _FP32 * module.outputs
        scales = -(-count // _BLOCK)
        packed = -(-count // 2) + _FP32 * _NF4_VALUES
        if self is Quantization.NF4:
            return packed + _FP32 * scales
        return packed + scales + _FP32 * (-(-scales // _NESTED) + _NESTED_VALUES + 1)


def is_quantized(module: Module) -> bool:
    """Whether transformers quantizes a module."""
    return module.kind is Kind.LINEAR and not module.head and module.weight_params > 0
