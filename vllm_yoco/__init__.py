"""YOCO prefill truncation for vLLM."""

__version__ = "0.1.0"
