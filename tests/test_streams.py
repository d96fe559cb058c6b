"""Work beside other work: the same results, whoever waits for what."""

from __future__ import annotations

import pytest
import torch

from qhyer import streams
from qhyer.streams import aside, asides, at_once, begin, fork, forked

CPU = torch.device("cpu")
ONE, TWO = torch.zeros(1), torch.zeros(1)  # parameters
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_on_a_cpu_everything_is_done_in_its_turn():
    done: list[str] = []

    def note(name: str) -> str:
        done.append(name)
        return name

    assert fork("two", lambda: note("a"), lambda: note("b"), CPU) == ("a", "b")
    assert forked("three", [lambda name=name: note(name) for name in "cde"], CPU) == ["c", "d", "e"]
    started = begin("one", lambda: note("f"), CPU)
    assert done == [*"abcdef"] and started() == started() == "f"
    with asides(CPU):
        assert aside(lambda: note("g"), [], ONE) == "g" and done[-1] == "g"
    assert at_once(lambda: note("h"), [], ONE) == "h"
    assert forked("none", [], CPU) == []


class Recorder:
    """Takes the place of a stream, of its events, and of torch.cuda where `asides` asks it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pool(self, monkeypatch, size: int) -> None:
        monkeypatch.setattr(streams, "HELD", size)
        monkeypatch.setattr(streams, "_beside", lambda _, name: Line(name, self.told))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Line("here", self.told))
        monkeypatch.setattr(torch.cuda, "stream", lambda line: line)


class Line:
    device = CPU
    cuda_stream = 0

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Line) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __enter__(self) -> None:
        self.told.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: Line) -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"event {len(self.told)}"

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for an event")


def test_what_is_put_aside_is_waited_for_at_the_end(monkeypatch):
    recorder = Recorder()
    recorder.pool(monkeypatch, 100)
    with asides(torch.device("cuda")):
        assert aside(lambda: 1, [torch.zeros(20)], ONE) == 1  # 80 bytes
        assert recorder.told == ["asides 0 waits for here", "on asides 0"]
        with asides(torch.device("cuda")):  # one within another is the other's
            assert aside(lambda: 2, [torch.zeros(20)], TWO) == 2
        assert recorder.told[2:] == ["asides 1 waits for here", "on asides 1", "here waits for an event"]  # 160 > 100
    assert recorder.told[5:] == ["here waits for asides 0", "here waits for asides 1"]
    assert aside(lambda: 3, [], ONE) == 3 and len(recorder.told) == 7


def test_what_is_put_aside_takes_turns(monkeypatch):
    recorder = Recorder()
    recorder.pool(monkeypatch, 100)
    monkeypatch.setattr(streams, "ASIDES", 3)
    with asides(torch.device("cuda")):
        for i, parameter in enumerate(torch.zeros(5, 1)):
            assert aside(lambda i=i: i, [], parameter) == i
    turns = [told for told in recorder.told if told.startswith("on")]
    assert turns == [f"on asides {i}" for i in (0, 1, 2, 0, 1)]
    assert recorder.told[-3:] == [f"here waits for asides {i}" for i in range(3)]


def test_what_is_aside_waits_for_what_it_reads_of_others(monkeypatch):
    """On another stream; nor is memory used again there that is still read."""
    recorder = Recorder()
    recorder.pool(monkeypatch, 100)
    monkeypatch.setattr(streams, "ASIDES", 3)
    one, two, three, four = torch.zeros(4, 1)
    with asides(torch.device("cuda")):
        sums = aside(lambda: torch.zeros(10), [], one)
        aside(lambda: torch.zeros(10), [], two)
        del recorder.told[:]
        aside(lambda: 3, [sums[2:], torch.zeros(5)], three)
        assert recorder.told == ["asides 2 waits for here", "asides 2 waits for an event", "on asides 2"]
        aside(lambda: 4, [torch.zeros(20)], four)  # more than is held
        assert {"asides 0 waits for an event", "here waits for an event"} <= set(recorder.told[3:])


def test_nothing_aside_is_not_waited_for(monkeypatch):
    """A stream that has no part in a capture must not be waited for by one."""
    recorder = Recorder()
    recorder.pool(monkeypatch, 100)
    with asides(torch.device("cuda")):
        pass
    with asides(torch.device("cuda"), allowed=False):
        assert aside(lambda: 1, [], ONE) == 1
    assert recorder.told == []


def test_a_parameter_that_is_used_again_waits(monkeypatch):
    """Autograd adds the two gradients on this stream, before the end."""
    recorder = Recorder()
    recorder.pool(monkeypatch, 100)
    with asides(torch.device("cuda")):
        aside(lambda: 1, [], ONE)
        del recorder.told[:]
        assert aside(lambda: 2, [], ONE) == 2 and recorder.told == ["here waits for asides 0"]


@pytest.mark.parametrize(
    ("backbone", "ssm"), [("hybrid", "mamba"), ("attention", "mamba"), ("mamba", "mamba"), ("hybrid", "mamba2")]
)
def test_autograd_reads_nothing_that_is_aside(backbone, ssm, monkeypatch):
    """What is put aside as late as can be: until the end it is not a number, and still no gradient is lost."""
    pytest.importorskip("triton")
    from qhyer.nn import branches_triton, seam_triton
    from qhyer.nn.hybrid import HybridDecoder

    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(call, reads, of):
        for result, value in late:  # what is aside sees what was
            result.copy_(value)
        value = call()
        results = [value] if isinstance(value, torch.Tensor) else value
        late.extend((result.detach(), result.clone()) for result in results)
        for result, _ in late:
            result.fill_(torch.nan)
        return value

    monkeypatch.setenv("QHYER_TRITON", "1" if torch.cuda.is_available() else "interpret")
    torch.manual_seed(0)
    decoder = HybridDecoder(32, 2, 2, 0.0, backbone, 4, ssm).train()
    decoder = decoder.cuda() if torch.cuda.is_available() else decoder
    x = torch.randn(2, 8, 32, device=next(decoder.parameters()).device)

    def gradients() -> dict[str, torch.Tensor]:
        decoder.zero_grad()
        decoder(x, read=(3, 2))[0].square().sum().backward()
        return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}

    expected = {name: grad.clone() for name, grad in gradients().items()}
    monkeypatch.setattr(branches_triton, "aside", put)
    monkeypatch.setattr(seam_triton, "aside", put)
    found = gradients()
    assert late
    for result, value in late:
        result.copy_(value)
    assert found.keys() == expected.keys() == dict(decoder.named_parameters()).keys()
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


def test_an_error_ends_what_is_aside(monkeypatch):
    recorder = Recorder()
    recorder.pool(monkeypatch, 100)
    with pytest.raises(ZeroDivisionError), asides(torch.device("cuda")):
        aside(lambda: 1, [], ONE)
        aside(lambda: 1 // 0, [], TWO)
    assert recorder.told[-2:] == ["here waits for asides 0", "here waits for asides 1"] and streams._running is None


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("held", [0, 2**28])
def test_gradients_made_aside_are_those_made_at_once(held, monkeypatch):
    """To the bit, several times over: what is read aside may be used again too early, or a result read."""
    pytest.importorskip("triton")
    from qhyer.nn.hybrid import HybridDecoder

    monkeypatch.setattr(streams, "HELD", held)
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    decoder = HybridDecoder(128, 3, 4, 0.1).to(device).train()
    x = torch.randn(128, 59, 128, device=device)

    def gradients(allowed: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        decoder.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            h, _ = decoder(x, read=(3, 2))
        with asides(device, allowed):
            h.float().square().sum().backward()
        return [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]

    expected = [grad.clone() for grad in gradients(False)]
    assert len(expected) == len(list(decoder.parameters()))
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(gradients(True), expected, strict=True))


@pytest.mark.gpu
@on_gpu
def test_what_was_begun_is_there_when_it_is_asked_for():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(2**22, device=device)
    for _ in range(3):
        started = begin("a test", lambda: [x.cumsum(0), x + 1.0], device)
        busy = [torch.randn(512, 512, device=device) @ torch.randn(512, 512, device=device) for _ in range(5)]
        total, more = started()
        assert total[-1] == 2**22 and (more == 2.0).all() and len(busy) == 5


@pytest.mark.gpu
@on_gpu
def test_streams_beyond_torchs():
    """They do what torch's do: gradients, memory that is lent, graphs."""
    device = torch.device("cuda", 0)
    lanes = [streams.Own(device) for _ in range(streams.POOLED + 2)]
    stream = lanes[-1].stream
    assert stream.cuda_stream in streams._made and len({lane.stream.cuda_stream for lane in lanes}) == len(lanes)
    x = torch.randn(256, 256, device=device, requires_grad=True)

    def work() -> torch.Tensor:
        one, two = fork("half", lambda: x.detach() @ x.detach(), lambda: x.detach().square(), device)
        (gradient,) = torch.autograd.grad((x @ x).sum(), x)
        return one + two + gradient

    expected = work()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.testing.assert_close(work(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = work()
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected)
