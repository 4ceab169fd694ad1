"""The ctypes structures and prototypes are those of native/include/hetero/api.h."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero import _native
from lightning_hetero._native import engine, library

HEADER = (Path(__file__).parents[2] / "native" / "include" / "hetero" / "api.h").read_text()
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "hyper": library.CHyper,
    "segment": library.CSegment,
    "store_options": library.CStoreOptions,
    "block_geometry": library.CBlockGeometry,
    "engine_options": library.CEngineOptions,
    "task": library.CTask,
    "patch": library.CPatch,
    "run_file": library.CRunFile,
    "run": library.CRun,
    "times": library.CTimes,
    "engine_stats": library.CStats,
}
UNUSED = {"block_open", "block_staged_bytes", "engine_create"}  # functions that Python does not call
NUMBERS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "double": ctypes.c_double,
}
SIZES = {"int32_t": 4, "int64_t": 8, "uint8_t": 1, "double": 8, "*": 8}
CONSTANTS = {
    "F32": _native.F32,
    "BF16": _native.BF16,
    "F16": _native.F16,
    "U8": _native.U8,
    "ADAMW": _native.ADAMW,
    "MAXIMIZE": _native.MAXIMIZE,
    "READY": _native.READY,
    "DONE": _native.DONE,
    "EPOISONED": library.EPOISONED,
    "ETIMEDOUT": library.ETIMEDOUT,
    "IO_AUTO": engine._IO_BACKENDS["auto"],
    "IO_URING": engine._IO_BACKENDS["io_uring"],
    "IO_POOL": engine._IO_BACKENDS["pool"],
    "IO_SYNTHETIC": engine._IO_BACKENDS["synthetic"],
    **{f"ISA_{isa.name}": int(isa) for isa in _native.Isa},
}


def plain(header: str) -> str:
    """The header without comments and directives, each run of blanks one blank."""
    return " ".join(re.sub(r"//[^\n]*|^#[^\n]*(?:\\\n[^\n]*)*", " ", header, flags=re.M).split())


def declarations(text: str, separator: str) -> list[tuple[str, str, int]]:
    """Base type (``*`` appended for pointers), name and array length (0: none) of each declared
    name, in order.
    """
    found = []
    for declaration in filter(None, map(str.strip, text.split(separator))):
        base, *names = declaration.replace("const ", "").split(" ", 1)
        for name in ",".join(names).split(","):
            match = re.fullmatch(r"(\**)\s*(\w*)(?:\[(\d+)\])?", name.strip())
            assert match, declaration
            found.append((base + match[1], match[2], int(match[3] or 0)))
    return found


def structures(header: str) -> dict[str, list[tuple[str, str, int]]]:
    """The fields of each structure of the header that has any."""
    found = re.findall(r"typedef struct hetero_(\w+) \{([^}]*)\} hetero_\1;", plain(header))
    return {name: declarations(body, ";") for name, body in found}


def prototypes(header: str) -> dict[str, tuple[str, list[tuple[str, str, int]]]]:
    """Result and arguments of each function of the header."""
    found = re.findall(r"HETERO_API ([\w ]+\**) hetero_(\w+)\(([^)]*)\);", plain(header))
    return {name: (result, [] if body == "void" else declarations(body, ",")) for result, name, body in found}


def constants(header: str) -> dict[str, int]:
    """The enumerators of the header."""
    return {name: int(value) for name, value in re.findall(r"HETERO_(\w+) = (-?\d+)", plain(header))}


def allowed_types(base: str, length: int) -> tuple[Any, ...]:
    """The ctypes types that may stand for a C type."""
    if length:
        return (NUMBERS[base] * length,)
    if base in NUMBERS:
        return (NUMBERS[base],)
    pointee = base.removesuffix("*")
    name = pointee.removeprefix("hetero_")
    if name in STRUCTURES:
        return (ctypes.POINTER(STRUCTURES[name]), ctypes.c_void_p)
    if pointee == "char":
        return (ctypes.c_char_p,)
    if pointee == "void":
        return (ctypes.c_void_p, ctypes.c_char_p)
    return (ctypes.c_void_p, ctypes.POINTER(NUMBERS[pointee])) if pointee in NUMBERS else (ctypes.c_void_p,)


def layout(fields: list[tuple[str, str, int]]) -> tuple[list[tuple[str, int, int]], int]:
    """Name, offset and size of each field, and the size of the whole, by the rules of C for 64-bit
    machines.
    """
    end, widest, rows = 0, 1, []
    for base, name, length in fields:
        width = SIZES["*" if base.endswith("*") else base]
        begin = -(-end // width) * width
        end, widest = begin + width * (length or 1), max(widest, width)
        rows.append((name, begin, width * (length or 1)))
    return rows, -(-end // widest) * widest


def faults(header: str) -> list[str]:
    """Everything in which Python and the header differ."""
    found = []
    theirs = structures(header)
    if theirs.keys() != STRUCTURES.keys():
        found.append(f"structures {sorted(theirs)}")
    for name in theirs.keys() & STRUCTURES.keys():
        ours = STRUCTURES[name]
        rows = [(key, getattr(ours, key).offset, getattr(ours, key).size) for key, *_ in ours._fields_]
        if (rows, ctypes.sizeof(ours)) != layout(theirs[name]):
            found.append(f"the layout of {name}")
        for (base, field, length), (_, kind, *_) in zip(theirs[name], ours._fields_, strict=False):
            if kind not in allowed_types(base, length):
                found.append(f"the type of {name}.{field}")
    functions = prototypes(header)
    if functions.keys() != library._PROTOTYPES.keys() | UNUSED:
        found.append(f"functions {sorted(functions.keys() ^ (library._PROTOTYPES.keys() | UNUSED))}")
    for name in functions.keys() & library._PROTOTYPES.keys():
        (result, arguments), (our_result, ours_taken) = functions[name], library._PROTOTYPES[name]
        kinds = [(result.replace("const ", ""), "", 0), *arguments]
        given = [our_result, *ours_taken]
        if len(kinds) != len(given):
            found.append(f"the number of arguments of {name}")
        for (base, argument, length), kind in zip(kinds, given, strict=False):
            if kind not in allowed_types(base, length):
                found.append(f"the type of {argument or 'the result'} of {name}")
    values = constants(header)
    found += [f"the value of {name}" for name, value in CONSTANTS.items() if values.get(name) != value]
    errors = {value for name, value in values.items() if re.fullmatch(r"E[A-Z]+", name)}
    if errors != library._ERRORS.keys():
        found.append("error codes")
    version = re.search(r"#define HETERO_ABI_VERSION (\d+)", header)
    if version is None or int(version[1]) != library.ABI_VERSION:
        found.append("the version")
    return found


def test_structures_prototypes_and_codes_equal_those_of_the_header() -> None:
    assert faults(HEADER) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("double lr, beta1, beta2", "double lr, beta2, beta1", "the layout of hyper"),
        ("int32_t num_slots;", "int64_t num_slots;", "the layout of block_geometry"),
        ("int64_t bytes_read, bytes_written;", "int64_t bytes_read;", "the layout of times"),
        ("  int64_t numel;\n  const void* grad;", "  int64_t numel;\n  int64_t grad;", "the type of segment.grad"),
        ("  double synthetic_read_bytes_per_s;", "  int64_t synthetic_read_bytes_per_s;", "the type of engine_options"),
        ("hetero_submit_release(hetero_engine* engine, ", "hetero_submit_release(", "the number of arguments of submit_release"),
        (
            "hetero_poll(hetero_engine* engine, int64_t ticket)",
            "hetero_poll(hetero_engine* engine, int32_t ticket)",
            "ticket of poll",
        ),
        ("HETERO_API int64_t hetero_submit_read(", "HETERO_API int32_t hetero_submit_read(", "the result of submit_read"),
        ("HETERO_API int32_t hetero_drop(void* p, int64_t bytes);", "", "functions ['drop']"),
        ("HETERO_READY = 1, HETERO_DONE = 2", "HETERO_DONE = 1, HETERO_READY = 2", "the value of DONE"),
        ("HETERO_EBUSY = -6", "HETERO_EBUSY = -16", "error codes"),
        ("#define HETERO_ABI_VERSION 1", "#define HETERO_ABI_VERSION 2", "the version"),
    ],
)
def test_a_header_that_differs_is_noticed(old: str, new: str, fault: str) -> None:
    assert old in HEADER
    assert any(fault in text for text in faults(HEADER.replace(old, new)))
