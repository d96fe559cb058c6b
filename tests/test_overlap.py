"""Several seeds of QHyer, captured: what runs side by side, on streams of whose memory nothing is used too early."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("triton")

from timeline import GPU, Line, Timeline

from qhyer import runs, streams
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
