"""vLLM's CUDA platform without a GPU, as far as that goes: imports, configuration and the model, on CPU tensors.

Part of the rehearsal's stage 1, in a process of its own: it shows what the CUDA code looks up in extensions that the
bundle lacks. The platform is vLLM's own but for what it asks the driver; nothing is computed on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def take_cuda_platform() -> None:
    # vLLM turns Triton off where no driver is active. Kernels are defined here and none is launched.
    from vllm_yoco.testing.runner_v2_cpu import _add_stand_in_backend

    _add_stand_in_backend()
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):
        """What NVML would say of an H200."""

        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H200")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 139 * 2**30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        set_device = classmethod(lambda cls, device: None)

    vllm.platforms._current_platform = Hopper()


def main(model: str) -> int:
    take_cuda_platform()
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    from gpu_kit.settings import llm_options

    load_general_plugins()
    import importlib

    for module in ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu.warmup"):
        importlib.import_module(module)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1100, "max_num_seqs": 8, "block_size": 32}
    yoco = {"yoco": {"truncation": "compact", "keep_tokens": "min"}}
    config = EngineArgs(model, additional_config=yoco, **(options | llm_options())).create_engine_config()
    assert config.use_v2_model_runner, "the CUDA platform did not choose Model Runner V2"
    print("worker:", config.parallel_config.worker_cls, "graphs:", config.compilation_config.cudagraph_mode)

    with set_current_vllm_config(config):
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        init_distributed_environment(1, 0, "tcp://127.0.0.1:29555", 0, "gloo")
        initialize_model_parallel(1)
        config.kernel_config.ir_op_priority.set_default()
        from vllm_yoco.models.yoco import YocoForCausalLM

        with torch.device("cpu"):
            built = YocoForCausalLM(vllm_config=config)
        for parameter in built.parameters():  # they are whatever the memory held
            torch.nn.init.normal_(parameter, std=0.1)
        layers = config.compilation_config.static_forward_context
        backends = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
        print("backends:", backends)
        assert backends == ["TRITON_ATTN"], backends
        # Every op that runs outside attention, in the form that custom_ops: none gives it on CUDA.
        layer = built.model.layers[0]
        hidden = torch.randn(5, config.model_config.get_hidden_size())
        normed, residual = layer.input_layernorm(hidden, torch.zeros_like(hidden))
        assert torch.isfinite(layer.mlp(normed)).all() and torch.isfinite(residual).all()
        query = torch.randn(5, layer.self_attn.sizes[0])
        rotated, _ = built.model.rotary_emb(torch.arange(5), query, query.clone())
        assert torch.isfinite(rotated).all()
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parents[1] / "checkpoint")))
