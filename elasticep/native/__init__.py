"""Access to the native libraries through ctypes; never imports torch."""

from elasticep.native.library import (
    LIBRARY_DIR,
    core,
    cuda_available,
    load_library,
)

__all__ = ["LIBRARY_DIR", "core", "cuda_available", "load_library"]
