"""What a block's forward saves for backward: kept, recomputed, or swapped to the host or to the disk, as the plan says."""
