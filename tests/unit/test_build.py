"""The builder of the C++ extension, mostly on a source file that compiles in well under a second."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_zerocompile import build
from lightning_zerocompile.runtime import build as runtime_build
from lightning_zerocompile.runtime.build import ExtensionBuildError, Recipe

FORK = multiprocessing.get_context("fork")

TINY = """
#include <Python.h>
#include "tiny.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_tiny() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER);
  return module;
}
"""

TORCH = """
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

TORCH_LIBRARY(zerocompile_test, m) { m.def("twice(Tensor x) -> Tensor", [](const at::Tensor& x) { return x + x; }); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("has_cuda", [] { return at::globalContext().hasCUDA(); });
}
"""

# Counts the compilations, and hangs in them for as long as the file `hang` exists.
WRAPPER = """#!/bin/bash
if [[ "$*" == *" -c "* ]]; then
  echo "$*" >> "{log}"
  while [ -e "{hang}" ]; do touch "{started}"; sleep 0.05; done
fi
exec c++ "$@"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(TINY)
    (sources / "tiny.h").write_text("#define ANSWER 42\n")
    return Recipe("zerocompile_test.tiny", sources, compile_flags=("-fPIC",))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "cache"


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one line for each run of the compiler."""
    log = tmp_path / "compilations"
    log.touch()
    wrapper = tmp_path / "compiler"
    wrapper.write_text(WRAPPER.format(log=log, hang=tmp_path / "hang", started=tmp_path / "started"))
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return log


def count(compilations: Path) -> int:
    return len(compilations.read_text().splitlines())


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


# -- building and the cache --------------------------------------------------------------------------------------------


def test_builds_once_and_imports(recipe: Recipe, cache: Path, compilations: Path) -> None:
    binary = runtime_build.build(recipe, cache)
    assert runtime_build.build(recipe, cache) == binary
    assert count(compilations) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert names(cache) == sorted(["build.lock", binary.name, f"{binary.stem}.json"])

    module = runtime_build.import_binary(recipe.module, binary)
    try:
        assert module.answer == 42
        assert runtime_build.import_binary(recipe.module, cache / "never looked at") is module
    finally:
        del sys.modules[recipe.module]


def test_every_source_file_is_compiled(recipe: Recipe, cache: Path, compilations: Path) -> None:
    (recipe.sources / "other.cpp").write_text("int other() { return 1; }\n")
    runtime_build.build(recipe, cache)
    assert count(compilations) == 2


def test_key_covers_all_that_determines_the_binary(recipe: Recipe) -> None:
    compiler = runtime_build.find_compiler()
    changed = [
        replace(recipe, compile_flags=("-fPIC", "-O1")),
        replace(recipe, link_flags=("-lm",)),
        replace(recipe, versions=("2.12.0",)),
        replace(recipe, module="zerocompile_test.other"),
    ]
    keys = {runtime_build.fingerprint(each, compiler) for each in [recipe, *changed]}
    keys.add(runtime_build.fingerprint(recipe, replace(compiler, version="another compiler")))
    keys.add(runtime_build.fingerprint(recipe, replace(compiler, command=("/another/path",))))
    for file in ["tiny.cpp", "tiny.h"]:
        with (recipe.sources / file).open("a") as source:
            source.write("// changed\n")
        keys.add(runtime_build.fingerprint(recipe, compiler))
    assert len(keys) == 9
    assert runtime_build.fingerprint(recipe, compiler) == runtime_build.fingerprint(recipe, compiler)


def test_concurrent_processes_build_once(
    recipe: Recipe, cache: Path, compilations: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hang = compilations.with_name("hang")
    hang.touch()
    builders = [FORK.Process(target=runtime_build.build, args=(recipe, cache)) for _ in range(3)]
    for builder in builders:
        builder.start()
    wait_for(compilations.with_name("started"))
    # Long enough for the others to arrive at the lock.
    time.sleep(0.3)
    hang.unlink()
    for builder in builders:
        builder.join(timeout=30)
    assert [builder.exitcode for builder in builders] == [0, 0, 0]
    assert count(compilations) == 1
    assert len(list(cache.glob("*.so"))) == 1

    caplog.clear()
    runtime_build.build(recipe, cache)
    assert not caplog.records


def test_killed_builder_neither_blocks_nor_leaves_junk(recipe: Recipe, cache: Path, compilations: Path) -> None:
    hang = compilations.with_name("hang")
    hang.touch()
    builder = FORK.Process(target=build_in_new_group, args=(recipe, cache))
    builder.start()
    assert builder.pid is not None
    wait_for(compilations.with_name("started"))
    # The builder alone dies, as under the out-of-memory killer: its compiler lives on for a while.
    builder.kill()
    builder.join()
    try:
        assert len(list(cache.glob("build-*"))) == 1
        assert not list(cache.glob("*.so"))
        # Only the orphan of the killed builder goes on hanging: it looks for the file under the old name.
        Path(os.environ["CXX"]).write_text(Path(os.environ["CXX"]).read_text().replace(str(hang), "/nonexistent"))
        start = time.monotonic()
        binary = runtime_build.build(recipe, cache)
        assert time.monotonic() - start < 20
        assert names(cache) == sorted(["build.lock", binary.name, f"{binary.stem}.json"])
    finally:
        hang.unlink()
        os.killpg(builder.pid, signal.SIGKILL)


def build_in_new_group(recipe: Recipe, cache: Path) -> None:
    os.setpgid(0, 0)
    runtime_build.build(recipe, cache)


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_builder_says_what_it_does(recipe: Recipe, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime_build.build(recipe, cache)
    runtime_build.build(recipe, cache)
    before, record = caplog.records
    assert "Compiling the C++ extension zerocompile_test.tiny;" in before.message
    assert record.name == "lightning_zerocompile"
    assert record.levelno == logging.INFO
    assert re.search(r"Compiled the C\+\+ extension zerocompile_test.tiny in \d+\.\d s", record.message)
    assert str(cache) in record.message


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(runtime_build.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runtime_build.cache_directory() == tmp_path / ".cache" / "lightning_zerocompile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert runtime_build.cache_directory() == tmp_path / "xdg" / "lightning_zerocompile"
    monkeypatch.setenv(runtime_build.CACHE_VARIABLE, "~/mine")
    assert runtime_build.cache_directory() == tmp_path / "mine"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0a0+git1234567", "2.15.0+cpu"])
def test_supported_torch(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime_build.check_torch_version(version)


@pytest.mark.parametrize("version", ["2.16.0.dev20270101+cpu", "3.0.0"])
def test_newer_torch_is_tried(version: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(f"torch {version} is newer")) as caught:
        runtime_build.check_torch_version(version)
    assert "pip install 'torch>=2.11,<2.16'" in str(caught[0].message)


@pytest.mark.parametrize("version", ["2.10.2", "1.13.1", "unknown"])
def test_unsupported_torch(version: str) -> None:
    with pytest.raises(ExtensionBuildError, match=re.escape(f"torch {version} is installed")) as caught:
        runtime_build.check_torch_version(version)
    assert "pip install 'torch>=2.11,<2.16'" in str(caught.value)


def test_load_checks_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, runtime_build.MODULE, raising=False)
    monkeypatch.setattr("torch.__version__", "2.9.0")
    with pytest.raises(ExtensionBuildError, match=re.escape("torch 2.9.0 is installed")):
        runtime_build.load()


def test_no_compiler(recipe: Recipe, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExtensionBuildError, match=r"no compiler was found: c\+\+, g\+\+ and clang\+\+"):
        runtime_build.build(recipe, cache)
    monkeypatch.setenv("CXX", "my-compiler --quiet")
    with pytest.raises(ExtensionBuildError, match="CXX is set to 'my-compiler --quiet'"):
        runtime_build.build(recipe, cache)


def test_compiler_with_arguments(recipe: Recipe, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ -DUNUSED")
    assert runtime_build.find_compiler().command[1:] == ("-DUNUSED",)
    assert runtime_build.build(recipe, cache).exists()


def test_unusable_compiler(recipe: Recipe, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x00")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ExtensionBuildError, match="Cannot run the C\\+\\+ compiler"):
        runtime_build.build(recipe, cache)


def test_compile_error_shows_command_and_message(recipe: Recipe, cache: Path) -> None:
    (recipe.sources / "tiny.cpp").write_text("int value = missing_name;\n")
    with pytest.raises(ExtensionBuildError, match="missing_name") as caught:
        runtime_build.build(recipe, cache)
    assert re.search(r"Command: \S+ .*-fPIC .*tiny\.cpp", str(caught.value))
    assert names(cache) == ["build.lock"]


def test_long_compiler_output_is_cut(recipe: Recipe, cache: Path) -> None:
    (recipe.sources / "tiny.cpp").write_text("\n".join(f"int value{i} = missing_{i};" for i in range(200)))
    with pytest.raises(ExtensionBuildError, match="missing_199") as caught:
        runtime_build.build(recipe, cache)
    assert len(str(caught.value).splitlines()) < 40


def test_missing_python_headers(recipe: Recipe, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ExtensionBuildError, match=r"no Python\.h"):
        runtime_build.build(recipe, cache)


def test_missing_sources(recipe: Recipe, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ExtensionBuildError, match=r"no C\+\+ sources"):
        runtime_build.build(replace(recipe, sources=tmp_path / "nowhere"), cache)


def test_cache_below_a_file(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExtensionBuildError, match="Set LIGHTNING_ZEROCOMPILE_CACHE to a directory you can write to"):
        runtime_build.build(recipe, tmp_path / "file" / "cache")


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_cache_others_can_write_to(recipe: Recipe, cache: Path, mode: int) -> None:
    binary = runtime_build.build(recipe, cache)
    cache.chmod(mode)
    with pytest.raises(ExtensionBuildError, match=f"delete it \\(rm -r {re.escape(str(cache))}"):
        runtime_build.build(recipe, cache)
    cache.chmod(0o755)
    assert runtime_build.build(recipe, cache) == binary


def test_cache_of_another_user(recipe: Recipe, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_build.build(recipe, cache)
    if os.geteuid() == 0:
        os.chown(cache, 65534, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(ExtensionBuildError, match="belongs to another user"):
        runtime_build.build(recipe, cache)


def test_damaged_binary(recipe: Recipe, cache: Path) -> None:
    binary = runtime_build.build(recipe, cache)
    binary.write_bytes(b"not a library")
    with pytest.raises(ExtensionBuildError, match=f"Delete {re.escape(str(binary))} to build it again"):
        runtime_build.import_binary(recipe.module, binary)
    assert recipe.module not in sys.modules


@pytest.mark.parametrize("how", ["file", "link", "writable"])
def test_a_planted_library_is_refused(recipe: Recipe, cache: Path, tmp_path: Path, how: str) -> None:
    """What another user has left in a folder that was open to all, after it was closed."""
    binary = runtime_build.build(recipe, cache)
    if how == "writable":
        binary.chmod(0o775)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    elif how == "file":
        os.chown(binary, 65534, -1)
    else:
        theirs = binary.rename(tmp_path / "theirs.so")
        os.chown(theirs, 65534, -1)
        binary.symlink_to(theirs)
    for use in (lambda: runtime_build.build(recipe, cache), lambda: runtime_build.import_binary(recipe.module, binary)):
        with pytest.raises(ExtensionBuildError, match=r"other user.*delete it \(rm -r"):
            use()


def test_a_folder_above_that_all_can_write_to(recipe: Recipe, cache: Path) -> None:
    runtime_build.build(recipe, cache)
    cache.parent.chmod(0o777)
    with pytest.raises(ExtensionBuildError, match=f"{re.escape(str(cache.parent))} can be written to by other users"):
        runtime_build.build(recipe, cache)
    cache.parent.chmod(0o1777)
    runtime_build.build(recipe, cache)


def test_a_library_that_is_cut_short_is_built_again(recipe: Recipe, cache: Path, compilations: Path) -> None:
    """Opening it would end the process with a bus error."""
    binary = runtime_build.build(recipe, cache)
    os.truncate(binary, 4096)
    with pytest.raises(ExtensionBuildError, match="its checksum differs"):
        runtime_build.import_binary(recipe.module, binary)
    assert runtime_build.build(recipe, cache) == binary and binary.stat().st_size > 4096
    binary.with_suffix(".json").write_text("{")
    assert runtime_build.build(recipe, cache) == binary
    assert count(compilations) == 3


def test_a_warm_cache_needs_no_compiler(recipe: Recipe, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    binary = runtime_build.build(recipe, cache)
    monkeypatch.setenv("PATH", "/nowhere")
    assert runtime_build.build(recipe, cache) == binary
    with pytest.raises(ExtensionBuildError, match="no compiler was found"):
        runtime_build.build(replace(recipe, versions=("another torch",)), cache)


def test_the_key_does_not_hold_where_torch_is(recipe: Recipe) -> None:
    """Another environment with the same torch finds the library; a torch without records is known by its place."""
    compiler, keys = runtime_build.find_compiler(), set()
    for root in ("/a/torch", "/b/torch"):
        flags = (f"-isystem{root}/include",)
        keys.add(runtime_build.fingerprint(replace(recipe, compile_flags=flags, locations=(root,)), compiler))
        keys.add(runtime_build.fingerprint(replace(recipe, compile_flags=flags), compiler))
    assert len(keys) == 3


def test_a_long_build_shows_that_it_is_alive(
    recipe: Recipe, cache: Path, compilations: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_build, "_HEARTBEAT", 0.1)
    hang = compilations.with_name("hang")
    hang.touch()
    threading.Timer(0.8, hang.unlink).start()
    runtime_build.build(recipe, cache)
    assert sum("Still compiling the C++ extension after" in record.message for record in caplog.records) >= 2


def test_build_command(
    recipe: Recipe, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints where the library is; or why there is none, with status 1."""
    monkeypatch.setattr(runtime_build, "MODULE", recipe.module)
    monkeypatch.setattr(runtime_build, "torch_recipe", lambda *_: recipe)
    monkeypatch.setenv(runtime_build.CACHE_VARIABLE, str(cache))
    try:
        assert build.main([]) == 0
    finally:
        sys.modules.pop(recipe.module, None)
    assert Path(capsys.readouterr().out.strip()).parent == cache
    cache.chmod(0o777)
    assert build.main([]) == 1 and "rm -r" in capsys.readouterr().err


# -- against torch -----------------------------------------------------------------------------------------------------

LOAD_FROM = """
import sys, time, torch
from pathlib import Path
from lightning_zerocompile.runtime import build as runtime_build
start = time.perf_counter()
recipe = runtime_build.torch_recipe("zerocompile_test._mini", Path(sys.argv[1]))
module = runtime_build.import_binary(recipe.module, runtime_build.build(recipe, Path(sys.argv[2])))
print(time.perf_counter() - start)
assert runtime_build.import_binary(recipe.module, Path("never looked at")) is module
assert module.has_cuda() == torch.cuda.is_available()
assert torch.equal(torch.ops.zerocompile_test.twice(torch.ones(2)), torch.full((2,), 2.0))
"""

LOAD = """
import time, torch
from lightning_zerocompile.runtime import build as runtime_build
start = time.perf_counter()
module = runtime_build.load()
print(time.perf_counter() - start)
assert runtime_build.load() is module
assert torch.ops.zerocompile.gather.default
runtime_build._announce("compiled in 1.0 s")
"""


def seconds(*arguments: str, says: str = "") -> float:
    result = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert says in result.stderr
    return float(result.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.slow
def test_torch_extension(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mini.cpp").write_text(TORCH)
    start = time.perf_counter()
    runtime_build.build(runtime_build.torch_recipe("zerocompile_test._mini", tmp_path), cache)
    assert time.perf_counter() - start > 1
    assert seconds(LOAD_FROM, str(tmp_path), str(cache)) < 1


@pytest.mark.slow
def test_load_from_a_warm_cache() -> None:
    """In under a second; and the line about a build is seen where no logging is configured."""
    runtime_build.load()
    assert seconds(LOAD, says="compiled in 1.0 s\n") < 1


def test_sanitizers_are_part_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a build has a key of its own; what is not understood is an error."""
    plain = runtime_build.torch_recipe("zerocompile_test.tiny", runtime_build.source_directory())
    monkeypatch.setenv(runtime_build.SANITIZE_VARIABLE, "address, undefined")
    sanitized = runtime_build.torch_recipe("zerocompile_test.tiny", runtime_build.source_directory())
    assert "-fsanitize=address,undefined" in sanitized.compile_flags and sanitized != plain
    assert "-fsanitize=address,undefined" in sanitized.link_flags
    for wrong in ("addres", "address,thread"):
        monkeypatch.setenv(runtime_build.SANITIZE_VARIABLE, wrong)
        with pytest.raises(ExtensionBuildError, match=runtime_build.SANITIZE_VARIABLE):
            runtime_build.sanitizer_flags()
