"""NumPy/PyTorch replacements for the Triton kernels of vLLM's Model Runner V2, for tests on a CPU.

Every module maps full kernel names to functions in its ``KERNELS``. A function takes the kernel's parameters in
the kernel's order. Tensors live in host memory, so ``tensor.numpy()`` is a view, and a store through it is the
store of the kernel. ``**launch`` swallows block sizes, ``num_warps`` and the like; sizes that a kernel reads off
its launch grid come from the shapes of its arguments, or from the grid where a function has a parameter ``grid``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

MODULES = (
    "staged_writes",
    "block_tables",
    "input_batch",
    "logits",
    "sampling",
    "logprobs",
    "ngram",
    "rejection",
)

_installed = False


def replacements() -> dict[str, Callable[..., Any]]:
    """Kernel name -> its replacement."""
    kernels: dict[str, Callable[..., Any]] = {}
    for name in MODULES:
        kernels |= import_module(f"{__name__}.{name}").KERNELS
    return kernels


def install() -> None:
    """Register all replacements with vLLM's dispatcher, once."""
    global _installed
    if _installed:
        return
    _installed = True
    from vllm.triton_utils import dispatcher

    class WithGrid(dispatcher.KernelOverride):
        """vLLM's override drops the launch grid; this one hands it on."""

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return partial(self._impl, grid=grid)

    kernels = replacements()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dispatcher looks at every name of every module, deprecated ones too
        dispatcher.register_kernels(kernels)
    for name, replacement in kernels.items():
        if "grid" in signature(replacement).parameters:
            module, attribute = name.rsplit(".", 1)
            getattr(import_module(module), attribute).__class__ = WithGrid
