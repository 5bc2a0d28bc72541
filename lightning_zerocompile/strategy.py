"""The Lightning surface: options, steps and what users call, each delegating to the module that does the work."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zerocompile.compile.backend import CompileStats
from lightning_zerocompile.config import CompileScope, Config, as_dtype, refuse_old_names
from lightning_zerocompile.ranks.errors import phase
from lightning_zerocompile.runtime.runtime import EagerReads, Stats
from lightning_zerocompile.runtime.window import Gathers
from lightning_zerocompile.sharding_strategy import ShardingStrategy


class ZeroCompileStrategy(ShardingStrategy):
    """Trains any LightningModule with ZeRO stage 1, 2 or 3; torch.compile places the communication.

    Args:
        stage: 1 shards optimizer states, 2 gradients too, 3 parameters too.
        compile: ``"blocks"`` (or ``True``): each repeated block of the model is compiled, all equal ones with one
            compilation (a model without any as with ``"model"``); ``"model"``: each top-level child as one graph (of
            one that only holds others, such as a ``ModuleList``, each of these); ``False``: nothing, everything runs
            eagerly.
        backend: ``"inductor"`` or ``"aot_eager"`` (the same graphs and passes without code generation).
        mode: torch.compile's mode. ``"reduce-overhead"`` and ``"max-autotune"`` replay CUDA graphs.
        dynamic: torch.compile's ``dynamic``.
        options: Inductor's options; passes of the user in the slots we need run before ours.
        param_dtype: what floating-point parameters are gathered and computed in; ``None``: their own dtype (or the
            Trainer's precision). With ``torch.bfloat16`` and ``reduce_dtype`` these are FSDP2's numerics.
        cast_forward_inputs: with ``param_dtype``, whether floating-point tensors that are passed to the LightningModule
            itself, to a child of it or to a repeated block are cast to it, as FSDP2 casts what its modules are passed.
        reduce_dtype: dtype of gradient communication; ``None``: that of the gradient.
        master_dtype: what parameters of lower precision are kept in for the optimizer; ``None``: their own dtype.
        unit_bytes: parameters outside repeated blocks are gathered in groups of up to this many bytes, and with
            ``compile="model"`` so are small blocks; where units are gathered or reduced at once (a window opens or
            closes, an optimizer has written them), smaller ones share collectives up to that.
        prefetch: how many units are gathered ahead of their use (stage 3).
        keep_gathered: at stage 3, names of modules (or parameters) that stay gathered from one optimizer step to the
            next, as at stage 2: those that only some ranks use in a step, and small ones that are used often.
        memory_budget: at stage 3, bytes on each device that may be filled with units that stay gathered from one
            optimizer step to the next: those that save most communication. ``"auto"``: three quarters of what is free
            at the peak of the first two steps. Chosen once behind them, with one recompilation. ``None``: none.
        copy_engine: whether parameters are gathered, and bfloat16 gradients exchanged and then summed in float32, by
            copies between the GPUs of one host instead of NCCL's kernels, which take multiprocessors from the compute
            beside them; ``"auto"``: where all ranks are on one host and their GPUs reach each other's memory;
            ``True``: or raise (gathers only).
        defer_grad_sync: at every stage the full gradients of an accumulation (Lightning's
            ``accumulate_grad_batches``, ``block_backward_sync``) wait, unreduced, for its last backward; otherwise only
            at stage 1, while stages 2 and 3 reduce after each backward and hold no full gradient.
        keep_gradients: leave ``p.grad`` after ``optimizer.step()``; by default its memory is released there.
        unshard_after_fit: make the module an ordinary one with full parameters, on the CPU, when ``fit`` has succeeded;
            one parameter at a time, so that a device never holds more than one whole. ``False``: it stays sharded, and
            the next run takes it over. After an exception the module is made whole, too, if all ranks end their run
            within five seconds (at most a tenth of ``timeout``) and, with several of them, run on the CPU. Otherwise it
            stays sharded: it then raises when it is called, when its ``state_dict`` is asked for and in a further fit.
        state_dict_type: ``"full"``: one file with full tensors, as DDP's. ``"sharded"``: a directory to which all ranks
            write their shards. Either loads at any stage, world size and with either setting, and is written in the
            background with Lightning's ``AsyncCheckpointIO()``.
        full_param_optimizers: class names of your optimizers that need whole parameters (Shampoo-like ones, kernels
            that take addresses): they see whole parameters, gradients and states, one unit at a time, on every rank.
            Only for those that update each parameter from its own gradient and state. Torch's own need no mention.
        process_group_backend: default: NCCL on CUDA, gloo on the CPU.
        timeout: how long ranks wait for each other in a collective or for a message. When it ends, or a peer closes its
            connection (gloo), the error names the phase and the rank.

    ``param_dtype``, ``reduce_dtype`` and ``master_dtype`` take a dtype or its name.

    Raises:
        ValueError: an argument is outside what it allows; the message names it and the remedy.
    """

    strategy_name = "zerocompile"

    @refuse_old_names
    def __init__(
        self,
        stage: Literal[1, 2, 3] = 3,
        compile: CompileScope | Literal[True] = "blocks",
        backend: Literal["inductor", "aot_eager"] = "inductor",
        mode: str | None = None,
        dynamic: bool | None = None,
        options: dict[str, Any] | None = None,
        param_dtype: torch.dtype | str | None = None,
        cast_forward_inputs: bool = True,
        reduce_dtype: torch.dtype | str | None = None,
        master_dtype: torch.dtype | str | None = torch.float32,
        unit_bytes: int = 64 * 2**20,
        prefetch: int = 1,
        keep_gathered: Sequence[str] = (),
        memory_budget: int | Literal["auto"] | None = None,
        copy_engine: bool | Literal["auto"] = "auto",
        defer_grad_sync: bool = False,
        keep_gradients: bool = False,
        unshard_after_fit: bool = True,
        state_dict_type: Literal["full", "sharded"] = "full",
        full_param_optimizers: Sequence[str] = (),
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        config = Config(
            stage=stage,
            compile="blocks" if compile is True else compile,
            backend=backend,
            mode=mode,
            dynamic=dynamic,
            options=dict(options) if isinstance(options, dict) else options or {},
            param_dtype=as_dtype("param_dtype", param_dtype),
            cast_forward_inputs=cast_forward_inputs,
            reduce_dtype=as_dtype("reduce_dtype", reduce_dtype),
            master_dtype=as_dtype("master_dtype", master_dtype),
            unit_bytes=unit_bytes,
            prefetch=prefetch,
            keep_gathered=(keep_gathered,) if isinstance(keep_gathered, str) else tuple(keep_gathered),
            memory_budget=memory_budget,
            copy_engine=copy_engine,
            defer_grad_sync=defer_grad_sync,
            keep_gradients=keep_gradients,
            unshard_after_fit=unshard_after_fit,
            state_dict_type=state_dict_type,
            full_param_optimizers=(full_param_optimizers,)
            if isinstance(full_param_optimizers, str)
            else tuple(full_param_optimizers),
            timeout=timeout,
        )
        super().__init__(
            config,
            state_dict_type == "sharded",
            process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    # ---- steps ----

    @override
    @phase("`training_step`")
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context(), self.engine.training_step():
            return self._module.training_step(*args, **kwargs)

    @override
    @phase("`validation_step`")
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        with self.precision_plugin.val_step_context(), self.engine.evaluation_step("a validation", fitting):
            return self._module.validation_step(*args, **kwargs)

    @override
    @phase("`test_step`")
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context(), self.engine.evaluation_step("a test"):
            return self._module.test_step(*args, **kwargs)

    @override
    @phase("`predict_step`")
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context(), self.engine.evaluation_step("a prediction"):
            return self._module.predict_step(*args, **kwargs)

    @override
    @phase("backward")
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    @phase("the optimizer's step")
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.engine.before_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self.engine.after_backward()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients of the backwards inside wait for the next one outside (see ``defer_grad_sync``)."""
        with self.engine.accumulation():
            yield

    @contextmanager
    def coalesce_grad_reduction(
        self,
        gather: Gathers = "auto",
        max_bytes: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
    ) -> Iterator[None]:
        """Any number of backwards inside, one reduction when it closes: every unit is reduced once.

        Gradients from before the window are kept and added to. While it is open this rank holds up to one full gradient
        of the model. Every rank must open the window in the same step; at stages 1 and 2, and at stage 3 with
        ``gather="window"``, ranks may run different numbers of backwards inside, without ``max_bytes``. An exception
        drops the window's gradients without communication (with those of an unfinished accumulation that they were
        added to) and is raised again. Inside, ``zero_grad()`` drops what waits; ``p.grad`` is what it was before, or,
        if that was None, this rank's own full sum, ``[*p.shape]``. Source: DeepSpeed PR 7992.

        Args:
            gather: at stage 3, ``"window"`` gathers every parameter once for all forwards and backwards inside (and
                holds the whole model meanwhile), ``"use"`` gathers each at each use as outside, ``"auto"`` (default)
                is ``"window"`` if parameters, gradients and an optimizer's moments fit in half of what is free on every
                rank; decided in the first window.
            max_bytes: of full gradients that wait; when a backward leaves more, the largest units are reduced then,
                and bound when the window closes.
            accumulate_dtype: ``None``: gradients are summed in their own dtype; ``torch.float32``: in fp32. They are
                communicated in ``reduce_dtype``, or in their own.

        Raises:
            RuntimeError: windows are nested, an accumulation is open, an optimizer steps or clips inside one, a
                parameter with a waiting gradient was frozen, or (where it closes) a rank did not open it, failed
                inside it, or would have met other collectives.
            ValueError: an argument is outside what it allows.
        """
        with self.engine.windows.open(gather, max_bytes, accumulate_dtype):
            yield

    @contextmanager
    def full_parameters(self, module: nn.Module | None = None, writeback: bool = True) -> Iterator[dict[str, Tensor]]:
        """The full values of the module's parameters, by name; all ranks must enter.

        Inside, the modules compute with what is written to the values, while ``parameters()``, optimizers and
        checkpoints keep the values that the parameters had. After an exception nothing that was written counts.

        Args:
            module: a part of the model; default: all of it.
            writeback: whether what is written to the values in place becomes the parameters' value on exit. Every
                rank must write the same.

        Raises:
            RuntimeError: parameters of another, open ``full_parameters`` are asked for (or others that are gathered
                with them); an optimizer steps inside.
        """
        with self.engine.full_parameters(module or self._module, writeback) as values:
            yield values

    def full_gradients(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """The full gradients of the module's parameters, by name, as copies; all ranks must ask.

        They are reduced: the mean over all ranks, as under DDP. Parameters without a gradient are left out.

        Args:
            module: a part of the model; default: all of it.

        Raises:
            RuntimeError: inside ``coalesce_grad_reduction``, where they are not reduced yet; another rank does not ask.
        """
        return self.engine.full_gradients(module or self._module)

    @override
    def on_train_end(self) -> None:
        self.engine.runtime.pass_mark("the end of training")

    @override
    def on_validation_end(self) -> None:
        self.engine.runtime.pass_mark("the end of validation")

    @override
    def on_test_end(self) -> None:
        self.engine.runtime.pass_mark("the end of the test")

    @override
    def on_predict_end(self) -> None:
        self.engine.runtime.pass_mark("the end of prediction")

    # ---- statistics ----

    @property
    def stats(self) -> Stats:
        """What the runtime has done since set-up, or did in the run that has ended; a snapshot."""
        return self.statistics.stats

    @property
    def compile_stats(self) -> CompileStats:
        """Graphs compiled since set-up, or in the run that has ended; a snapshot."""
        return self.statistics.compile_stats

    @property
    def eager_reads(self) -> dict[str, EagerReads]:
        """What code outside compiled graphs has read, by unit (a block, or the first parameter of a group): how often,
        and how many gathers and bytes the unit took in all. After the run, what it was at its end."""
        return self.statistics.eager_reads

    def __repr__(self) -> str:
        # Fabric and pytorch_lightning's Trainer refuse the strategy and print it: say what to use
        who = "for lightning.Trainer (`import lightning as L`), not for Fabric"
        return f"<{type(self).__name__}(stage={self.config.stage}) {who}>"
