"""A check of the plugin on a GPU that fits into one short visit to a machine without a network.

    build.py      makes build/gpu-kit: vLLM's Python sources, missing wheels, the project (``make gpu-kit``)
    driver.py     on the GPU machine: installs into a folder of its own, runs the stages, collects their results
    stages/       one process each, with a time budget: start, invariants, graphs, speed, deepseek_v41
    bridges.py    what stands in for vLLM's compiled extensions and for a newer PyTorch; every one with its reason
    results.py    results as JSON, written when they are known
    rehearse.py   the whole of it without a GPU, in a fresh environment (``make gpu-kit-rehearsal``)

A machine with a full vLLM needs neither bundle nor bridges: the driver then runs the same stages on that vLLM. See
docs/gpu.md. Nothing here is part of the installed package, and the plugin uses none of it.
"""
