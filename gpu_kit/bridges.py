"""What stands in for vLLM's compiled extensions, and for what an older PyTorch lacks: every bridge with its reason.

Used by the kit and its rehearsal only; the plugin knows nothing of it. The bundle's vLLM has a Python module in the
place of its extension (``vllm/_C_stable_libtorch.py``, which the CUDA platform imports in every process before any
kernel is looked up). It calls ``apply`` and that is all.

An operator that is not listed here stays missing. Code that looks one up anyway fails with PyTorch's own message
("has no attribute"), which is better than a stand-in that is silently wrong. What a setting can avoid is in
``settings.py`` and needs no bridge.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXTENSION = "vllm/_C_stable_libtorch.py"
CPU_EXTENSIONS = ("vllm/_C.py", "vllm/_C_AVX2.py", "vllm/_C_AVX512.py")
"""One of these is what the CPU platform imports, by the processor; in a rehearsal only."""

STAND_IN = '''"""In the place of the compiled extension, which this copy of vLLM lacks. See gpu_kit/bridges.py."""

from gpu_kit import bridges

bridges.apply()
'''

EMPTY = '"""In the place of a compiled extension that nothing calls. See gpu_kit/bridges.py."""\n'

MODULES = {EXTENSION: STAND_IN, "vllm/vllm_flash_attn/_vllm_fa2_C.py": EMPTY}
"""Path in the bundle's vLLM to text."""


@dataclass(frozen=True)
class Bridge:
    """``reason`` says what breaks without it; ``rehearsal`` marks what only a CPU needs."""

    name: str
    reason: str
    install: Callable[[Any], None]
    rehearsal: bool = False


def _silu_and_mul(library: Any) -> None:
    import torch

    def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
        half = x.shape[-1] // 2
        out.copy_(torch.nn.functional.silu(x[..., :half]) * x[..., half:])

    library.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
    library.impl("silu_and_mul", silu_and_mul, "CompositeExplicitAutograd")


def _weak_ref_tensor(library: Any) -> None:
    library.define("weak_ref_tensor(Tensor input) -> Tensor")
    library.impl("weak_ref_tensor", lambda tensor: tensor.detach(), "CompositeExplicitAutograd")


def _cuda_view(library: Any) -> None:
    library.define("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor")
    library.impl("get_cuda_view_from_cpu_tensor", cuda_view, "CPU")


def cuda_view(pinned: Any) -> Any:
    """The pinned CPU tensor as a CUDA tensor of the same storage, contiguous, as the extension's operator gives it.

    Raises:
        RuntimeError: the tensor is not pinned, or the driver gives it no address on the device.
    """
    import torch

    if not pinned.numel():
        return torch.empty(pinned.shape, dtype=pinned.dtype, device="cuda")
    if not pinned.is_pinned() or not pinned.is_contiguous():
        raise RuntimeError("get_cuda_view_from_cpu_tensor: needs a pinned, contiguous tensor")
    view = torch.as_tensor(_DeviceArray(pinned), device="cuda")
    if view.data_ptr() != _device_pointer(pinned.data_ptr()):
        raise RuntimeError("get_cuda_view_from_cpu_tensor: PyTorch copied the tensor instead of viewing it")
    return view.view(pinned.dtype)


class _DeviceArray:
    """``pinned`` under CUDA's array interface, by which PyTorch takes it without a copy. Keeps the storage alive.

    Types that NumPy lacks travel as unsigned integers of their size; the caller views them back.
    """

    def __init__(self, pinned: Any) -> None:
        import torch

        self.owner = pinned
        carried = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[pinned.element_size()]
        names = {torch.uint8: "|u1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8"}
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": names[carried],
            "data": (_device_pointer(pinned.data_ptr()), False),
            "strides": None,
            "version": 3,
        }


def _device_pointer(host: int) -> int:
    """Address on the device of pinned host memory, from the driver (``cuMemHostGetDevicePointer``)."""
    driver = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_uint64()
    status = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(device), ctypes.c_void_p(host), 0)
    if status:
        raise RuntimeError(f"cuMemHostGetDevicePointer: CUDA driver error {status}")
    return device.value


def _interpreter_scalars(library: Any) -> None:
    from vllm_yoco.post_import import after_import

    def patch() -> None:
        from triton.runtime import interpreter

        original = interpreter._patch_lang_tensor

        def patch_lang_tensor(tensor: Any, scope: Any) -> None:
            original(tensor, scope)
            tensor.__index__ = lambda self: int(self.handle.data.item())

        interpreter._patch_lang_tensor = patch_lang_tensor

    after_import("triton.runtime.interpreter", patch)


def _cpu_memory(library: Any) -> None:
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")


def _triton_attention_on_cpu(library: Any) -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum.TRITON_ATTN.get_path()
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: path)


def _capability_of_a_gpu(library: Any) -> None:
    import torch

    torch.cuda.get_device_capability = lambda device=None: (9, 0)


def _fast_interpreter(library: Any) -> None:
    from vllm_yoco.post_import import after_import

    def patch() -> None:
        from triton.language.semantic import TritonSemantic

        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *args, **kwargs: None

    after_import("triton.language.semantic", patch)


def _no_packed_weights(library: Any) -> None:
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def _interpreter_bfloat16(library: Any) -> None:
    from vllm_yoco.post_import import after_import

    def patch() -> None:
        import numpy as np
        import triton.language as tl
        from triton.runtime import interpreter

        original = interpreter.InterpreterBuilder.create_dot

        def as_float32(handle: Any) -> Any:
            if handle.dtype.scalar != tl.bfloat16:
                return handle
            # Its upper half: bfloat16 is float32 cut off, and kept as uint16 here.
            wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
            return interpreter.TensorHandle(wide, tl.float32)

        def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
            return original(self, as_float32(a), as_float32(b), *args)

        interpreter.InterpreterBuilder.create_dot = create_dot

    after_import("triton.runtime.interpreter", patch)


CAPABILITIES = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)


def _no_cutlass(library: Any) -> None:
    for name in CAPABILITIES:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")


def _nothing(library: Any) -> None:
    """The bridge is its module in the bundle."""


BRIDGES = (
    Bridge(
        "_C::silu_and_mul",
        "SiluAndMul looks the operator up when it is made, also where custom_ops is none and its PyTorch form runs",
        _silu_and_mul,
    ),
    Bridge(
        "_C::get_cuda_view_from_cpu_tensor",
        "Model Runner V2 lets kernels read pinned host buffers in place (UvaBuffer); PyTorch has no public call for"
        " such a view, its CUDA array interface makes one",
        _cuda_view,
    ),
    Bridge(
        "_C::weak_ref_tensor",
        "captured CUDA graphs hold their outputs by weak references; held by ordinary ones, they only use more memory",
        _weak_ref_tensor,
    ),
    Bridge(
        "vllm_flash_attn._vllm_fa2_C, an empty module",
        "on CUDA the attention package imports FlashAttention whatever the backend, which refuses without an extension;"
        " TRITON_ATTN calls nothing of it",
        _nothing,
    ),
    Bridge(
        "_C::cutlass_scaled_mm_supports_fp8 and the like, False",
        "modules of quantised layers ask for them on import, and every linear layer imports those",
        _no_cutlass,
    ),
    Bridge(
        "Triton 3.6's interpreter on NumPy 2.5",
        "it makes loop bounds of arrays of one element, which NumPy no longer converts; interpreted runs only",
        _interpreter_scalars,
    ),
    Bridge(
        "bfloat16 products in Triton's interpreter",
        "NumPy has no bfloat16, so the interpreter keeps its bits as integers and multiplies those",
        _interpreter_bfloat16,
        rehearsal=True,
    ),
    Bridge(
        "_C::init_cpu_memory_env",
        "the CPU worker binds memory to a NUMA node with it",
        _cpu_memory,
        rehearsal=True,
    ),
    Bridge(
        "TRITON_ATTN on the CPU platform",
        "CPU_ATTN is compiled; the rehearsal shall run the backend of the GPU anyway, in Triton's interpreter",
        _triton_attention_on_cpu,
        rehearsal=True,
    ),
    Bridge(
        "no AMX",
        "on processors with it the CPU platform repacks bfloat16 weights for a compiled matrix product",
        _no_packed_weights,
        rehearsal=True,
    ),
    Bridge(
        "no overflow checks in Triton's interpreter",
        "a debugging aid that takes most of its time",
        _fast_interpreter,
        rehearsal=True,
    ),
    Bridge(
        "torch.cuda.get_device_capability",
        "the Triton write to the KV cache asks for it to choose a tile size",
        _capability_of_a_gpu,
        rehearsal=True,
    ),
)

_libraries: list[Any] = []


def in_force() -> list[Bridge]:
    from gpu_kit.settings import is_rehearsal

    return [bridge for bridge in BRIDGES if is_rehearsal() or not bridge.rehearsal]


def apply() -> None:
    """Install the bridges in this process. Idempotent."""
    if _libraries:
        return
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)  # operators live as long as this object
    for bridge in in_force():
        bridge.install(library)


def write_cpu_stand_ins(site: Path) -> None:
    """For the rehearsal: the modules that the CPU platform looks for."""
    for name in CPU_EXTENSIONS:
        (site / name).write_text(STAND_IN)
