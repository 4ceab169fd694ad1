"""A tensor whose content is elsewhere behaves as an ordinary one."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import _remove_duplicate_names
from support.offloaded import CountingSource, matrix
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.errors import OffloadedAccessError, UnsupportedError
from lightning_hetero.handles.offloaded_parameter import ParameterState, materialize, offload
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor, keep_content


def lazy(content: Tensor) -> tuple[OffloadedTensor, CountingSource]:
    source = CountingSource(content)
    return OffloadedTensor(source, stride=content.stride()), source


def test_metadata_repr_detach_and_views_do_not_read() -> None:
    tensor, source = lazy(matrix())
    assert repr(tensor) == "OffloadedTensor((3, 4), torch.float32, 'weight')"
    assert (tensor.shape, tensor.dtype, tensor.stride(), tensor.numel()) == ((3, 4), torch.float32, (4, 1), 12)
    for derived in (tensor.detach(), tensor.data, tensor.view(-1), tensor[0], tensor.t(), *tensor.split(2)):
        assert type(derived) is OffloadedTensor
    assert tensor.detach().source is source
    assert tensor.cpu() is tensor
    assert tensor.to("cpu", torch.float32) is tensor
    assert source.reads == 0


@pytest.mark.parametrize(
    "make",
    [torch.ones_like, torch.zeros_like, lambda t: torch.full_like(t, 2, dtype=torch.int64), lambda t: t.new_full((2,), 3.0)],
)
def test_tensors_that_are_made_alike_read_nothing(make: Callable[[Tensor], Tensor]) -> None:
    content = matrix().t()
    tensor, source = lazy(content)
    made, wanted = make(tensor), make(content)
    assert type(made) is Tensor
    assert (made.stride(), made.dtype, made.device) == (wanted.stride(), wanted.dtype, wanted.device)
    assert torch.equal(made, wanted)
    assert source.reads == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t + 1,
        lambda t: t.clone(),
        lambda t: t.double(),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.sum(),
        lambda t: t.view(-1).clone(),
        lambda t: t[1, 2:].clone(),
        lambda t: t.t().contiguous(),
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack(t.unbind(1)),
        lambda t: torch.cat(t.chunk(2, dim=1)[::-1]),
        lambda t: F.linear(torch.ones(2, 4), t),
        lambda t: t.expand(2, 3, 4) * 2,
        lambda t: t.reshape(4, 3).clone(),
        lambda t: torch.tensor(t.tolist()),
        lambda t: torch.from_numpy(np.asarray(t)),
        lambda t: torch.from_dlpack(t),
    ],
)
def test_reads_equal_those_of_an_ordinary_tensor(function: object) -> None:
    assert callable(function)
    tensor, _ = lazy(matrix())
    result = function(tensor)
    assert type(result) is Tensor
    assert torch.equal(result, function(matrix()))


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.mul_(2),
        lambda t: t.zero_(),
        lambda t: t.copy_(torch.ones(4, dtype=torch.float64)),
        lambda t: t[1].fill_(7),
        lambda t: t.view(-1)[5:7].add_(1),
        lambda t: t.t()[0].neg_(),
        lambda t: t.split(1)[2].copy_(torch.zeros(1, 4)),
        lambda t: t.masked_fill_(t > 3, 0.0),
        lambda t: t.add_(t.clone()),
        lambda t: torch.add(t, 1, out=t),
        lambda t: torch._foreach_add_([t, t.view(-1)], 1),
        lambda t: t.__setitem__((0, 1), 9.0),
        lambda t: t.view(2, 6)[1].view(3, 2)[0].mul_(3),
        lambda t: t.apply_(lambda value: value + 1),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_in_place_writes_reach_the_source(function: object, mode: type) -> None:
    assert callable(function)
    tensor, source = lazy(matrix())
    expected = matrix()
    with mode():
        function(tensor)
    function(expected)
    assert torch.equal(source.content, expected)


def test_in_place_functions_return_the_handle() -> None:
    tensor, _ = lazy(matrix())
    assert tensor.mul_(2) is tensor
    assert torch.add(tensor, 1, out=tensor) is tensor
    assert tensor.copy_(tensor.clone()) is tensor


def test_copy_into_it_reads_nothing() -> None:
    tensor, source = lazy(matrix())
    tensor.copy_(torch.ones(3, 4))
    tensor.detach().copy_(torch.zeros(()))
    assert (source.reads, source.writes) == (0, 2)
    assert torch.equal(source.content, torch.zeros(3, 4))


def test_strides_are_kept() -> None:
    content = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    source = CountingSource(content.contiguous())
    tensor = OffloadedTensor(source, stride=content.stride())
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert materialize(tensor).stride() == content.stride()
    assert torch.equal(materialize(tensor), content)


def test_a_handle_made_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        tensor, _ = lazy(matrix())
    inputs = torch.randn(2, 4, requires_grad=True)
    F.linear(inputs, tensor).sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad[0], matrix().sum(0))


def test_a_view_does_not_keep_the_whole_alive() -> None:
    tensor, _ = lazy(matrix())
    assert materialize(tensor[1]).untyped_storage().nbytes() == 16


def test_comparisons() -> None:
    tensor, _ = lazy(matrix())
    assert torch.equal(tensor, matrix())
    assert torch.equal(matrix(), tensor)
    assert torch.allclose(tensor, tensor)
    torch.testing.assert_close(tensor, matrix())
    with pytest.raises(AssertionError):
        torch.testing.assert_close(matrix() + 1, tensor)


def test_pickles_and_copies_are_ordinary_tensors() -> None:
    tensor, _ = lazy(matrix())
    stream = io.BytesIO()
    torch.save({"a": tensor}, stream)
    stream.seek(0)
    for twin in (
        torch.load(stream, weights_only=True)["a"],
        copy.deepcopy(tensor),
        copy.copy(tensor),
        pickle.loads(pickle.dumps(tensor)),
    ):
        assert type(twin) is Tensor
        assert torch.equal(twin, matrix())
    assert b"lightning_hetero" not in stream.getvalue()


def test_deepcopy_keeps_sharing() -> None:
    tensor, _ = lazy(matrix())
    first, second = copy.deepcopy([tensor, tensor])
    assert first is second


def test_storage_access_is_refused_and_names_the_way() -> None:
    tensor, _ = lazy(matrix())
    with pytest.raises(OffloadedAccessError, match=r"'weight'.*\.clone\(\)"):
        tensor.untyped_storage()


def test_an_address_is_of_an_up_to_date_copy() -> None:
    tensor, source = lazy(matrix())
    address = tensor.data_ptr()
    there = (ctypes.c_float * tensor.numel()).from_address(address)
    assert list(there) == matrix().flatten().tolist()
    source.write(matrix() + 1)
    assert tensor.data_ptr() == address
    assert list(there) == (matrix() + 1).flatten().tolist()


def test_a_storage_has_an_identity_and_a_size_but_no_bytes() -> None:
    content = matrix()
    (tensor, source), (tied, tied_source), (other, other_source) = lazy(content), lazy(content), lazy(content)
    source.address = tied_source.address = content.data_ptr()
    other_source.address = content.data_ptr() + 4096
    storages = [t.untyped_storage() for t in (tensor, tied, tensor[1], tensor.t(), other)]
    assert [s.data_ptr() == storages[0].data_ptr() for s in storages] == [True, True, True, True, False]
    assert {s.nbytes() for s in storages} == {content.nbytes}
    assert storages[0].data_ptr() != content.data_ptr()  # zeros are there, not the content
    assert source.reads == 0


def test_a_storage_begins_where_the_data_of_its_whole_is() -> None:
    tensor, source = lazy(matrix())
    source.address = 4096
    tied, other = tensor.detach(), lazy(matrix())[0]
    addresses = [t.data_ptr() for t in (tensor, tied, tensor.view(-1), tensor[1], tensor.t()[1])]
    row, item = tensor.shape[1] * 4, 4
    assert [address - addresses[0] for address in addresses] == [0, 0, 0, row, item]
    assert {t.untyped_storage().data_ptr() for t in (tensor, tied, tensor[1])} == {addresses[0]}
    assert other.data_ptr() == other.untyped_storage().data_ptr() != addresses[0]


def test_tied_tensors_are_written_once_and_views_are_found() -> None:
    tensor, source = lazy(matrix())
    source.address = 4096
    state: dict[str, torch.Tensor] = {"a": tensor, "b": tensor.detach(), "row": tensor[1]}
    assert _remove_duplicate_names(state) == {"a": ["b", "row"]}


def test_a_copy_stays_with_those_that_keep_the_old_content() -> None:
    source = CountingSource(matrix())
    source.address = 4096
    old = OffloadedTensor(source)
    address = old.data_ptr()
    keep_content(source)
    source.write(matrix() + 1)
    new = OffloadedTensor(source)
    assert new.data_ptr() == new.untyped_storage().data_ptr() != address
    assert old.data_ptr() == old.detach().data_ptr() == old.untyped_storage().data_ptr() == address
    assert list((ctypes.c_float * old.numel()).from_address(address)) == matrix().flatten().tolist()


def test_contiguous_brings_the_content_into_memory() -> None:
    tensor, source = lazy(matrix())
    for dense in (tensor.contiguous(), tensor.t().contiguous()):
        assert type(dense) is Tensor
        assert dense.is_contiguous()
    assert torch.equal(tensor.t().contiguous(), matrix().t())
    assert source.writes == 0


def test_resizing_is_refused() -> None:
    tensor, source = lazy(matrix())
    with pytest.raises(UnsupportedError, match=r"'weight' from \(3, 4\) to \(2,\)"):
        tensor.resize_(2)
    assert torch.equal(source.content, matrix())


def test_materialize_passes_ordinary_tensors() -> None:
    plain = matrix()
    assert materialize(plain) is plain
    tensor, source = lazy(plain)
    assert type(materialize(tensor)) is Tensor
    assert source.reads == 1


# The meta device stands for one with memory of its own: whatever passes through it loses its
# values.
ELSEWHERE = torch.device("meta")


def test_handles_and_tensors_made_from_them_report_the_device() -> None:
    source = CountingSource(matrix())
    tensor = OffloadedTensor(source, device=ELSEWHERE)
    derived = [tensor, tensor.detach(), tensor.data, tensor.t(), tensor[0], *tensor.split(2)]
    assert all(type(d) is OffloadedTensor and d.device == ELSEWHERE for d in derived)
    assert tensor.to(ELSEWHERE) is tensor
    assert source.reads == 0
    assert copy.deepcopy(tensor).device == ELSEWHERE


def test_operators_run_on_the_device() -> None:
    tensor = OffloadedTensor(CountingSource(matrix()), device=ELSEWHERE)
    product = F.linear(torch.ones(2, 4, device=ELSEWHERE), tensor)
    for result in (tensor + 1, tensor.clone(), tensor.double(), tensor.contiguous(), product):
        assert type(result) is Tensor
        assert result.device == ELSEWHERE


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.cpu(),
        lambda t: t.to("cpu", torch.float64).float(),
        lambda t: torch.zeros(3, 4).copy_(t),
        lambda t: torch.zeros(4, 3).copy_(t.t()).t(),
        lambda t: torch.load(save(t)),
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: torch.tensor(t.tolist()),
        lambda t: materialize(t),
    ],
)
def test_moves_to_the_cpu_do_not_pass_through_the_device(move: object) -> None:
    assert callable(move)
    result = move(OffloadedTensor(CountingSource(matrix()), device=ELSEWHERE))
    assert result.device.type == "cpu"
    assert torch.equal(result, matrix())


def save(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_writes_reach_the_source_as_cpu_tensors_on_any_device() -> None:
    source = CountingSource(matrix())
    tensor = OffloadedTensor(source, device=ELSEWHERE)
    tensor.copy_(torch.full((4,), 2.0, dtype=torch.float64))
    tensor[1].copy_(torch.arange(4.0))
    assert torch.equal(source.content, torch.tensor([[2.0] * 4, [0, 1, 2, 3], [2] * 4]))


def test_a_parameter_on_a_device_keeps_it_while_it_is_away() -> None:
    module = nn.Linear(4, 3, device=ELSEWHERE)
    content = matrix()
    record = SimpleNamespace(name="weight", state=ParameterState.RELEASED, source=lambda: source)
    source = CountingSource(content)
    offload([module.weight], {id(module.weight): record})
    weight = module.weight
    assert weight.device == weight.detach().device == weight.data.device == ELSEWHERE
    assert torch.equal(module.state_dict()["weight"].cpu(), content)
    assert copy.deepcopy(module).weight.device == ELSEWHERE
    assert torch.equal(materialize(weight), content)
    with torch.no_grad():
        weight.copy_(-content)
        assert torch.equal(source.content, -content)
        weight.data = content
        assert torch.equal(source.content, content)
