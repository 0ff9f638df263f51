"""Builds torch_offload._C with the CMake project beside this file; pyproject.toml holds the rest.

Environment: MAX_JOBS (compiles at a time; all cores unless set), OFFLOAD_WERROR=ON (warnings are errors),
CMAKE_ARGS (more arguments for CMake).
"""

import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# Kept between builds, so that they are incremental. One for each torch and Python: objects of one don't fit another.
BUILD = ROOT / "build" / f"torch-{version('torch')}-{sys.implementation.cache_tag}"
STAGING = BUILD / "setuptools"


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        # cmake and ninja of this virtual environment first, though nobody activated it.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        cmake = shutil.which("cmake", path=path)
        ninja = shutil.which("ninja", path=path)
        if not cmake or not ninja:
            raise RuntimeError("building torch_offload needs cmake and ninja: pip install cmake ninja")
        configure = [
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DOFFLOAD_WERROR={os.environ.get('OFFLOAD_WERROR', 'OFF')}",
            "-DOFFLOAD_TORCH=ON",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
        subprocess.run([cmake, "-S", ROOT, "-B", BUILD, "--log-level=WARNING", *configure], check=True)
        subprocess.run([cmake, "--build", BUILD, "--target", "_C", "--parallel", jobs], check=True)

        built = BUILD / self.get_ext_filename(ext.name)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)


# setuptools packs whatever lies in its staging folder, modules that are gone from the sources too.
shutil.rmtree(STAGING, ignore_errors=True)

setup(
    ext_modules=[Extension("torch_offload._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    options={"build": {"build_base": str(STAGING)}},
)
