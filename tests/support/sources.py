"""From where the bytes of a checkpoint have to come, by what its files say and where they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_hetero.parallel.recovery import LayerMap
from lightning_hetero.parallel.recovery.layer_map import chunk_key


def bytes_by_source(path: Path, nodes: Sequence[Path], rank: int, names: Collection[str]) -> dict[str, int]:
    """What a rank reads, by source.

    Args:
        path: Where LocalFirst saved to; the remote copy.
        nodes: The folder in memory of each rank that loads, as they were then.
        rank: This rank.
        names: Of the parameters and buffers that it needs, with their optimizer state.
    """
    (save,) = [p for p in path.iterdir() if p.is_dir()]
    layer_map = LayerMap.decode((save / "map.json").read_bytes())
    metadata, size = FileSystemReader(path).read_metadata(), layer_map.piece_bytes
    whole = [name for name in ("meta.pt", "other.distcp", f"rank_{rank}.pt") if name in layer_map.files]
    pieces = {(name, piece) for name in whole for piece in range(len(layer_map.files[name].crc32))}
    for index, place in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        parts = index.fqn.split(".")
        if isinstance(tensor, TensorStorageMetadata) and ".".join(parts[1:] if parts[0] == "state_dict" else parts[2:-1]) in names:
            begin = layer_map.starts[chunk_key(index.fqn, index.offset)]
            end = begin + tensor.size.numel() * tensor.properties.dtype.itemsize
            pieces |= {(Path(place.relative_path).name, piece) for piece in range(begin // size, (end - 1) // size + 1)}
    found = dict.fromkeys(("memory", "peer", "remote"), 0)
    for name, piece in pieces:
        there = [(node / save.name / name).exists() for node in nodes]
        begin, end = layer_map.span(name, piece, piece)
        found["memory" if there[rank] else "peer" if any(there) else "remote"] += end - begin
    return found
