"""The device's code is compiled once for a kind of device, cached as the extension is, or the error says why not."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zerocompile.runtime import build, kernels


class Nvrtc:
    """NVRTC's functions, as ctypes calls them. What they compile to is the options."""

    def __init__(self, log: bytes = b"") -> None:
        self.compilations, self._log, self._code = 0, log, b""

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, 0
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, *_: Any) -> int:
        assert b"zerocompile_barrier" in source
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.compilations += 1
        self._code = b"\0".join(options)  # code holds zeros, too
        return 6 if self._log else 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self._code)
        return 0

    def nvrtcGetCUBIN(self, program: Any, content: Any) -> int:
        ctypes.memmove(content, self._code, len(self._code))
        return 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self._log)
        return 0

    def nvrtcGetProgramLog(self, program: Any, content: Any) -> int:
        ctypes.memmove(content, self._log, len(self._log))
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        return 0


def _compiled(nvrtc: Nvrtc, cache: Path, target: str = "sm_90") -> bytes:
    return kernels.compiled_for(target, nvrtc, cache).read_bytes()  # type: ignore[arg-type]


def test_each_kind_of_device_is_compiled_for_once(tmp_path: Path) -> None:
    nvrtc = Nvrtc()
    code = _compiled(nvrtc, tmp_path)
    assert code.startswith(b"--gpu-architecture=sm_90\0")
    assert _compiled(nvrtc, tmp_path) == code
    assert nvrtc.compilations == 1
    assert _compiled(nvrtc, tmp_path, "sm_80") != code
    assert nvrtc.compilations == 2


def test_damaged_code_is_compiled_again(tmp_path: Path) -> None:
    nvrtc = Nvrtc()
    code = _compiled(nvrtc, tmp_path)
    [path] = tmp_path.glob("kernels-sm_90-*.cubin")
    path.write_bytes(code[:-1])
    assert _compiled(nvrtc, tmp_path) == code
    assert nvrtc.compilations == 2


def test_code_that_others_could_have_put_there_is_refused(tmp_path: Path) -> None:
    nvrtc = Nvrtc()
    _compiled(nvrtc, tmp_path)
    [path] = tmp_path.glob("kernels-sm_90-*.cubin")
    path.chmod(0o666)
    with pytest.raises(build.ExtensionBuildError, match="can be written to by other users"):
        _compiled(nvrtc, tmp_path)


def test_what_the_compiler_says_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"cannot compile the kernels .*sm_90.*: no such thing$"):
        _compiled(Nvrtc(log=b"no such thing\n\0"), tmp_path)
    assert not list(tmp_path.glob("kernels-*"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVRTC")
def test_a_torch_without_nvrtc() -> None:
    with pytest.raises(RuntimeError, match="has no NVRTC"):
        kernels.nvrtc()
