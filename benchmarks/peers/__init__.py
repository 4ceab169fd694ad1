"""Programs that train larger models than memory holds, side by side: `python benchmarks/peers`."""
