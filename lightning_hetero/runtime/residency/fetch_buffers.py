"""Page-locked host memory for weights on their way from the disk to a device.

[Note: Buffers of FETCH]
A device copies faster from page-locked memory. The pages of a block's own memory go back to the
system when its weights leave the host, so they cannot stay locked. So the weights of a block on
disk, if it computes on a device with memory of its own, lie in a buffer from FETCH to RELEASE. Then
the buffer serves another part of the same size: repeated blocks share a few. Buffers count like the
weights in them, and all together they never exceed what the plan has for weights from the disk:
before another one is made, free ones of other sizes go. Where a machine refuses to page-lock,
buffers are pageable, and ``lanes.pinned`` says so.

A block leaves its buffers when it leaves the device: for another plan, while the device is measured
alone, and when the fit ends. Its weights go to its own memory then.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class FetchBuffers:
    """Buffers of exact sizes. Its user is that of the store.

    Args:
        make: Makes one of a size in bytes; its memory begins with a page.

    Attributes:
        num_bytes: Bytes of all buffers, those that are lent included.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._free: list[Tensor] = []  # the longest unused first
        self.num_bytes = 0

    def take(self, num_bytes: int, *, most_bytes: int) -> Tensor:
        """One of this size, with any content; all together take at most ``most_bytes`` then."""
        for place, memory in enumerate(self._free):
            if memory.nbytes == num_bytes:
                return self._free.pop(place)
        self.shrink(most_bytes - num_bytes)
        self.num_bytes += num_bytes
        return self._make(num_bytes)

    def give(self, memory: Tensor) -> None:
        """Gives one back."""
        self._free.append(memory)

    def shrink(self, most_bytes: int) -> None:
        """Ends free buffers until all together take no more."""
        while self._free and self.num_bytes > most_bytes:
            self.num_bytes -= self._free.pop(0).nbytes
