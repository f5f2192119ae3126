"""Changes to vLLM's behaviour that have no official hook: one file per target.

Installed as ``vllm_yoco.patches``.
"""
