"""Prints, as CMake code, what the build needs to know of this Python, its torch and its CUDA wheels.

None of them is imported: that takes a second and, with some builds of torch, a driver.
"""

import importlib.util
import runpy
import sysconfig
from pathlib import Path


def package_dirs(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(p) for p in spec.submodule_search_locations] if spec else []


def cmake_set(variable: str, *values: object) -> None:
    print(f"set({variable} {' '.join(f'[==[{v}]==]' for v in values)})")


cmake_set("PY_INCLUDE_DIR", sysconfig.get_path("include"))
cmake_set("PY_EXT_SUFFIX", sysconfig.get_config_var("EXT_SUFFIX"))

torch = package_dirs("torch")
if torch:
    version = runpy.run_path(str(torch[0] / "version.py"))
    cmake_set("PY_TORCH_DIR", torch[0])
    cmake_set("PY_TORCH_VERSION", version["__version__"])
    cmake_set("PY_TORCH_CUDA", version["cuda"] or "")

# CUDA 13's wheels share nvidia/cu13; those of CUDA 12 have a folder for each library.
nvidia = package_dirs("nvidia")
cmake_set("PY_CUDA_INCLUDE_DIRS", *sorted(d for p in nvidia for d in p.glob("*/include")))
cmake_set("PY_CUDART", *sorted(f for p in nvidia for f in p.glob("*/lib/libcudart.so.*")))
