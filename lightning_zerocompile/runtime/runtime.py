"""The Python end of the runtime: owns the C++ object of one strategy and binds what it reduces to the masters."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile.config import Config, Lifetime, Policy
from lightning_zerocompile.ranks.consistency import Consistency, Reads
from lightning_zerocompile.ranks.groups import Groups, default_group_position
from lightning_zerocompile.ranks.meetings import Meetings
from lightning_zerocompile.ranks.messages import CommunicationError, Messages
from lightning_zerocompile.ranks.turns import END, Turns
from lightning_zerocompile.ranks.turns import STREAM as GATES
from lightning_zerocompile.ranks.waits import MEETING
from lightning_zerocompile.runtime import build, kernels, ops
from lightning_zerocompile.runtime.activation_offload import ActivationOffload, Pack, without_hooks
from lightning_zerocompile.runtime.peer_memory import (
    BARRIER_GRACE,
    has_copy_engines,
    has_kernels,
    map_buffer,
    warn_of_one_queue,
)
from lightning_zerocompile.sharding.autocast import Casts, forward_of
from lightning_zerocompile.sharding.checks import check_equal_replicas
from lightning_zerocompile.sharding.islands import NONE, Islands, gathered_dtype, in_fp32
from lightning_zerocompile.sharding.layout import make_master, over_local, stride_of, trained_dtype
from lightning_zerocompile.sharding.master import (
    adopt_master,
    as_plain_tensors,
    bind_before_accumulation,
    bound_gradient,
    gradient_of,
    keep_hooks,
    refuse_hooks,
)
from lightning_zerocompile.sharding.meta_init import Places
from lightning_zerocompile.sharding.module_swap import ISLAND, PARAMETERS, ClassCache, Kept, install, kept_with
from lightning_zerocompile.sharding.moved import move_away
from lightning_zerocompile.sharding.parameter import ShardedParameter, StepState
from lightning_zerocompile.sharding.plan import UnitPlan, find_blocks, places_of_blocks

if TYPE_CHECKING:
    from lightning_zerocompile.runtime.core import DeviceBarriers, Saved

_log = logging.getLogger(__name__)
_PAUSE = 1e-3  # seconds between two looks at a device


@dataclass(frozen=True)
class Stats:
    """What the runtime did since set-up. Counts are of this rank; sizes are in bytes.

    Attributes:
        gathers: all-gather collectives (one per dtype of a unit, or of a run of small ones), and ``gather_bytes`` of
            their results.
        prefetched: the gathers among them that started before they were asked for.
        served: those in which this rank took part for others only, inside ``strategy.unequal()``.
        inner_gathers: those from secondary shards, inside a part of the shard group (``reshard_after_forward``), and
            ``secondary_bytes`` of such shards that this rank holds now.
        place_copies: values of parameters that were copied to where CUDA graphs read them, or from there.
        peer_gathers, peer_reductions: gathers and reductions by copies between devices instead of a process group.
        kept_casts: parameters of which a gather needed no cast on this rank, since it was kept (``keep_gathered``).
        reductions: reduce-scatter (0-dim parameters: all-reduce) collectives, and ``reduce_bytes`` of their inputs.
        padded_copies: gradients that were padded by a copy because the world size does not divide their rows.
        graph_uses, graph_reductions: parameters that compiled graphs asked for, gradients that they delivered, and
            ``graph_copies`` of these, which were copied out of a CUDA graph's memory since they waited.
        eager_reads, eager_gathers: parameter reads outside compiled graphs, and how many of them had to gather.
        resident_bytes, peak_resident_bytes: full parameters gathered now, and at most.
        backwards: outermost backward passes.
        updated_in_backward: updates of units inside a backward (``optimizer_in_backward``), before it had ended.
        updated_in_one_pass: updates of units by one kernel that also casts and places the result; a unit in several
            optimizers counts for each.
        offload_bytes: masters and optimizer states that are kept in host memory now; ``offload_in_bytes`` and
            ``offload_out_bytes`` were copied from there to the device, and back.
        activations_out_bytes: activations that were copied to host memory (``activation_offload``), and
            ``activations_in_bytes`` back to the device.
    """

    gathers: int
    gather_bytes: int
    prefetched: int
    served: int
    inner_gathers: int
    secondary_bytes: int
    place_copies: int
    peer_gathers: int
    kept_casts: int
    peer_reductions: int
    reductions: int
    reduce_bytes: int
    padded_copies: int
    graph_uses: int
    graph_reductions: int
    graph_copies: int
    eager_reads: int
    eager_gathers: int
    resident_bytes: int
    peak_resident_bytes: int
    backwards: int
    updated_in_backward: int
    updated_in_one_pass: int
    offload_bytes: int
    offload_in_bytes: int
    offload_out_bytes: int
    activations_out_bytes: int
    activations_in_bytes: int


@dataclass
class HostTraffic:
    """Bytes of optimizers in host memory: held now, and copied to the device and back since set-up.

    ``copies``: bytes on the device of what gathers read in the place of masters in host memory.
    """

    held: int = 0
    copies: int = 0
    copied_in: int = 0
    copied_out: int = 0


@dataclass(frozen=True)
class EagerReads:
    """What code outside of compiled graphs did with one unit since set-up.

    Attributes:
        reads: how often its parameters were read.
        gathers: collectives that gathered the unit, for whatever use, and ``gather_bytes`` of their results.
    """

    reads: int
    gathers: int
    gather_bytes: int


class Runtime:
    """Sharded parameters of one model: units, gathers, reductions, the masters' gradients.

    Args:
        groups: the process groups of the ranks.
        device: of this rank.
        config: the strategy's options.

    Attributes:
        mesh: the shard group, one dimension; its size is W.
        world_size: the number of all ranks.
        inner: how many ranks gather in the backward among themselves, from secondary shards; None: there are none.
    """

    def __init__(self, groups: Groups, device: torch.device, config: Config) -> None:
        self.mesh, self.device, self.config = groups.shards, device, config
        self.world_size = dist.get_world_size()
        self.inner = None if groups.inner is None else groups.inner.size()
        self.packs = groups.spans_hosts[0] and device.type != "cpu"  # see [Note: flat collectives]
        self._replicated = groups.shards.size() < self.world_size
        self.policy = Policy.of_stage(config.chosen_stage)
        build.load()
        from lightning_zerocompile.runtime import core  # built just now

        ops.register()
        alike = "" if groups.replicas is None else groups.replicas.group_name
        self.core = core.Runtime(
            groups.gathers.group_name,
            groups.reductions.group_name,
            alike,
            "" if groups.inner is None else groups.inner.group_name,
            self.world_size,
            dist.get_rank(),
            str(device),
        )
        self._lifetimes = {Lifetime.USE: core.Lifetime.USE, Lifetime.STEP: core.Lifetime.STEP}
        self._never_used = core.never_used
        self.core.set_prefetch(config.prefetch)
        self.core.set_spans_hosts(*groups.spans_hosts)
        self.core.set_merge_bytes(config.unit_bytes)
        self.core.set_cuda_graphs(config.cuda_graphs and device.type == "cuda")
        self.sharded_parameters: list[ShardedParameter] = []
        self.step_state = StepState()
        self.host_traffic = HostTraffic()
        self.activations: ActivationOffload[Saved] | None = None
        if config.activation_offload:
            of_parameters = self.core.parameter_of
            pack, unpack = self.core.pack, self.core.unpack
            self.activations = ActivationOffload(device, lambda value: of_parameters(value) >= 0, pack, unpack)
        self.updated_in_backward = 0  # updates of units
        self.updated_in_one_pass = 0  # the same
        self.unit_of: dict[str, int] = {}  # block name -> unit
        self._unit_of_parameter: list[int] = []
        self._unit_of_master: dict[Tensor, int] = {}
        self._masters: list[list[nn.Parameter]] = []  # by unit
        self._kept: list[int] = []  # units that stay gathered from one optimizer step to the next
        self.kept = Kept()
        self._anchors: dict[tuple[object, ...], Tensor] = {}
        this = weakref.ref(self)  # the C++ object must not keep this one alive

        def bind(reduced: list[tuple[int, Tensor | None]]) -> None:
            owner = this()
            if owner is not None:
                owner._bind(reduced)

        self.name = groups.everyone.group_name  # alike on all ranks, and no other runtime's
        watch = core.Watch(dist.get_world_size(), dist.get_rank(), config.timeout.total_seconds())
        self.messages = Messages(device.type, self.name, config.timeout, watch)
        self.comparisons = comparisons = Consistency(self.messages, config.timeout)
        self.reads = Reads(self.comparisons, config.timeout)
        self.core.set_callbacks(
            bind,
            self.comparisons.order,
            self.comparisons.gather,
            self.comparisons.used_parameters,
            self.messages.look,
            self.comparisons.failed,
        )
        if device.type != "cpu":
            self.core.set_outside(self.comparisons.outside)
            self.messages.position = default_group_position
        self.meetings = Meetings(self.messages, groups.meetings, self.comparisons)
        shards = dist.get_process_group_ranks(groups.gathers)
        self._turns = turns = Turns(self.messages, shards, dist.get_rank(), config.timeout)
        self.core.set_turns(turns.take, turns.arrive, turns.fail)
        if self._replicated:  # see [Note: replicas]
            self.messages.among = {"gather": shards, GATES: shards}

        def started() -> dict[str, int]:
            owner = this()
            gathers, reductions = (0, 0) if owner is None else owner.core.started()
            meetings = 0 if owner is None else owner.meetings.count
            return {"gather": gathers, "reduction": reductions, MEETING: meetings, GATES: turns.gates}

        def begun() -> tuple[int, int]:
            owner, number = this(), comparisons.next_exchange  # the number first: see [Note: begun reductions]
            return number, 0 if owner is None else owner.core.begun()

        self.messages.started, self.messages.begun = started, begun
        self.messages.watch()

    # ---- set-up ----

    def shard(
        self,
        model: nn.Module,
        units: Sequence[UnitPlan],
        compute_dtype: torch.dtype | None,
        autocast_dtype: torch.dtype | None = None,
        islands: Islands = NONE,
    ) -> None:
        """Replaces the model's parameters by masters, one unit after the other.

        Args:
            model: holds full parameters, on any device; those on ``meta`` are initialised here, unit by unit.
            units: partition of the model's parameters.
            compute_dtype: what floating-point parameters are gathered in; ``None``: their own dtype.
            autocast_dtype: of the autocast that the model runs under; ``None``: there is none.
            islands: what computes in float32.
        """
        self.kept = kept_with(model)
        self.casts = Casts(self.classes, self.core, self.messages, autocast_dtype)
        places = Places(model, self.device)
        places.check()
        warn_of_one_queue(self.device, self.world_size)
        mapped = has_copy_engines(self.mesh, self.device, self.messages, self.config.copy_engine)
        for plan in units:
            sharded_parameters = []
            for name in plan.parameters:
                pretrained = places.rows(name, self.mesh.get_local_rank(), self.mesh.size())
                parameter, rows = pretrained or (places.parameter(name), None)
                dtype = gathered_dtype(name, parameter, compute_dtype, islands)
                sharded_parameters.append(self._add(name, parameter, dtype, rows))
            lifetime = Lifetime.STEP if plan.kept else self.policy.lifetime
            indices = [sharded.index for sharded in sharded_parameters]
            unit = self.core.add_unit(plan.name, indices, self._lifetimes[lifetime])
            self._unit_of_parameter += [unit] * len(sharded_parameters)
            self._masters.append([sharded.master for sharded in sharded_parameters])
            self._unit_of_master |= dict.fromkeys(self._masters[unit], unit)
            self.unit_of[plan.name] = unit
            if lifetime is Lifetime.STEP:
                self._kept.append(unit)
                for sharded in sharded_parameters:
                    self._read_resident(sharded)
            for sharded in (
                sharded_parameters
            ):  # not earlier: until here an initialiser that reads another layer still finds its full parameters
                self._install(sharded, places)
                move_away(sharded.original, sharded)
            if lifetime is Lifetime.USE:
                for sharded in sharded_parameters:
                    self.casts.add(sharded, places.of(sharded.name))
        places.finish()
        if self.config.has_places and self.policy.lifetime is Lifetime.USE:
            self._fix_places([plan for plan in units if plan.block is not None and not plan.kept], model)
        for name in islands.modules:
            self._put_island(model.get_submodule(name), islands.around)
        if self._replicated:
            held = {sharded.name: sharded.local for sharded in self.sharded_parameters}
            check_equal_replicas(held, self.mesh.get_local_rank(), self.messages)
        if mapped:
            self._map_peers()

    def _fix_places(self, blocks: Sequence[UnitPlan], model: nn.Module) -> None:
        """Lets CUDA graphs of equal blocks read at fixed addresses, see [Note: fixed places]."""
        by_name = {sharded.name: sharded for sharded in self.sharded_parameters}
        inside: dict[nn.Module, set[str]] = {}  # the blocks that each module is in
        for name, block in find_blocks(model):
            for module in block.modules():
                inside.setdefault(module, set()).add(name)

        def read_by_one(sharded: ShardedParameter) -> bool:
            holders = [module() for module, _ in sharded.places]
            readers = [{""} if holder is None else inside.get(holder, {""}) for holder in holders]
            return len(set().union(*readers)) == 1

        alike: dict[tuple[object, ...], list[list[ShardedParameter]]] = {}
        for plan in blocks:
            found = [by_name[name] for name in plan.parameters]
            found = [sharded for sharded in found if not self.casts.asks(sharded) and read_by_one(sharded)]
            if found:
                alike.setdefault(tuple((s.size, s.source.dtype) for s in found), []).append(found)
        for group in alike.values():
            self.core.fix_places([[s.index for s in found] for found in group], places_of_blocks(self.config.prefetch))
            for sharded in (s for found in group for s in found):
                self._read_at(sharded, self.core.fixed_value(sharded.index), shared=True)

    def _put_island(self, module: nn.Module, around: torch.dtype | None) -> None:
        """Lets the module compute in float32. All modules of a class share the code, as without it."""
        if ISLAND in module.__dict__:  # it was put already: the module has two names
            return
        forward = forward_of(module)
        island = self.kept.islands.setdefault((forward, around), in_fp32(forward, around))
        module.__dict__[ISLAND] = island
        self.classes.swap(module, frozenset(module.__dict__.get(PARAMETERS, ())), island)

    def _map_peers(self, batches: bool = True) -> None:
        """Lets gathers and reductions be copies between the devices' memories, as far as the devices allow it.

        ``batches``: see [Note: batched copies] in csrc/driver.cpp.
        """
        mesh, messages, wanted = self.mesh, self.messages, self.config.copy_engine
        if not has_kernels(
            messages, lambda: self.core.set_kernels(str(kernels.compiled(self.device)), batches), wanted
        ):
            return
        timeout = int((self.config.timeout + BARRIER_GRACE).total_seconds() * 1000)
        buffer = map_buffer(mesh, self.device, messages, wanted, self.core.peer_bytes(), "gathers")
        if buffer is None:
            return
        self.core.set_peers(buffer, self._barriers("gather"), timeout)
        size = 0 if self._replicated else self.core.summing_peer_bytes()  # see [Note: replicas]
        summing = map_buffer(mesh, self.device, messages, "auto", size, "reductions")
        if summing is not None:
            self.core.set_summing_peers(summing, self._barriers("reduction"), timeout)

    def _barriers(self, kind: str) -> DeviceBarriers:
        """The barriers of one mapped buffer, watched: see [Note: device barriers] in csrc/peers.h.

        ``kind``: what meets there.
        """
        core = build.load().DeviceBarriers
        words = torch.zeros(core.WORDS, dtype=torch.int64, pin_memory=True)
        barriers: DeviceBarriers = core(words, kind, list(self.unit_of))
        self.messages.watch_barriers(barriers)
        return barriers

    def keep_casts(self, most: int) -> int:
        """Keeps casts in memory of at most so many bytes, see [Note: kept casts] in csrc/peers.h; on all ranks.

        Returns:
            The bytes that they take; 0: they do not fit, or gathers are no copies.
        """
        low = self.casts.lowers
        size = self.core.kept_cast_bytes(low)
        if not 0 < size <= most:
            return 0
        torch.cuda.empty_cache()  # what is mapped is not of torch's allocator
        kept = map_buffer(self.mesh, self.device, self.messages, "auto", size // 2, "casts")
        if kept is None:
            _log.warning("zerocompile: no casts are kept: a GPU could not map %d further bytes", size)
            return 0
        self.core.keep_casts(kept, low)
        return size

    def _install(self, sharded: ShardedParameter, places: Places) -> None:
        for module, local_name in places.of(sharded.name):
            install(self.classes, module, local_name, sharded)

    def used_units(self) -> dict[int, int]:
        """The units that live for one use, with the bytes of their gathered values."""
        sizes: dict[int, int] = {}
        for sharded in self.sharded_parameters:
            unit = self._unit_of_parameter[sharded.index]
            if unit not in self._kept:
                sizes[unit] = sizes.get(unit, 0) + math.prod(sharded.size) * sharded.source.element_size()
        return sizes

    def dtypes_of_units(self) -> dict[int, int]:
        """In how many dtypes each unit is gathered: each dtype takes one collective."""
        found: dict[int, set[torch.dtype]] = {}
        for sharded in self.sharded_parameters:
            found.setdefault(self._unit_of_parameter[sharded.index], set()).add(sharded.source.dtype)
        return {unit: len(dtypes) for unit, dtypes in found.items()}

    def keep(self, units: Sequence[int]) -> None:
        """These units stay gathered from one optimizer step to the next from now on; the same on all ranks."""
        for unit in units:
            self.core.keep(unit)
            self._kept.append(unit)
        for sharded in self.sharded_parameters:
            if self._unit_of_parameter[sharded.index] in units:
                self._read_resident(sharded)
                self.casts.remove(sharded)

    def _read_resident(self, sharded: ShardedParameter) -> None:
        self._read_at(sharded, self.core.resident_value(sharded.index), shared=False)

    def _read_at(self, sharded: ShardedParameter, value: Tensor, shared: bool) -> None:
        """Lets graphs read the parameter in this memory; ``shared``: by several units in turn."""
        sharded.source, sharded.shares_source = value, shared
        self.step_state.changes += 1
        if self.config.cuda_graphs:  # see [Note: CUDA graphs]
            torch._dynamo.mark_static_address(sharded.source, guard=False)

    def _add(
        self, name: str, parameter: nn.Parameter, dtype: torch.dtype, rows: Tensor | None = None
    ) -> ShardedParameter:
        config = self.config
        floating = parameter.is_floating_point()
        refuse_hooks(name, parameter)
        stride = stride_of(parameter)
        master = make_master(parameter, self.mesh, self.device, config.master_dtype, rows)
        grad_dtype, explicit = _grad_dtype(parameter, dtype)
        if explicit:
            master.grad_dtype = grad_dtype
        handle = torch.zeros(1, dtype=torch.float64)
        assert isinstance(master, DTensor)
        local, trained = master.to_local().detach(), trained_dtype(parameter.dtype, config.master_dtype)
        index = self.core.add_parameter(
            name,
            list(parameter.shape),
            list(stride or ()),
            dtype,
            grad_dtype,
            config.reduce_dtype if floating else None,
            grad_dtype if explicit else trained,
            master,
            local,
            handle,
        )
        sharded = ShardedParameter(
            name=name,
            index=index,
            size=tuple(parameter.shape),
            master=master,
            source=self._anchor(dtype, parameter, stride),
            handle=handle.detach().requires_grad_(floating or parameter.is_complex()),
            frozen_handle=handle.detach(),
            use_grad_dtype=grad_dtype,
            core=self.core,
            reads=self.reads,
            step_state=self.step_state,
            never_used=self._never_used,
            local=local,
            trained_dtype=trained,
            dtype=parameter.dtype,
            original=parameter,
            grad_dtype=getattr(parameter, "grad_dtype", parameter.dtype),
        )
        keep_hooks(parameter, master)
        adopt_master(master, sharded)
        if master.is_floating_point() or master.is_complex():
            bind_before_accumulation(master)
        self.sharded_parameters.append(sharded)
        return sharded

    def _anchor(self, dtype: torch.dtype, parameter: Tensor, stride: tuple[int, ...] | None) -> Tensor:
        """No rows of a value like this. It has the value's strides, if these are not the usual ones."""
        size, steps = ((0,), (1,)) if stride is None else ((0, *parameter.shape[1:]), stride)
        if (dtype, size, steps) not in self._anchors:
            self._anchors[dtype, size, steps] = torch.empty_strided(size, steps, dtype=dtype, device=self.device)
        return self._anchors[dtype, size, steps]

    def unit_of_parameter(self, sharded: ShardedParameter) -> int:
        """The unit that the parameter is gathered and reduced with."""
        return self._unit_of_parameter[sharded.index]

    def lives_for_a_use(self, unit: int) -> bool:
        """Whether the unit is gathered at each use, and not once after each step of the optimizer."""
        return unit not in self._kept

    @property
    def gathers_at_use(self) -> bool:
        """Whether there are other ranks, and units that are gathered at each use."""
        return self.world_size > 1 and len(self._kept) < len(self._masters)

    def held_window_bytes(self, sum_dtype: torch.dtype | None) -> int:
        """Bytes that a window which holds all parameters adds: they and their gradients, these in ``sum_dtype``
        (``None``: their own), and two moments of the shards, which an optimizer makes in its first step only."""
        total = 0
        for sharded in self.sharded_parameters:
            size, numel = sharded.source.element_size(), math.prod(sharded.size)
            summed = size if sum_dtype is None or not sharded.source.is_floating_point() else sum_dtype.itemsize
            shard = numel // self.mesh.size() * sharded.trained_dtype.itemsize
            total += (size + summed) * numel + 2 * shard if sharded.master.requires_grad else size * numel
        return total

    @property
    def classes(self) -> ClassCache:
        return self.kept.classes

    # ---- gradients ----

    def _bind(self, reduced: list[tuple[int, Tensor | None]]) -> None:
        """Adds local gradients (rows of the step's flat partitions) to a ``grad`` that user code has set.

        A gradient of None adds nothing. Then the user's post-accumulate hooks run, as FSDP2 runs them.
        """
        with torch.no_grad(), as_plain_tensors():
            for index, local in reduced:
                master = self.sharded_parameters[index].master
                grad = bound_gradient(master)
                if local is not None and grad is not None:
                    grad.add_(over_local(local, master))
            records = [self.sharded_parameters[index] for index, _ in reduced]
            hooks = [
                (one.master, hook)
                for one in records
                for hook in (one.master._post_accumulate_grad_hooks or {}).values()
            ]
        before, self.step_state.in_step = self.step_state.in_step, False
        try:
            with torch.no_grad():
                for parameter, hook in hooks:
                    hook(parameter)
        finally:
            self.step_state.in_step = before

    def bind_gradients(self) -> None:
        """Binds all reduced gradients to their masters, which may outlive the runtime."""
        with as_plain_tensors():
            for sharded in self.sharded_parameters:
                gradient_of(sharded.master)

    def pass_mark(self, what: str) -> None:
        """Called where all ranks come in the same order, after the same gathers; see ``Consistency.mark``.

        Args:
            what: the mark, for the message.

        Raises:
            RuntimeError: another rank came to another mark, or after other gathers.
        """
        if self.gathers_at_use and not self.core.unequal():
            self.comparisons.mark(f"{what}, after {self.core.gathered_so_far()}")

    # ---- ranks that do unequal work ----

    @contextlib.contextmanager
    def unequal(self) -> Iterator[None]:
        """Inside, ranks may gather different units, in any order and number; see ``ZeroCompileStrategy.unequal``."""
        if not self.gathers_at_use or self.core.unequal():
            yield
            return
        self.pass_mark("the beginning of `strategy.unequal()`")
        self._turns.begin()
        self.core.begin_unequal()
        self.meetings.before = self.reads.before = self.meet_others
        raised = True
        try:
            yield
            self.core.meet_others(END)
            raised = False
        except CommunicationError:  # the others have told it, or find it by themselves
            raise
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # another rank, or the store, is gone
                self.core.tell_failure(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.meetings.before = self.reads.before = None
            self.core.end_unequal(raised)

    def meet_others(self, what: str) -> bool:
        """Inside :meth:`unequal`: waits until all ranks have come to ``what``, and serves their gathers meanwhile.

        Returns:
            Whether this is inside of it, so that all ranks are known to be there.

        Raises:
            CommunicationError: another rank has come to something else, has failed or is gone.
        """
        if not self.core.unequal():
            return False
        self.core.meet_others(what)
        return True

    # ---- phases of a step ----

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around user code that may read parameters: autograd saves a weight's identity in place of its value."""
        self._refresh_kept()
        if len(self._kept) == len(self._masters):
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self.core.pack, self.core.unpack):
            yield

    def ordinary_saving(self) -> contextlib.AbstractContextManager[None]:
        """Inside :meth:`forward`: autograd saves tensors as they are again; torch.func transforms ask for that."""
        return without_hooks(lambda pack: pack == self.core.pack or isinstance(pack, Pack))

    def units_in_order(self) -> list[tuple[int, list[nn.Parameter]]]:
        """Each unit's masters, in the order in which a forward uses the units."""
        return [(unit, self._masters[unit]) for unit in self.core.unit_order()]

    @torch.no_grad()  # so this does not count as the forward's order
    def _refresh_kept(self) -> None:
        """Gathers stale values (first step, loaded weights) here, since ranks may read different parameters later."""
        self.core.refresh(self._kept)

    def masters_changed(self, masters: Sequence[Tensor]) -> None:
        """After an optimizer wrote ``masters``: gathers their units anew (lifetime: one step) or forgets them."""
        units = {self._unit_of_master[master] for master in masters if master in self._unit_of_master}
        self.core.masters_changed(sorted(units))
        self.core.forget_outstanding()

    def eager_reads(self) -> dict[str, EagerReads]:
        """Reads outside compiled graphs since set-up, by unit; units without any are left out."""
        counts = {name: (self.core.eager_reads_of(unit), unit) for name, unit in self.unit_of.items()}
        return {name: EagerReads(n, *self.core.gathers_of(unit)) for name, (n, unit) in counts.items() if n > 0}

    def stats(self) -> Stats:
        raw = self.core.stats()
        names = (name for name in Stats.__dataclass_fields__ if hasattr(raw, name))
        host = self.host_traffic
        return Stats(
            **{name: getattr(raw, name) for name in names},
            updated_in_backward=self.updated_in_backward,
            updated_in_one_pass=self.updated_in_one_pass,
            offload_bytes=host.held,
            offload_in_bytes=host.copied_in,
            offload_out_bytes=host.copied_out,
            activations_out_bytes=0 if self.activations is None else self.activations.bytes_out,
            activations_in_bytes=0 if self.activations is None else self.activations.bytes_in,
        )

    def shutdown(self) -> None:
        """Drops every reference to the process groups, before they are destroyed. Waits for work that is in flight."""
        self.reads.close()
        if self.activations is not None:
            self.activations.close()
        with contextlib.closing(self.messages):
            self.core.shutdown(wait=True)
            self.messages.clear()

    def drained(self, within: float) -> bool:
        """Whether this rank's device has done all that its current stream holds, or does so in some seconds."""
        if self.device.type == "cpu":
            return True
        deadline = time.monotonic() + within
        try:
            done = torch.cuda.current_stream(self.device).record_event()
            while not done.query():  # type: ignore[no-untyped-call, unused-ignore]
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_PAUSE)
        except RuntimeError:  # the device has failed, so nobody waits for it
            pass
        return True

    def abandon(self) -> None:
        """:meth:`shutdown` after a failure: waits for nothing, since the other ranks may not take part any more."""
        self.reads.close()
        self.meetings.abandon()
        with contextlib.closing(self.messages):
            self.core.shutdown(wait=False)


def _grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> tuple[torch.dtype | None, bool]:
    """The leaf's gradient dtype (``None``: as first produced) and whether the user set it explicitly."""
    chosen = getattr(parameter, "grad_dtype", parameter.dtype)
    if chosen is None:
        return None, True
    if chosen != parameter.dtype:
        return chosen, True
    return dtype, False
