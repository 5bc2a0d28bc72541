"""Builds the C++ extension at first use and imports it.

A binary fits one torch release, one Python and one compiler, so none is shipped: the package carries the sources, and
the first process that needs them compiles them into a per-user cache with the plain C++ compiler. No CUDA toolkit, no
ninja and no build isolation are involved.

[Note: one build per node]
All processes of a node start together and want the same binary. They queue at a file lock; the first one builds in a
private directory and renames the result into place, the others find it there. The kernel drops the lock of a process
that dies, and the next holder of the lock removes what the dead process has left.

[Note: what is loaded] A library runs code in this process as soon as it is opened, and one that is cut short ends the
process. So a library is opened only if three things are true. Its record is beside it (the record is written after the
library is on the disk). Its content has the record's checksum. No other user could have put it there or can write to
it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

MODULE = "lightning_zerocompile.runtime.core"  # typed by core.pyi
CACHE_VARIABLE = "LIGHTNING_ZEROCOMPILE_CACHE"
SANITIZE_VARIABLE = "LIGHTNING_ZEROCOMPILE_SANITIZE"
SANITIZERS = ("address", "undefined", "thread")
TORCH_MINIMUM = (2, 11)
TORCH_LIMIT = (2, 16)
_OUTPUT_LINES = 30
_HEARTBEAT = 15.0  # seconds between two lines about a build
_UNITS_AT_MOST = 8  # more of them are not ready sooner, see _units


class ExtensionBuildError(RuntimeError):
    """The C++ extension cannot be built or loaded; the message says why and what to do."""


class NoCompilerError(ExtensionBuildError):
    """There is no compiler on this machine; a library that was built before can still be loaded."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that starts it and what it says about itself."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Recipe:
    """What to build and how: together with the compiler, all that determines the binary.

    ``locations`` are folders that occur in the flags. ``versions`` describes their content, so the cache's key does not
    hold their names.
    """

    module: str
    sources: Path
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    locations: tuple[str, ...] = ()


def load() -> ModuleType:
    """Return the extension module, building it if this is its first use on this machine.

    Importing it registers the ``zerocompile`` operators with torch, once per process: later calls return the module
    that is already imported.

    Raises:
        ExtensionBuildError: torch is out of the supported range, there is no working compiler, the sources do not
            compile, or the cache directory cannot be used.
    """
    loaded = sys.modules.get(MODULE)
    return import_binary(MODULE, binary()) if loaded is None else loaded


def binary() -> Path:
    """The extension's library, built if it is not there yet; raises as :func:`load`."""
    if not sys.platform.startswith("linux"):
        raise ExtensionBuildError(f"lightning_zerocompile runs on Linux only, but this platform is {sys.platform!r}.")
    check_torch_version(torch.__version__)
    return build(torch_recipe(MODULE, source_directory()), cache_directory())


def check_torch_version(version: str) -> None:
    """Raise if torch is older than what the C++ sources are written for; warn if it is newer than what they are tested
    with."""
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if TORCH_MINIMUM <= release < TORCH_LIMIT:
        return
    supported = f"torch>={TORCH_MINIMUM[0]}.{TORCH_MINIMUM[1]},<{TORCH_LIMIT[0]}.{TORCH_LIMIT[1]}"
    if release >= TORCH_LIMIT:
        warnings.warn(
            f"torch {version} is newer than the releases that lightning_zerocompile is tested with, {supported}. If "
            "its C++ extension does not compile, or training differs from DDP's, install one of those: "
            f"pip install '{supported}'",
            stacklevel=2,
        )
        return
    raise ExtensionBuildError(
        f"lightning_zerocompile needs {supported}, but torch {version} is installed. "
        f"Install a supported release: pip install '{supported}'"
    )


def source_directory() -> Path:
    """The directory of the C++ sources: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def cache_directory() -> Path:
    """The directory that holds the built binaries of this user."""
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ExtensionBuildError(
            f"No cache directory for the C++ extension: {error} Set {CACHE_VARIABLE} to a directory you can write to."
        ) from error
    return Path(base).absolute() / "lightning_zerocompile"


def torch_recipe(module: str, sources: Path) -> Recipe:
    """How a pybind11 module that uses torch is built against the torch that is running."""
    root = Path(torch.__file__).resolve().parent
    # -isystem: warnings inside torch's headers are not ours to fix.
    headers = [root / "include", root / "include/torch/csrc/api/include"]
    content = _installed_content(root)
    return Recipe(
        module=module,
        sources=sources,
        compile_flags=(
            "-std=c++20",
            "-O2",
            "-fPIC",
            "-fvisibility=hidden",
            "-DUSE_C10D_GLOO",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-DTORCH_EXTENSION_NAME={module.rpartition('.')[2]}",
            *(f"-isystem{path}" for path in headers),
            *sanitizer_flags(),
        ),
        # No rpath: torch is imported before the extension, so its libraries are already in the process.
        link_flags=(f"-L{root / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", *sanitizer_flags()),
        versions=(torch.__version__, str(torch.version.git_version), content),
        locations=(str(root),) if content else (),
    )


def sanitizer_flags() -> tuple[str, ...]:
    """Flags of a build with sanitizers: ``LIGHTNING_ZEROCOMPILE_SANITIZE=address,undefined``, or ``thread``.

    The process must load the sanitizer's library before all others: see tests/dist/training/test_sanitizers.py.

    Raises:
        ExtensionBuildError: the variable names something else.
    """
    chosen = [name for name in os.environ.get(SANITIZE_VARIABLE, "").replace(" ", "").split(",") if name]
    if not chosen:
        return ()
    if not set(chosen) <= set(SANITIZERS) or {"address", "thread"} <= set(chosen):
        raise ExtensionBuildError(
            f"{SANITIZE_VARIABLE}={','.join(chosen)!r} is not understood: name some of {', '.join(SANITIZERS)}, "
            "separated by commas; address and thread exclude each other."
        )
    # vptr needs the type information of torch's classes, which torch hides.
    flags = ["-g", "-fno-omit-frame-pointer", f"-fsanitize={','.join(chosen)}"]
    return (*flags, *(("-fno-sanitize=vptr", "-fno-sanitize-recover=undefined") if "undefined" in chosen else ()))


def _installed_content(root: Path) -> str:
    """A digest of torch's headers and libraries as its installer has recorded them; empty if there is no record."""
    try:
        distribution = metadata.distribution("torch")
        if Path(str(distribution.locate_file("torch"))).resolve() != root:
            return ""
        lines = (distribution.read_text("RECORD") or "").splitlines()
    except (metadata.PackageNotFoundError, OSError):
        return ""
    kept = sorted(line for line in lines if line.startswith(("torch/include/", "torch/lib/")) and "sha256=" in line)
    return hashlib.sha256("\n".join(kept).encode()).hexdigest() if kept else ""


def build(recipe: Recipe, cache: Path) -> Path:
    """Return the binary of ``recipe`` in the directory ``cache``, compiling it if it is not there yet."""
    name = recipe.module.rpartition(".")[2]
    try:
        compiler = find_compiler()
    except NoCompilerError:
        found = [path for path in cache.glob(f"{name}-{_recipe_key(recipe)}-*.so") if _is_whole(path)]
        if not found:
            raise
        binary = max(found, key=os.path.getmtime)
        check_trusted(binary)
        return binary
    binary = cache / f"{name}-{fingerprint(recipe, compiler)}.so"

    def make(directory: Path) -> Path:
        start = time.perf_counter()
        library = _compile(recipe, compiler, directory)
        _announce(
            f"Compiled the C++ extension {recipe.module} in {time.perf_counter() - start:.1f} s; "
            f"later runs load it from {binary}"
        )
        return library

    provide(binary, make, compiler.version)
    return binary


def provide(target: Path, make: Callable[[Path], Path], compiler: str) -> None:
    """See to it that a file is in the cache, whole, and that no other user could have put it there.

    Args:
        target: the file; its folder is the cache.
        make: makes the file in the folder that it is given, and returns its path. Called if ``target`` is not there.
        compiler: what made it, for the record.

    Raises:
        ExtensionBuildError: the cache directory cannot be used.
    """
    cache = target.parent
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(cache)
        if not _is_whole(target):
            # [Note: one build per node]
            with _locked(cache / "build.lock"):
                if not _is_whole(target):
                    _make_and_publish(target, make, compiler)
        check_trusted(target)
    except OSError as error:
        raise ExtensionBuildError(
            f"Cannot use {cache} as the cache of the C++ extension: {error}. "
            f"Set {CACHE_VARIABLE} to a directory you can write to, preferably on a local disk."
        ) from error


def import_binary(module: str, binary: Path) -> ModuleType:
    """Import the extension ``binary`` under the name ``module``, unless that is imported already.

    Raises:
        ExtensionBuildError: the library is damaged, or another user could have put it there; it is not opened then.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        return loaded
    check_trusted(binary)
    if not _is_whole(binary):
        raise ExtensionBuildError(
            f"The C++ extension {binary} is not what was built: its checksum differs. "
            f"Delete {binary} to build it again."
        )
    spec = spec_from_file_location(module, binary, loader=ExtensionFileLoader(module, str(binary)))
    if spec is None or spec.loader is None:
        raise ExtensionBuildError(f"Python cannot import extension modules from {binary}.")
    try:
        loaded = module_from_spec(spec)
        spec.loader.exec_module(loaded)
    except ImportError as error:
        raise ExtensionBuildError(
            f"The C++ extension was built, but cannot be loaded: {error}. Delete {binary} to build it again; "
            "if that does not help, set CXX to a compiler that fits this Python and torch."
        ) from error
    return sys.modules.setdefault(module, loaded)


def find_compiler() -> Compiler:
    """The compiler named by ``CXX``, or else the first usual one on the path."""
    chosen = os.environ.get("CXX", "").strip()
    for candidate in [chosen] if chosen else ["c++", "g++", "clang++"]:
        program, *arguments = shlex.split(candidate)
        path = shutil.which(program)
        if path:
            command = (path, *arguments)
            return Compiler(command, version=_run([*command, "--version"]))
    tried = (
        f"CXX is set to {chosen!r}, which is not on the path" if chosen else "c++, g++ and clang++ are not on the path"
    )
    raise NoCompilerError(
        f"The C++ extension of lightning_zerocompile is compiled at first use, but no compiler was found: {tried}. "
        "Install one (for example: apt install g++, or conda install cxx-compiler), or set CXX to its path."
    )


def fingerprint(recipe: Recipe, compiler: Compiler) -> str:
    """The cache key: changes with everything that can change the binary."""
    return f"{_recipe_key(recipe)}-{hashlib.sha256(repr(compiler).encode()).hexdigest()[:12]}"


def _recipe_key(recipe: Recipe) -> str:
    """The part of the key that does not depend on the compiler."""
    contents = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in _source_files(recipe.sources)]
    flags = [*recipe.compile_flags, "", *recipe.link_flags]
    for number, location in enumerate(recipe.locations):
        flags = [flag.replace(location, f"<{number}>") for flag in flags]
    inputs = (recipe.module, flags, recipe.versions, sysconfig.get_config_var("EXT_SUFFIX"), contents)
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:24]


def _source_files(directory: Path) -> list[Path]:
    sources = sorted(directory.glob("*.cpp"))
    if not sources:
        raise ExtensionBuildError(
            f"There are no C++ sources in {directory}. Install the package again: pip install --force-reinstall "
            "--no-deps lightning-zerocompile"
        )
    return sources + sorted(directory.glob("*.h"))


def _record(binary: Path) -> Path:
    return binary.with_suffix(".json")


def _is_whole(binary: Path) -> bool:
    """Whether a library is as it was built: see [Note: what is loaded]."""
    try:
        expected = json.loads(_record(binary).read_bytes())["sha256"]
        return bool(hashlib.sha256(binary.read_bytes()).hexdigest() == expected)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_trusted(path: Path) -> None:
    """Raise if another user than root could have placed, or could change, what is at ``path``.

    All folders and links on the way to ``path`` are checked, and so are the places to which the links lead.
    """
    links = [each for each in (path, *path.parents) if each.is_symlink()]
    real = path.resolve()
    for each in (*links, real, *real.parents):
        status = each.stat(follow_symlinks=False)
        mine = each in (path, real) or (real.is_file() and each in (path.parent, real.parent))
        if status.st_uid not in (os.geteuid(), 0):
            problem = f"{each} belongs to another user (uid {status.st_uid})"
        elif stat.S_ISLNK(status.st_mode) or not _others_write(status, mine):
            continue
        else:
            problem = f"{each} can be written to by other users"
        remedy = f"delete it (rm -r {shlex.quote(str(each))}), or " if mine else ""
        raise ExtensionBuildError(
            f"Refusing to load a binary from {path}: {problem}, who could have put anything there. "
            f"To fix this, {remedy}set {CACHE_VARIABLE} to a directory of your own."
        )


def _others_write(status: os.stat_result, mine: bool) -> bool:
    if not mine and status.st_mode & stat.S_ISVTX:
        return False  # in a directory with the sticky bit only an entry's owner can replace the entry
    # where folders are made with the umask 002, the group of a folder above is the user's own
    private = not mine and status.st_gid in (os.getegid(), 0) and status.st_uid in (os.geteuid(), 0)
    return bool(status.st_mode & (stat.S_IWOTH if private else stat.S_IWOTH | stat.S_IWGRP))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Not at the top: the module exists on Unix only, and load() should be able to say so.
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _announce(f"Waiting for another process that compiles the C++ extension (it holds {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing is not enough if the process forked meanwhile: the child shares the lock.
            fcntl.flock(file, fcntl.LOCK_UN)


def _make_and_publish(target: Path, make: Callable[[Path], Path], compiler: str) -> None:
    """Make a file in a directory of its own and publish it by renaming, so that no one ever sees half a file."""
    # The node's name: where a shared file system keeps locks local, another node may be building right now.
    prefix = f"build-{platform.node()}-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as directory:
        made = make(Path(directory))
        record = {"sha256": hashlib.sha256(made.read_bytes()).hexdigest(), "compiler": compiler}
        written = Path(directory) / "record"
        written.write_text(json.dumps(record))
        _sync(made)
        _sync(written)
        _record(target).unlink(missing_ok=True)
        made.rename(target)
        written.rename(_record(target))
        _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compile(recipe: Recipe, compiler: Compiler, directory: Path) -> Path:
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        raise ExtensionBuildError(
            f"The C++ extension needs the C headers of Python, but {python} has no Python.h. Install them "
            f"(for example: apt install python{sys.version_info.major}.{sys.version_info.minor}-dev)."
        )
    flags = (*recipe.compile_flags, f"-isystem{python}")

    def compile_unit(unit: Sequence[Path]) -> str:
        target = str(directory / f"{unit[0].stem}.o")
        included = [part for source in unit for part in ("-include", str(source))]
        _run([*compiler.command, *flags, *included, "-x", "c++", "-c", os.devnull, "-o", target], temporary=directory)
        return target

    workers, start = len(os.sched_getaffinity(0)), time.perf_counter()
    sources = [path for path in _source_files(recipe.sources) if path.suffix == ".cpp"]
    units = _units(sources, min(workers, _UNITS_AT_MOST))
    _announce(f"Compiling the C++ extension {recipe.module}; this is done once and takes about a minute")
    with ThreadPoolExecutor(max_workers=workers) as pool:
        waiting = set(jobs := [pool.submit(compile_unit, unit) for unit in units])
        try:
            while waiting:
                done, waiting = wait(waiting, _HEARTBEAT, FIRST_EXCEPTION)
                for job in done:
                    job.result()
                if waiting:
                    _announce(f"Still compiling the C++ extension after {time.perf_counter() - start:.0f} s")
        finally:
            pool.shutdown(cancel_futures=True)
    objects = [job.result() for job in jobs]
    library = directory / "extension.so"
    _run([*compiler.command, "-shared", *objects, *recipe.link_flags, "-o", str(library)], temporary=directory)
    return library


def _units(sources: Sequence[Path], count: int) -> list[list[Path]]:
    """Divide the sources into at most ``count`` translation units of about the same size.

    A compiler spends some 20 s on torch's headers, whatever the file that includes them: 23 files took 250 s on two
    cores, two units take 50 s.
    """
    units: list[list[Path]] = [[] for _ in range(min(count, len(sources)))]
    for source in sorted(sources, key=lambda path: path.stat().st_size, reverse=True):
        min(units, key=lambda unit: sum(path.stat().st_size for path in unit)).append(source)
    return units


def _run(command: Sequence[str], temporary: Path | None = None) -> str:
    """Run a compiler command and return its output. Its temporary files go into ``temporary``."""
    # The language of the output would otherwise be part of the cache key.
    environment = os.environ | {"LC_ALL": "C"} | ({"TMPDIR": str(temporary)} if temporary else {})
    try:
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ExtensionBuildError(f"Cannot run the C++ compiler {command[0]}: {error}. Set CXX to another.") from error
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-_OUTPUT_LINES:])
        raise ExtensionBuildError(
            f"Building the C++ extension failed (exit status {result.returncode}). It needs a compiler for C++20, such "
            f"as g++ 11 or later; CXX selects another one.\nCommand: {shlex.join(command)}\n{tail}"
        )
    return result.stdout


def _announce(message: str) -> None:
    """Log a line that is seen by default: a first start that takes a minute must not look like a hang."""
    logger = logging.getLogger("lightning_zerocompile")
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.info(message)
