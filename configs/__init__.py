"""Model configs and serving examples, as data. Installed as ``vllm_yoco.configs``."""
