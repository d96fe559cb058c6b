"""Several seeds of QHyer, captured: what runs side by side, on streams of whose memory nothing is used too early."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from timeline import GPU, Line, Timeline, tensors
from triton.runtime import interpreter

from qhyer import runs, streams
from qhyer.nn import branches_triton
from qhyer.nn.mamba import Mamba
from qhyer.nn.mamba2 import Mamba2
from qhyer.update import GraphedUpdate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, for the interpreter's sake")


def captured(timeline: Timeline, config, episodes, monkeypatch) -> Line:
    """A training that is captured, and noted meanwhile, on a lane of its own -> its stream."""
    monkeypatch.setattr(GraphedUpdate, "WARMUP", 1)
    lane = streams.Own(GPU)
    agent = runs.build_agent("qhyer", config, episodes.spec(), 0).train()
    (stage,) = agent.stages()
    generator = torch.Generator().manual_seed(0)

    def capture(work):
        timeline.partners.clear()
        streams.reserve(GPU)
        timeline.on = True
        with timeline:
            work()
        timeline.on = False
        return lambda: None

    sampler = stage.sampler.build(episodes, generator)
    update = GraphedUpdate(agent, stage, sampler, "fp32", torch.device("cpu"), capture, [generator], pytest.fail)
    with timeline.upon(lane.stream):
        update(0)
        update(1)
    assert update.launched == "captured"
    return lane.stream


@pytest.fixture
def small(tiny_config):
    return tiny_config("qhyer", batch_size=2, context=2, layers=1, flow_blocks=2)


@pytest.mark.parametrize("others", [0, 3])
def test_the_decoder_does_not_wait_for_the_critic(others, small, point_world, monkeypatch):
    """Nor beside so many seeds that torch's streams do not suffice; and no memory is used again too early."""
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    timeline = Timeline(monkeypatch)
    lanes = [streams.Own(GPU) for _ in range(others)]
    taken = {streams._beside(lane.stream, f"part {i}") for lane in lanes for i in range(8)}
    stream = captured(timeline, small, point_world, monkeypatch)
    here, critic, when_decoder_begins, when_critic_ends = timeline.begun["critic"]
    assert here is stream
    assert when_critic_ends[critic] > 50 and when_decoder_begins[critic] == 0
    drawing, _, when_draw_begins, _ = timeline.begun["draw"]
    assert drawing is critic and when_draw_begins[critic] == 0  # nor does the next batch wait for its step
    stepping, _, when_steps_begin, _ = timeline.begun["steps"]
    assert stepping is stream and when_steps_begin[critic] == 0  # nor the decoder's step for what it says of that batch
    assert timeline.overtaken == set()
    used = {here, *(partner for _, _, partner in timeline.partners)}
    assert len(used) == 1 + len({(home, name) for home, name, _ in timeline.partners})
    assert used.isdisjoint(taken) and bool(timeline.others) == (others > 0)


def test_with_streams_in_common_it_would_be_noticed(small, point_world, monkeypatch):
    """As there were, of seven seeds: what the critic begins on the side was where the decoder runs."""
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    timeline = Timeline(monkeypatch)
    partner, homes = streams._beside, []

    def shared(stream, name):
        found = partner(stream, name)
        homes.append(stream)
        return homes[0] if stream is not homes[0] and name in ("windows", "linears") else found

    monkeypatch.setattr(streams, "_beside", shared)
    captured(timeline, small, point_world, monkeypatch)
    _, critic, when_decoder_begins, _ = timeline.begun["critic"]
    assert when_decoder_begins[critic] > 0
    assert timeline.overtaken


# ------------------------------------------------------------------------------------------------- streams of one's own


def test_no_two_have_a_stream_in_common(monkeypatch):
    timeline = Timeline(monkeypatch)
    lanes = [streams.Own(GPU) for _ in range(7)]
    names = ["windows", "critic", "asides", *(f"part {i}" for i in range(8))]
    found = [lane.stream for lane in lanes]
    for lane in lanes:
        found += [streams._beside(lane.stream, name) for name in names]
        found.append(streams._beside(streams._beside(lane.stream, "critic"), "windows"))
    assert len(set(found)) == len(found) == 7 * 13 and len(timeline.others) == 7 * 12 - streams.POOLED
    assert streams._beside(lanes[0].stream, "windows") is found[7]


def test_what_is_given_back_is_taken_again(monkeypatch):
    timeline = Timeline(monkeypatch)
    for _ in range(5):
        lanes = [streams.Own(GPU) for _ in range(40)]
        streams._beside(streams._beside(lanes[-1].stream, "critic"), "windows")
        del lanes
        gc.collect()
    assert len(timeline.others) == 10 and not streams._in_use and not streams._partners


@pytest.mark.parametrize("taken", [0, 29, 30, 40])
def test_none_is_made_once_some_are_reserved(taken, monkeypatch):
    timeline = Timeline(monkeypatch)
    lanes = [streams.Own(GPU) for _ in range(taken)]
    streams.reserve(GPU, 4)
    timeline.on = True
    more = [streams.Own(GPU) for _ in range(4)]
    assert len({lane.stream for lane in lanes + more}) == taken + 4
    assert len(timeline.others) == max(0, taken + 4 - streams.POOLED)


def test_without_a_driver_torchs_are_shared(monkeypatch):
    timeline = Timeline(monkeypatch)
    monkeypatch.setattr(streams.driver, "new_stream", lambda *_: None)
    lanes = [streams.Own(GPU) for _ in range(33)]
    assert lanes[-1].stream in timeline.pools[-1]


# ------------------------------------------------------------------------------------------------- what is put aside


class Order(TorchDispatchMode):
    """Who wrote what on which stream; `early` lists what was read before its writer was waited for. A launch is taken
    to write all it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.current, self.partners = [Line(0)], {}
        self.written: dict[int, tuple[Line, int, str]] = {}
        self.kept: list[object] = []  # so that no memory is used again
        self.early: set[str] = set()
        monkeypatch.setattr(streams, "_beside", self.beside)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current[-1])
        monkeypatch.setattr(torch.cuda, "stream", self.upon)
        execute = interpreter.GridExecutor.__call__

        def launch(executor, *arguments, **others):
            given = [*arguments, *others.values()]
            self.use(given, given, executor.fn.__name__)
            with torch.utils._python_dispatch._disable_current_modes():
                execute(executor, *arguments, **others)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)

    def beside(self, home: Line, name: str) -> Line:
        return self.partners.setdefault((home, name), Line(len(self.partners) + 1))

    @contextlib.contextmanager
    def upon(self, line: Line):
        self.current.append(line)
        try:
            yield
        finally:
            self.current.pop()

    def use(self, reads, writes, by: str) -> None:
        here = self.current[-1]
        here.tick()
        for tensor in tensors(reads):
            line, when, writer = self.written.get(tensor.untyped_storage()._cdata, (here, 0, ""))
            if line is not here and here.clock[line] < when:
                self.early.add(f"{by} on {here} reads what {writer} writes on {line}")
        for tensor in tensors(writes):
            self.written[tensor.untyped_storage()._cdata] = here, here.clock[here], by

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.kept.append(out)
        views = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        mine = [t for t in tensors(out) if t.untyped_storage()._cdata not in views or func._schema.is_mutable]
        if mine and "empty" not in str(func):
            self.use((args, kwargs), mine, str(func))
        return out


@pytest.mark.parametrize("ssm", [Mamba, Mamba2])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_nothing_aside_is_read_before_it_is_there(ssm, count, monkeypatch):
    """Of a block's branches, whatever is put on which stream: the gradient of A_log is made of another one's sums."""
    monkeypatch.setattr(streams, "ASIDES", count)
    torch.manual_seed(0)
    mamba, batch = ssm(16, state_size=4), 2
    named = ("in_proj.weight", "conv_weight", "conv_bias", "x_proj.weight", "dt_proj.weight", "dt_proj.bias", "dt_bias",
             "A_log", "D", "out_proj.weight")  # fmt: skip
    known = dict(mamba.named_parameters())
    parameters = [known[name].detach() for name in named if name in known]
    stack = torch.nn.functional.pad(parameters[0], (0, 0, 0, -len(parameters[0]) % branches_triton.ALIGNED))
    products = [known[n].detach() for n in ("x_proj.weight", "dt_proj.weight", "out_proj.weight") if n in known]
    low = [stack, *products, mamba.A.detach()]
    h, seed = torch.randn(batch * 3, 16), torch.zeros(1, dtype=torch.long)
    out, *kept = branches_triton.branches(h, [], parameters, low, seed, batch, 1, 0.0)
    order = Order(monkeypatch)
    running = streams._Asides(GPU)
    monkeypatch.setattr(streams, "_running", running)
    with torch.no_grad(), order:
        backward = branches_triton.branches_backward._init_fn
        order.kept.append(backward([torch.randn_like(out)], h, [], parameters, low, kept, seed, batch, 1, 0.0))
    assert running.turn >= 3 and order.early == set()
    if count > 2 and ssm is Mamba:  # and it would be noticed
        monkeypatch.setattr(streams, "_place", lambda tensor: id(tensor))
        running = streams._Asides(GPU)
        monkeypatch.setattr(streams, "_running", running)
        with torch.no_grad(), order:
            order.kept.append(backward([torch.randn_like(out)], h, [], parameters, low, kept, seed, batch, 1, 0.0))
        assert order.early
