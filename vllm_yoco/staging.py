"""Small per-step arrays on their way to the device: pinned on the host, at a fixed address on the device.

A step decides on the host (NumPy) what its kernels read. ``StepBuffers.put`` copies one such array into a device
buffer that is allocated once, without waiting for the device, and not at all if the array has not changed: the
batches of consecutive decode steps are mostly the same. Addresses never change, so a captured CUDA graph may read
the buffers. Copies are ordered with the kernels of the current stream, so a buffer may be written again while an
earlier step still runs.
"""

from __future__ import annotations

import numpy as np
import torch


class StepBuffers:
    """Named buffers of one model runner. The views returned live until the name is put again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_host = device.type == "cpu"
        self._buffers: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._last: dict[str, bytes] = {}
        self.num_copies = 0
        """Copies made since the start."""

    def put(self, name: str, values: np.ndarray, capacity: int) -> torch.Tensor:
        """``values`` [n] on the device.

        Args:
            name: each has one dtype and one capacity.
            capacity: most elements that it will ever hold.

        Raises:
            ValueError: for more values than the capacity.
        """
        size = len(values)
        buffer = self._buffers.get(name)
        if buffer is None or size > capacity:
            buffer = self._buffer(name, size, torch.from_numpy(values).dtype, capacity)
        # Bytes compare and copy faster than arrays do.
        content = values.tobytes()
        if self._last.get(name) != content:
            self._last[name] = content
            self.num_copies += 1
            if self.on_host:
                self._arrays[name][:size] = values
            else:
                source = torch.from_numpy(values)
                if self._device.type == "cuda":
                    # From the caching host allocator, which reuses it only when the copy is done.
                    source = source.pin_memory()
                buffer[:size].copy_(source, non_blocking=True)
        return buffer[:size]

    def gather(self, name: str, source: torch.Tensor, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        """``source[rows]`` [n], of the device, at the buffer's address.

        Args:
            rows: [n] int64 on the device.
            name, capacity: as for ``put``.

        Raises:
            ValueError: for more rows than the capacity.
        """
        size = rows.shape[0]
        out = self._buffer(name, size, source.dtype, capacity)[:size]
        return torch.index_select(source, 0, rows, out=out)

    def full(self, name: str, value: int, size: int, capacity: int) -> torch.Tensor:
        """``size`` times ``value``, always the same one, as int64.

        Raises:
            ValueError: for a size above the capacity.
        """
        new = name not in self._buffers
        buffer = self._buffer(name, size, torch.int64, capacity)
        return (buffer.fill_(value) if new else buffer)[:size]

    def _buffer(self, name: str, size: int, dtype: torch.dtype, capacity: int) -> torch.Tensor:
        if size > capacity:
            raise ValueError(f"{name}: {size} values, but a step has at most {capacity}")
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(capacity, dtype=dtype, device=self._device)
            if self.on_host:
                self._arrays[name] = self._buffers[name].numpy()
        return self._buffers[name]
