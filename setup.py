"""The list of packages; everything else is in pyproject.toml.

``patches`` and ``configs`` stand at the top of the repository, where a reader meets them, and are installed
inside the package. Setuptools cannot both discover packages and map folders from pyproject.toml alone.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["vllm_yoco", "vllm_yoco.*"], exclude=["*__pycache__*"]),
        "vllm_yoco.patches",
        "vllm_yoco.configs",
    ],
    package_dir={"vllm_yoco.patches": "patches", "vllm_yoco.configs": "configs"},
)
