"""Clipping and AdamW by hand are torch's."""

from __future__ import annotations

import ctypes

import pytest
import torch

from qhyer.nn import adamw_cuda
from qhyer.nn.adamw_cuda import CHUNK, SIZES, Step, dense, size_for, table
from qhyer.nn.optim import adamw
from qhyer.update import _keep_on_device

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# Less than a chunk, one, and one more number; many, the last of them full and not, and not in fours.
SHAPES = [(1,), (3,), (2048,), (2049,), (300, 101), (2, 2052), (64, 1024)]


def made(device: str, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(*shape, generator=generator).to(device)) for shape in shapes]
    optimizer = adamw(parameters, 1e-2, weight_decay=0.1, **options)
    _keep_on_device(optimizer, torch.device(device))
    return parameters, optimizer


def draw(parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


@pytest.mark.parametrize("clip", [None, 1.0, 1e4])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1]])  # one table, and several
@pytest.mark.parametrize("copies", [1, 20])  # of the shapes: more tensors than the smallest table holds
@pytest.mark.gpu
@on_gpu[1]
def test_steps_are_torchs(clip, copies, sizes, monkeypatch):
    monkeypatch.setattr(adamw_cuda, "SIZES", sizes)
    (ours, optimizer), (theirs, reference) = (made("cuda", SHAPES * copies) for _ in range(2))
    step = Step(optimizer, clip)
    draw(ours, 0)
    assert not step.suits()  # no moments yet
    for number in range(6):
        for parameters in (ours, theirs):
            draw(parameters, number)
        if number == 3:
            ours[1].grad = theirs[1].grad = None  # as of a network that was not used
        gradients = [p.grad.clone() for p in ours if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        reference.step()
        if number == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(ours, clip)
            optimizer.step()
            continue
        assert step.suits()
        torch.testing.assert_close(step.norm(), norm, rtol=1e-5, atol=0)
        assert torch.equal(step.norm(), step.norm())  # the same order of sums, and counters that begin anew
        step.step(step.norm())
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        assert not step.done.any()
    for mine, other in zip(ours, theirs):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizer.state[mine][name], reference.state[other][name], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@on_gpu[1]
def test_captured_steps_are_the_same_to_the_bit():
    (ours, optimizer), (theirs, other) = (made("cuda") for _ in range(2))
    for parameters in (ours, theirs):
        draw(parameters, 0)
    for each in (optimizer, other):
        each.step()
    step, reference = Step(optimizer, 1.0), Step(other, 1.0)
    assert step.suits() and reference.suits()
    reference.step(reference.norm())  # compiled before anything is recorded
    step.step(step.norm())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step.norm()
        step.step(found)
    for number in range(1, 4):
        draw(theirs, number)
        for mine, parameter in zip(ours, theirs):
            assert mine.grad is not None and parameter.grad is not None
            mine.grad.copy_(parameter.grad)
        graph.replay()
        norm = reference.norm()
        reference.step(norm)
        assert torch.equal(found, norm)
        for mine, parameter in zip(ours, theirs):
            assert torch.equal(mine, parameter)
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(optimizer.state[mine][name], other.state[parameter][name])


@pytest.mark.gpu
@on_gpu[1]
def test_where_it_does_not_serve(monkeypatch):
    parameters, optimizer = made("cuda")
    draw(parameters, 0)
    optimizer.step()
    assert Step(optimizer, None).suits()
    monkeypatch.setenv("QHYER_ADAMW", "torch")
    assert not Step(optimizer, None).suits()
    monkeypatch.delenv("QHYER_ADAMW")
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    assert not Step(optimizer, None).suits()


@pytest.mark.gpu
@on_gpu[1]
def test_other_orders_of_memory():
    """As stacked seeds keep their weights."""
    (ours, optimizer), (theirs, reference) = (made("cuda") for _ in range(2))
    for parameters in (ours, theirs):
        for parameter in parameters:
            if parameter.dim() == 2:
                parameter.data = parameter.data.mT.contiguous().mT
    step = Step(optimizer, None)
    for number in range(3):
        for parameters in (ours, theirs):
            draw(parameters, number)
            for parameter in parameters:
                if parameter.dim() == 2:
                    parameter.grad = parameter.grad.mT.contiguous().mT
        reference.step()
        if number == 0:
            optimizer.step()
        else:
            assert step.suits()
            step.step(None)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    ours[-1].grad = ours[-1].grad.contiguous()
    assert not step.suits()


def test_what_fills_its_memory():
    x = torch.zeros(4, 3, 5)
    assert (
        dense(x)
        and dense(x.mT)
        and dense(x.permute(2, 0, 1))
        and dense(x[:2])
        and dense(torch.zeros(()))
        and dense(x[:, :1][:1])
    )
    assert not dense(x[:, :2]) and not dense(x[..., ::2]) and not dense(x[:1].expand(4, 3, 5))


def test_a_cpu_is_not_asked():
    parameters, optimizer = made("cpu")
    draw(parameters, 0)
    optimizer.step()
    assert not Step(optimizer, 1.0).suits()


def test_tables_hold_every_tensor_once_and_every_number_in_one_block():
    parameters, optimizer = made("cpu", SHAPES * 20)
    draw(parameters, 0)
    optimizer.step()
    for parameter in parameters[3::7]:
        parameter.grad = None
    tables = Step(optimizer, None).tables()
    seen = [these.parameter[i] for these, count, _ in tables for i in range(count)]
    assert sorted(seen) == sorted(p.data_ptr() for p in parameters if p.grad is not None)
    by_place = {p.data_ptr(): p for p in parameters}
    for these, count, blocks in tables:
        ends = [*list(these.first)[1:count], blocks]
        for i, end in enumerate(ends):
            size = by_place[these.parameter[i]].numel()
            assert these.size[i] == size and 0 <= (end - these.first[i]) * CHUNK - size < CHUNK
            assert these.decay[i] == pytest.approx(0.1 if by_place[these.parameter[i]].dim() > 1 else 0.0)
    assert len(tables) > 1


def test_tables_have_room():
    assert all(ctypes.sizeof(table(size)) == 64 * size for size in SIZES)
    for room, found in ((4096, [56, 56, 56, 56]), (32764, [56, 120, 448, 448])):
        assert [size_for(tensors, room) for tensors in (56, 57, 121, 1000)] == found
