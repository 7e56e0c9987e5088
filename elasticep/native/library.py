"""Finds and loads the native libraries.

They lie in `elasticep/_lib`, put there by `make build` or by the wheel. `ELASTICEP_LIBRARY_DIR`
names another folder (a debug or sanitizer build). `ELASTICEP_CUDA_LIBRARY` names another file for
the CUDA library: so tests load the one that emulates a GPU (docs/cuda.md). Every library is loaded
with RTLD_LOCAL, so that nothing in an engine's process can be bound to our symbols, or we to its.
"""

import ctypes
import functools
import os
from pathlib import Path

from elasticep import __version__
from elasticep.errors import NativeError

LIBRARY_DIR = Path(
    os.environ.get("ELASTICEP_LIBRARY_DIR") or Path(__file__).resolve().parent.parent / "_lib"
)

CORE_NAME = "libelasticep_core.so"
CUDA_NAME = "libelasticep_cuda.so"
OPS_NAME = "_ops.so"


def library_path(name: str) -> Path:
    """Path of a native library that exists.

    Raises:
        NativeError: it is not there; the message says how it comes to be.
    """
    path = LIBRARY_DIR / name
    if path.is_file():
        return path
    remedies = {
        CUDA_NAME: "build with ELASTICEP_CUDA=ON where nvcc is on PATH",
        OPS_NAME: "install torch >= 2.11 and build again with `make build`",
    }
    remedy = remedies.get(name, "run `make build`, or reinstall the elasticep wheel")
    raise NativeError(f"native library {path} does not exist; {remedy}")


def load_library(name: str) -> ctypes.CDLL:
    """Load a library of `LIBRARY_DIR` by file name, e.g. `libelasticep_core.so`.

    Raises:
        NativeError: it is missing or the dynamic linker refuses it.
    """
    return _load(library_path(name))


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise NativeError(
            f"native library {path} cannot be loaded: {error}; it was built for another system, "
            "build it again with `make clean build`"
        ) from error


@functools.cache
def core() -> ctypes.CDLL:
    """The core library; loaded once per process.

    Raises:
        NativeError: it is missing, broken, or of another version than this package.
    """
    library = load_library(CORE_NAME)
    library.ep_version.restype = ctypes.c_char_p
    library.ep_version.argtypes = ()
    version = library.ep_version().decode()
    if version != __version__:
        raise NativeError(
            f"native library {LIBRARY_DIR / CORE_NAME} is version {version}, the Python package is "
            f"{__version__}; build it again with `make build`"
        )
    return library


@functools.cache
def cuda() -> ctypes.CDLL:
    """The CUDA library; loads on hosts without a driver, too. Loaded once per process.

    Raises:
        NativeError: this build has none, or it is broken.
    """
    other = os.environ.get("ELASTICEP_CUDA_LIBRARY")
    return _load(Path(other)) if other else load_library(CUDA_NAME)


def cuda_available() -> bool:
    """Whether this build has the CUDA library; says nothing of a driver or a device."""
    return (LIBRARY_DIR / CUDA_NAME).is_file()
