"""What a worker can tell about truncation, through vLLM's own extension point.

    vllm serve MODEL --worker-extension-cls vllm_yoco.worker_extension.YocoWorkerExtension
    LLM(MODEL, worker_extension_cls="vllm_yoco.worker_extension.YocoWorkerExtension")

makes the methods below callable with ``collective_rpc``, which returns one result per worker. A server offers
``collective_rpc`` over HTTP only with ``VLLM_SERVER_DEV_MODE=1``, which has no authentication: on loopback only.
"""

from __future__ import annotations

from typing import Any

QUALNAME = "vllm_yoco.worker_extension.YocoWorkerExtension"
"""Value of ``--worker-extension-cls``."""

COMPUTED_ROWS = "yoco_computed_rows"
"""Name of the method, as ``collective_rpc`` takes it."""


class YocoWorkerExtension:
    """Mixed into the worker class; vLLM refuses names that the worker already has, hence the prefix."""

    def yoco_computed_rows(self: Any) -> list[int]:
        """Rows that each consumer layer has run on since the start: profiling, prefill and decode."""
        return [layer.num_computed_rows for layer in self.get_model().model.consumers]
