"""Training with the extension built by AddressSanitizer and UndefinedBehaviorSanitizer: they end the process."""

from __future__ import annotations

import os
import subprocess

import pytest

from lightning_zerocompile.runtime.build import SANITIZE_VARIABLE, find_compiler
from tests.support.harness import two_scripts

SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
from tests.support import engines, models
for stage in (1, 2, 3):
    for scope in (False, "blocks"):
        model = models.Whole(models.ByteModel())
        data = models.Batches(models.rank())
        with engines.engine(model, stage, compile=scope, compile_options={"backend": "aot_eager"}) as engine:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            engine.attach_optimizers([optimizer])
            for number in range(2):
                engines.step(engine, optimizer, lambda: engines.token_loss(model, data[number]))
            with engine.windows.open("auto", 1, None), engine.training_step():
                for number in range(2):
                    engines.backward(engine, engines.token_loss(model, data[number]))
            optimizer.step()
            with engine.full_parameters(model, writeback=True) as values:
                for value in values.values():
                    value.mul_(0.5)
            try:
                with engine.training_step():
                    engines.backward(engine, engines.FailsInBackward.apply(engines.token_loss(model, data[0])))
            except ValueError:
                pass
            engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
        torch._dynamo.reset()
dist.destroy_process_group()
print("trained", flush=True)
"""


def _library(name: str) -> str:
    command = [*find_compiler().command, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("sanitizers", "library"), [("address,undefined", "libasan.so"), ("thread", "libtsan.so")])
def test_trains_with_sanitizers(sanitizers: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes for the build, once; later runs take it from the cache."""
    libraries = [_library(name) for name in (library, "libstdc++.so")]
    if not all(os.path.isabs(path) for path in libraries):
        pytest.skip(f"the compiler has no {library}")
    monkeypatch.setenv(SANITIZE_VARIABLE, sanitizers)
    monkeypatch.setenv("LD_PRELOAD", " ".join(libraries))
    monkeypatch.setenv("TSAN_OPTIONS", "ignore_noninstrumented_modules=1")  # torch, gloo and Python
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0")  # Python itself leaks at its end
    monkeypatch.setenv("UBSAN_OPTIONS", "print_stacktrace=1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with two_scripts(SCRIPT) as processes:
        for process in processes:
            _, errors = process.communicate(timeout=1200)
            assert process.returncode == 0 and "Sanitizer" not in errors and "runtime error:" not in errors, errors[
                -6000:
            ]
