"""The device's code, csrc/kernels.cu: compiled at its first use and cached beside the extension.

The compiler is NVRTC, which comes with every CUDA build of torch. It compiles for the very device, so the driver that
runs torch's own kernels takes the result.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_zerocompile.runtime import build

SOURCES = ("kernels.cu", "kernel_arguments.h")


def compiled(device: torch.device) -> Path:
    """The file of the kernels for ``device``, which its driver loads.

    Raises:
        RuntimeError: there is no NVRTC, it cannot compile for this device, or the cache cannot be used.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return compiled_for(f"sm_{major}{minor}", nvrtc(), build.cache_directory())


def nvrtc() -> ctypes.CDLL:
    """The NVRTC of this torch, reached as torch reaches it: by its library that is linked with NVRTC."""
    path = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    try:
        return ctypes.CDLL(str(path))  # finds the functions of what it is linked with, too
    except OSError as error:
        raise RuntimeError(f"this torch has no NVRTC to compile kernels with ({error})") from error


def compiled_for(target: str, library: ctypes.CDLL, cache: Path) -> Path:
    """The file of the kernels for a kind of device, such as ``"sm_90"``; raises as :func:`compiled`."""
    sources = build.source_directory()
    version = _version(library)
    contents = [(name, hashlib.sha256((sources / name).read_bytes()).hexdigest()) for name in SOURCES]
    key = hashlib.sha256(repr((contents, version)).encode()).hexdigest()[:24]
    path = cache / f"kernels-{target}-{key}.cubin"

    def make(directory: Path) -> Path:
        made = directory / "kernels.cubin"
        options = [f"--gpu-architecture={target}", "--std=c++17", f"--include-path={sources}"]
        made.write_bytes(_compile(library, (sources / SOURCES[0]).read_bytes(), options))
        return made

    build.provide(path, make, version)
    return path


def _version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"NVRTC {major.value}.{minor.value}"


def _compile(library: ctypes.CDLL, source: bytes, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source, SOURCES[0].encode(), 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), arguments):
            log = _output(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            raise RuntimeError(f"NVRTC cannot compile the kernels ({' '.join(options)}): {log}")
        return _output(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC failed: {library.nvrtcGetErrorString(result).decode()}")
