"""Test support that ships with the package: nothing here is imported by the plugin in normal use.

``runner_v2_cpu``  lets vLLM's Model Runner V2 run on a CPU (Triton interpreter plus NumPy/PyTorch kernels).
``v2_kernels``     those kernels, one file per concept.
``site``           a ``sitecustomize`` that carries the set-up into child processes.
"""
