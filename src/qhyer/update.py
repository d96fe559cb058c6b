"""One gradient update: sample, loss, backward, clip, step; eager, or captured whole in a CUDA graph.

Both give the same losses: on CUDA the optimisers use their capturable form either way, so that a graph that could
not be captured costs speed and nothing else. What one update is, `Update.compute` says; a captured one may go about it
in another order (`GraphedUpdate.compute_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from qhyer import distributed
from qhyer.agent import Agent, Ahead, Batch, Metrics, Sampler, Stage
from qhyer.lane import abandon, default_cuda_generator, keep
from qhyer.nn.adamw_cuda import Step
from qhyer.streams import Begun, asides, begin, fork, forked, reserve

Result = TypeVar("Result")
COMPILED = 256  # configurations of an agent in one process, each with its own version of the compiled loss


class Update:
    """One gradient update of a stage. The order of its parts is the definition of a step.

    Metrics are summed on the device as one vector, so that reading them costs nothing until a line is due.
    """

    def __init__(self, agent: Agent, stage: Stage, sampler: Sampler, precision: str, device: torch.device) -> None:
        self.agent, self.stage, self.sampler, self.device = agent, stage, sampler, device
        self.loss = stage.loss
        self.autocast = precision == "bf16"
        self.parameters = [[p for group in o.param_groups for p in group["params"]] for o in stage.optimizers]
        # Kept with the groups, and so in checkpoints: after a resume, or in a later stage, "lr" holds what the
        # schedule made of it.
        self.base_rates = [
            [g.setdefault("initial_lr", float(g["lr"])) for g in o.param_groups] for o in stage.optimizers
        ]
        if device.type == "cuda":
            for optimizer in filter(is_capturable, stage.optimizers):
                _keep_on_device(optimizer, device)
        self.steps = [Step(optimizer, stage.grad_clip) for optimizer in stage.optimizers]
        self.launched, self.fused = "eager", ""
        self.names: list[str] = []
        self.sums: Tensor | None = None
        self.count = 0
        self.healthy: Tensor | None = None
        self.rows: Batch = {}
        self.kinds: dict[str, torch.dtype] = {}  # of rows that are kept together, and so in one

    @property
    def path(self) -> str:
        """How updates are run, and why not otherwise: written beside the seconds they take."""
        return ", ".join(filter(None, (self.launched, self.fused)))

    def compile(self, generators: Sequence[torch.Generator], note: Callable[[str], None]) -> None:
        """From now on the loss and its gradient are what torch's compiler makes of them: fewer kernels, fused.

        It happens here and now, on a batch that leaves no trace, so that none of it ends up in a graph. A loss that
        the compiler cannot follow to its end stays as it is, and `note` says so.
        """
        compiled = torch.compile(self.loss, fullgraph=True, dynamic=False, options={"fallback_random": True})
        chance = [keep(generator) for generator in generators]
        buffers = [buffer.clone() for buffer in self.agent.buffers()]  # running scales move with a loss
        try:
            # Seeds share what is compiled; configurations add versions to it, of which torch would refuse the ninth.
            with torch._dynamo.config.patch(recompile_limit=COMPILED):
                loss, _ = self._in_precision(compiled, distributed.share(self.sampler.sample(self.stage.batch_size)))
                loss.backward(torch.ones_like(loss))
            self.loss, self.fused = compiled, "compiled"
        except Exception as error:
            reason = _first_line(error)
            self.fused = f"not compiled ({reason})"
            note(f"the loss of stage {self.stage.name} could not be compiled, and goes on without: {reason}")
        self.drop_gradients()
        for buffer, before in zip(self.agent.buffers(), buffers):
            buffer.copy_(before)
        for put_back in chance:
            put_back()

    def set_rates(self, step: int) -> None:
        if self.stage.schedule is None:
            return
        factor = self.stage.schedule(step)
        for optimizer, rates in zip(self.stage.optimizers, self.base_rates):
            for group, rate in zip(optimizer.param_groups, rates):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * factor)
                else:
                    group["lr"] = rate * factor

    def _rows(self, batch: Batch, like: Tensor) -> Tensor:
        """Which rows of the data a batch is of, all in one: (N,), (S, N) of seeds, as what is recorded of them."""
        none = like.new_empty((*like.shape, 0), dtype=torch.long)  # a batch may have no rows
        rows = (value for value in batch.values() if not value.is_floating_point())
        return torch.cat([none, *(value.reshape(*like.shape, -1) for value in rows)], dim=-1)

    def _watch(self, batch: Batch, finite: Tensor, latest: Tensor | None = None) -> None:
        """Remembers the rows of the first batch whose loss or gradient is not finite (of the latest while all are);
        `latest`: these rows, if they have been put together already."""
        rows = {name: value for name, value in batch.items() if not value.is_floating_point()}
        if self.device.type == "cpu" and not finite.dim():
            self.rows = rows
            if not finite:
                raise FloatingPointError  # before the weights are touched
            return
        latest = self._rows(batch, finite) if latest is None else latest
        if self.healthy is None:  # on a GPU nobody looks until a line or a checkpoint is due
            self.healthy = torch.ones_like(finite)
            self.kept, self.kinds = latest.clone(), {name: value.dtype for name, value in rows.items()}
            shapes = {name: value.shape[finite.dim() :] for name, value in rows.items()}  # of a seed's
            parts = self.kept.split([shape.numel() for shape in shapes.values()], dim=-1)
            self.rows = {name: part.unflatten(-1, shapes[name]) for name, part in zip(rows, parts)}
        torch.where(self.healthy[..., None], latest, self.kept, out=self.kept)
        self.healthy.logical_and_(finite)

    def check(self) -> None:
        """Raises FloatingPointError if a loss or a gradient has not been finite."""
        if self.healthy is not None and not self.healthy:
            raise FloatingPointError

    def drop_gradients(self) -> None:
        for optimizer in self.stage.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _in_precision(self, call: Callable[[Batch], Result], batch: Batch) -> Result:
        # No cache of casts: one made under no_grad (the Q tokens) would cut the gradient of the same weights later.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            return call(batch)

    def compute(self) -> None:
        """Sample, loss, backward, clip, step, metrics."""
        drawn = self.sampler.sample(self.stage.batch_size)
        loss, metrics = self._in_precision(self.loss, distributed.share(drawn))
        self.drop_gradients()
        with asides(self.device, self.fused != "compiled"):
            loss.backward(torch.ones_like(loss))
        distributed.average_gradients(p for parameters in self.parameters for p in parameters)
        norms, steps = self._clip(range(len(self.steps)), loss.dim() > 0)
        self._finish(steps, partial(self._record, drawn, self._means(loss, metrics, norms)))
        if self.stage.after_step is not None:
            self.stage.after_step()

    def _clip(self, optimizers: Sequence[int], stacked: bool = False) -> tuple[list[Tensor], list[Callable[[], None]]]:
        """The norms of these optimisers' gradients, which are clipped, and their steps, which are yet to be taken."""
        ours = [self.steps[i].suits() for i in optimizers]
        norms = forked(
            "optimizers", [partial(self._norm, i, each, stacked) for i, each in zip(optimizers, ours)], self.device
        )
        steps: list[Callable[[], None]] = [
            partial(self._step, i, each, None if stacked else norm) for i, each, norm in zip(optimizers, ours, norms)
        ]
        return norms, steps

    def _means(self, loss: Tensor, metrics: Metrics, norms: Sequence[Tensor]) -> Tensor:
        """What is recorded of a batch, in the order of `names`: (M,), (S, M)."""
        norm = norms[0] if len(norms) == 1 else torch.stack(list(norms)).norm(dim=0)
        values = {"loss": loss, **metrics, "grad_norm": norm}
        self.names, means = list(values), torch.stack([value.detach() for value in values.values()], dim=-1)
        return distributed.mean(means)

    def _finish(self, steps: Sequence[Callable[[], None]], record: Callable[[], None]) -> None:
        """Side by side: no two optimisers share a parameter, and what is recorded is none."""
        fork("records", record, lambda: forked("optimizers", steps, self.device), self.device)

    def _norm(self, optimizer: int, ours: bool, stacked: bool) -> Tensor:
        """Of this optimiser's gradients, which are clipped here, or by the step if it is ours."""
        if stacked:
            return gradient_norms(self.parameters[optimizer])
        step = self.steps[optimizer]
        return step.norm() if ours else gradient_norm(self.parameters[optimizer], self.stage.grad_clip)

    def _step(self, optimizer: int, ours: bool, norm: Tensor | None) -> None:
        if ours:
            self.steps[optimizer].step(norm)
        else:
            self.stage.optimizers[optimizer].step()

    def _record(self, drawn: Batch, means: Tensor, rows: Tensor | None = None) -> None:
        self._watch(drawn, (means[..., 0] + means[..., -1]).abs() < torch.inf, rows)  # nor is nan less
        if self.sums is None:
            self.sums = torch.zeros_like(means, dtype=torch.float64)
        self.sums += means

    def __call__(self, step: int) -> None:
        self.set_rates(step)
        self.compute()
        self.count += 1

    def sampler_state(self, generator: torch.Generator) -> Tensor:
        """Of the sampler's generator, as the batch of the latest update left it: where the next update goes on."""
        return generator.get_state()

    def take_metrics(self) -> dict[str, float]:
        """Means since the last call."""
        if self.sums is None or self.count == 0:
            return {}
        means = dict(zip(self.names, (self.sums / self.count).tolist()))
        self.sums.zero_()
        self.count = 0
        return means


def gradient_norm(parameters: Sequence[torch.nn.Parameter], clip: float | None) -> Tensor:
    """The norm of all gradients together, which are scaled down to `clip` where it is greater."""
    if clip is not None:
        return torch.nn.utils.clip_grad_norm_(parameters, clip)
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def gradient_norms(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """The same for each of the seeds that are the parameters' first axis (S,), without clipping."""
    rows = [row for p in parameters if p.grad is not None for row in p.grad.unbind()]
    return torch.stack(torch._foreach_norm(rows)).view(-1, len(parameters[0])).norm(dim=0)


def is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    return all("capturable" in group for group in optimizer.param_groups)


def _keep_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Learning rates and step counts as tensors there: a graph reads them at each replay."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)


# ---------------------------------------------------------------------------------------------------- capturing


class Capture(Protocol):
    """Records what a function would do, without doing it, and returns what does it; raises if that cannot be."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]: ...


class GraphedUpdate(Update):
    """The same update, captured after a few eager ones: one launch instead of thousands.

    What cannot be captured (a loss that reads a value back, say) goes on eagerly from the state before the attempt,
    and `note` says so.
    """

    WARMUP = 3  # libraries set themselves up, optimisers make their moments: none of it may end up in the graph

    def __init__(
        self,
        agent: Agent,
        stage: Stage,
        sampler: Sampler,
        precision: str,
        device: torch.device,
        capture: Capture,
        generators: Sequence[torch.Generator],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(agent, stage, sampler, precision, device)
        self.capture, self.generators, self.note = capture, generators, note
        self.replay: Callable[[], None] | None = None
        self.calls = 0
        self.batch: Batch = {}  # of the next replay, if each draws that of the one after it
        self.before: dict[torch.Generator, Tensor] = {}  # the sampler's, as they were before the latest did

    def __call__(self, step: int) -> None:
        self.set_rates(step)
        if self.calls == self.WARMUP:
            self._try_capture()
        if self.replay is not None:
            if self.batch:
                self.before = {generator: generator.get_state() for generator in self.generators}
            self.replay()
        else:
            self.compute()
        self.calls += 1
        self.count += 1

    def sampler_state(self, generator: torch.Generator) -> Tensor:
        """Whether or not the next batch has been drawn already."""
        return self.before[generator] if self.before else super().sampler_state(generator)

    def _try_capture(self) -> None:
        """Recording runs no kernel, so weights, moments and sums are safe; what Python changed is put back."""
        chance = [keep(generator) for generator in random_generators(self.device, *self.generators)]
        moments = [{p: dict(state) for p, state in o.state.items()} for o in self.stage.optimizers]
        mine = dict(vars(self))
        self.drop_gradients()  # the graph has its own, in its own memory
        try:
            self.replay = self.capture(self._work())
            self.launched = "captured"
        except Exception as error:
            vars(self).update(mine)
            self.drop_gradients()
            for optimizer, state in zip(self.stage.optimizers, moments):
                optimizer.state.clear()
                optimizer.state.update(state)
            for put_back in chance:
                put_back()
            reason = _first_cause(error)
            self.launched = f"eager ({reason})"
            self.note(f"stage {self.stage.name} could not be captured in a CUDA graph, and goes on without: {reason}")

    def _work(self) -> Callable[[], None]:
        """What is captured. Where the critic is ahead, the batch of the first replay is drawn here and now."""
        ahead = self.stage.ahead
        if ahead is None or self.fused == "compiled" or distributed.active():
            return self.compute
        first = self._seen(ahead, self.sampler.sample(self.stage.batch_size))
        self.batch = {
            name: torch.empty_like(value, memory_format=torch.contiguous_format) for name, value in first.items()
        }
        self._take(first)
        return partial(self.compute_ahead, ahead)

    def compute_ahead(self, ahead: Ahead) -> None:
        """`compute` on a batch that is there already, with what the critic says of it: the rest begins at once.

        Beside it the critic learns from this batch, draws the next and looks at it. Each computes what it does in
        `compute`: they share no parameter, and what the rest reads the critic said after its step on the batch before.
        """
        batch, learner = self.batch, self.stage.optimizers.index(ahead.optimizer)
        others = [i for i in range(len(self.steps)) if i != learner]
        self.drop_gradients()

        rows = begin("records", lambda: self._rows(batch, torch.empty((), device=self.device)), self.device)

        def critic() -> tuple[Tensor, Metrics, Tensor, Batch]:
            following = begin("draw", partial(self.sampler.sample, self.stage.batch_size), self.device)
            loss, metrics = self._in_precision(ahead.loss, batch)
            loss.backward(torch.ones_like(loss))
            (norm,), (step,) = self._clip([learner])
            step()
            return loss, metrics, norm, self._seen(ahead, following())

        def rest() -> tuple[Tensor, Metrics, list[Tensor], Begun[list[None]]]:
            loss, metrics = self._in_precision(ahead.rest, batch)
            with asides(self.device):
                loss.backward(torch.ones_like(loss))
            norms, steps = self._clip(others)
            return loss, metrics, norms, begin("steps", partial(forked, "optimizers", steps, self.device), self.device)

        # In the order of the loss, for torch's generator; on the stream where critics ran in the eager updates, so that
        # libraries have set themselves up there; and each with a whole pass of autograd to itself.
        (loss, seen, norm, following), (other, metrics, norms, steps) = fork("critic", critic, rest, self.device)
        norms.insert(learner, norm)
        latest = rows()

        def record() -> None:
            self._record(batch, self._means(other + loss, metrics | seen, norms), latest)

        # While the steps are taken; nobody reads this batch any more.
        fork("records", record, partial(self._take, following), self.device)
        steps()

    @torch.no_grad()
    def _seen(self, ahead: Ahead, batch: Batch) -> Batch:
        """A batch with what the critic, as it is now, says of it."""
        return batch | self._in_precision(ahead.prepare, batch)

    def _take(self, following: Batch) -> None:
        """Puts it where the next replay finds it."""
        for kind in {value.dtype for value in following.values()}:  # one kernel each
            names = [name for name, value in following.items() if value.dtype == kind]
            torch._foreach_copy_([self.batch[name] for name in names], [following[name] for name in names])


def _first_cause(error: BaseException) -> str:
    """The first line of what went wrong first: a broken capture complains again when it is closed."""
    while error.__context__ is not None:
        error = error.__context__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def random_generators(device: torch.device, *samplers: torch.Generator) -> list[torch.Generator]:
    """All that an update may draw from."""
    return [*samplers, torch.default_generator, *([default_cuda_generator(device)] if device.type == "cuda" else [])]


def capture_for(device: torch.device, *samplers: torch.Generator) -> Capture | None:
    """What captures on this device, if anything does."""
    return CudaCapture(device, *samplers) if device.type == "cuda" else None


def make_update(
    agent: Agent,
    stage: Stage,
    sampler: Sampler,
    generators: Sequence[torch.Generator],
    note: Callable[[str], None],
    *,
    precision: str,
    device: torch.device,
    graph: bool = True,
    compile: bool = False,
) -> Update:
    """Captured in a graph, and compiled, where that is asked for and can be; `generators` are the sampler's."""
    capture = capture_for(device, *generators) if graph else None
    fixed = [type(optimizer).__name__ for optimizer in stage.optimizers if not is_capturable(optimizer)]
    arguments = (agent, stage, sampler, precision, device)
    if capture is not None and not fixed:
        update: Update = GraphedUpdate(*arguments, capture, generators, note)
    else:
        update = Update(*arguments)
        if capture is not None:
            update.launched = f"eager ({fixed[0]} has no capturable form)"
            note(f"stage {stage.name} cannot be captured in a CUDA graph: {fixed[0]} has no capturable form")
    if compile:
        update.compile(random_generators(device, *generators), note)
    return update


class CudaCapture:
    """Records on the current stream, which must not be the default one."""

    def __init__(self, device: torch.device, *samplers: torch.Generator) -> None:
        self.device, self.samplers = device, samplers

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        reserve(self.device)
        graph = torch.cuda.CUDAGraph()
        for sampler in self.samplers:
            graph.register_generator_state(sampler)  # torch's own generator is there already
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream(self.device)
        mode = "thread_local" if distributed.active() else "global"  # NCCL looks after its sums from another thread
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                work()
        except BaseException:
            abandon(graph, pool, self.device)
            raise
        return graph.replay
