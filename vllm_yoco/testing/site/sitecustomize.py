"""Found through PYTHONPATH by child processes: sets up Model Runner V2 on the CPU before vLLM is imported.

Python runs only the first ``sitecustomize`` on its path, so this one runs the one it hides, too.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

HERE = os.path.dirname(os.path.abspath(__file__))


def run_hidden_sitecustomize() -> None:
    others = [p for p in sys.path if os.path.abspath(p or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def activate() -> None:
    if os.environ.get("VLLM_YOCO_V2_CPU", "0") in ("", "0"):
        return
    if find_spec("vllm_yoco") is None:  # a source tree that is not installed
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(HERE))))
    from vllm_yoco.testing import runner_v2_cpu

    runner_v2_cpu.activate()


run_hidden_sitecustomize()
activate()
