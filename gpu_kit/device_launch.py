"""Compiled Triton kernels on tensors that live on the CPU.

vLLM's metadata builders are tested on the CPU, with kernels interpreted. To put the compiled kernels in their place and
nothing else, each launch copies the storages of its CPU tensors to the GPU, runs there, and copies them back. Whole
storages, because kernels reach beyond a view by strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Storages:
    """Copies of the storages of one launch's tensors: equal storages have one copy, so aliases stay aliases."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_device(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.numel():
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.copies:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            # A clone too where the device is the CPU (rehearsal): what is not copied back shall be missed.
            self.copies[storage.data_ptr()] = flat, flat.to(self.device, copy=True)
        copy = self.copies[storage.data_ptr()][1]
        typed = torch.empty(0, dtype=value.dtype, device=copy.device).set_(copy.untyped_storage())
        return typed.as_strided(value.shape, value.stride(), value.storage_offset())

    def copy_back(self) -> None:
        for original, copy in self.copies.values():
            original.copy_(copy)


@contextmanager
def launches_on(device: str, function_class: type) -> Iterator[list[str]]:
    """Within the block every launch of this class of kernels runs on ``device``; yields the kernels' names.

    Args:
        function_class: ``triton.runtime.JITFunction``, or the interpreter's function.
    """
    original = function_class.run  # type: ignore[attr-defined]
    names: list[str] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        storages = Storages(device)
        moved = [storages.on_device(value) for value in args]
        result = original(self, *moved, **{name: storages.on_device(value) for name, value in kwargs.items()})
        storages.copy_back()
        return result

    function_class.run = run  # type: ignore[attr-defined]
    try:
        yield names
    finally:
        function_class.run = original  # type: ignore[attr-defined]
