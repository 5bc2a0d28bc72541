"""Options and the process groups that all distributed tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lightning_zerocompile.runtime import build
from tests.cells import covering, is_covered
from tests.smoke import is_smoke
from tests.support import harness


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the cells that are left out by default")
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo; cuda: NCCL, one GPU a rank")
    parser.addoption("--ranks", type=int, default=2, help="of the tests that hold for any number of them")
    parser.addoption("--share-gpus", action="store_true", help="where ranks outnumber GPUs, several use one: no timing")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what has not the mark that was asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_smoke(item.nodeid):
            item.add_marker(pytest.mark.smoke)
    if not config.getoption("--long"):
        _leave_out(config, items, {item.nodeid for item in items if "long" in item.keywords})
        if not config.getoption("keyword") and not any("::" in argument for argument in config.args):
            _leave_out(config, items, _beside_the_covering(items))
    if torch.cuda.is_available() and config.getoption("--device") == "cuda":
        return
    skip = pytest.mark.skip(reason="needs a GPU and --device cuda")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _leave_out(config: pytest.Config, items: list[pytest.Item], tests: set[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in tests])
    items[:] = [item for item in items if item.nodeid not in tests]


def _beside_the_covering(items: list[pytest.Item]) -> set[str]:
    """Cells that only ``--long`` runs, see [Note: cells]."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and is_covered(item.nodeid):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for tests in functions.values():
        cells = [{name: repr(value) for name, value in test.callspec.params.items()} for test in tests]
        kept = set(covering(cells))
        left_out |= {test.nodeid for number, test in enumerate(tests) if number not in kept}
    return {test for test in left_out if not is_smoke(test)}


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether a test that runs many cells runs all of them."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def all_worlds(device: str, request: pytest.FixtureRequest) -> Iterator[harness.Worlds]:
    build.load()  # here, so that no test's time limit includes the build
    share, ranks = request.config.getoption("--share-gpus"), request.config.getoption("--ranks")
    with harness.worlds(device, share, ranks) as groups:
        yield groups


@pytest.fixture(scope="module")
def worlds(all_worlds: harness.Worlds, device: str) -> Iterator[harness.Worlds]:
    """One file's groups: what compilers keep for good makes every later test slower."""
    yield all_worlds
    if device == "cpu":  # a fork costs little; on GPUs a start costs more than it saves
        all_worlds.close()


@pytest.fixture
def ranks(worlds: harness.Worlds) -> harness.Ranks:
    """As many as ``--ranks`` says."""
    return worlds()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """In this process, so that the test that left it fails, not a later one that makes its own process group.

    A Trainer writes to the environment where its process group is, and processes that a later test starts would read
    that: so the environment is what it was before.
    """
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        del os.environ[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("this test left a process group in the process that runs the tests: use the fixture `one_process`")


@pytest.fixture
def one_process(nothing_is_left: None) -> Iterator[None]:
    """For a test that trains in this process: its process group is destroyed."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def a_gpu_a_rank(request: pytest.FixtureRequest) -> None:
    """For tests that measure times of a device."""
    if request.config.getoption("--share-gpus"):
        pytest.skip("ranks that share a GPU take turns on it, so their times say nothing")
