"""A parameter whose content is elsewhere behaves as an ordinary one."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.offloaded import CountingSource, matrix
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.errors import OffloadedAccessError, UnsupportedError
from lightning_hetero.handles import offloaded_parameter
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter, ParameterState, offload, restore
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor


class FakeRecord:
    """A parameter whose memory is garbage while it is released, and which an update finishes on
    ``wait``.
    """

    def __init__(self, parameter: nn.Parameter, name: str, state: ParameterState) -> None:
        self.name = name
        self.state = state
        self.waits = 0
        self._parameter = parameter
        self._source = CountingSource(parameter, name)
        if state is ParameterState.RELEASED:
            parameter.data.fill_(float("nan"))
        offload([parameter], {id(parameter): self})

    def wait(self) -> None:
        self.waits += 1
        self.state = ParameterState.RESIDENT
        restore([self._parameter])

    def source(self) -> CountingSource:
        return self._source


def offloaded_linear(state: ParameterState = ParameterState.RELEASED) -> tuple[nn.Linear, FakeRecord]:
    module = nn.Linear(4, 3)
    records = {name: FakeRecord(parameter, name, state) for name, parameter in module.named_parameters()}
    return module, records["weight"]


def test_module_machinery_reads_nothing() -> None:
    module, record = offloaded_linear()
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert not isinstance(weight, OffloadedTensor)
    assert dict(module.named_parameters())["weight"] is weight
    assert sum(p.numel() * p.element_size() for p in module.parameters()) == 60
    holder = nn.Module()
    holder.register_parameter("tied", weight)
    holder.also_tied = weight
    assert len(list(holder.parameters())) == 1
    state = module.state_dict()
    assert type(state["weight"]) is OffloadedTensor
    assert state["weight"].shape == (3, 4)
    assert module.state_dict(keep_vars=True)["weight"] is weight
    assert module.cpu().float().to("cpu").requires_grad_().train().weight is weight
    module.load_state_dict(state)
    weight.grad = torch.ones(3, 4)
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    nn.utils.clip_grad_value_(module.parameters(), 0.1)
    module.zero_grad()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert weight in {weight}
    assert torch.zeros_like(weight).sum() == 0
    assert weight.new_zeros(2).shape == (2,)
    assert weight.data_ptr() != 0
    assert weight.is_leaf
    assert weight.grad_fn is None
    assert weight.device.type == "cpu"
    assert repr(weight) == "OffloadedParameter((3, 4), torch.float32, 'weight', released)"
    assert (record.source().reads, record.waits) == (0, 0)


def test_load_state_dict_writes_through_without_reading() -> None:
    module, record = offloaded_linear()
    module.load_state_dict({"weight": matrix(), "bias": torch.zeros(3)})
    assert torch.equal(record.source().content, matrix())
    assert (record.source().reads, record.source().writes) == (0, 1)
    assert module.weight.data_ptr() != 0
    assert type(module.weight) is OffloadedParameter


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.copy_(matrix()),
        lambda p: p.add_(1),
        lambda p: p[0].fill_(0),
        lambda p: p.data.mul_(2),
        lambda p: p.detach().zero_(),
        lambda p: setattr(p, "data", matrix()),
        lambda p: nn.utils.vector_to_parameters(torch.ones(12), [p]),
        lambda p: torch._foreach_mul_([p], 3.0),
    ],
)
def test_writes_under_no_grad_reach_the_source(write: object) -> None:
    assert callable(write)
    module, record = offloaded_linear()
    plain = nn.Parameter(record.source().content.clone())
    address = module.weight.data_ptr()
    with torch.no_grad():
        write(module.weight)
        write(plain)
    assert torch.equal(record.source().content, plain.detach())
    assert module.weight.data_ptr() == address


@pytest.mark.parametrize("name", ["orthogonal_", "eye_", "xavier_uniform_", "kaiming_normal_", "trunc_normal_", "zeros_"])
def test_init_functions_write_through(name: str) -> None:
    module, record = offloaded_linear()
    plain = nn.Parameter(torch.empty(3, 4))
    init = getattr(nn.init, name)
    torch.manual_seed(1)
    assert init(module.weight) is module.weight
    torch.manual_seed(1)
    init(plain)
    assert torch.equal(record.source().content, plain.detach())


def test_reads_under_no_grad_or_without_a_graph() -> None:
    module, record = offloaded_linear()
    content = record.source().content
    with torch.no_grad():
        assert torch.equal(nn.utils.parameters_to_vector([module.weight]), content.view(-1))
        assert torch.equal(module(torch.eye(4)).t() - module.bias[:, None], content)
        assert torch.equal(module.weight.clone(), content)
    assert torch.equal(module.weight, content)
    assert torch.allclose(module.weight, content)
    assert module.weight.tolist() == content.tolist()
    assert np.array_equal(module.weight.detach().numpy(), content.numpy())
    assert torch.equal(module.weight.detach().norm(), content.norm())


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module(torch.ones(1, 4)),
        lambda module: module.weight.sum(),
        lambda module: module.weight.pow(2),
        lambda module: nn.utils.parameters_to_vector(module.parameters()),
        lambda module: next(iter(module.weight)).sum().backward(),
        lambda module: F.embedding(torch.tensor([1]), module.weight),
    ],
)
def test_a_differentiable_read_is_refused_and_names_the_door(read: object) -> None:
    assert callable(read)
    module, _ = offloaded_linear()
    with pytest.raises(OffloadedAccessError, match=r"'(weight|bias)'.*strategy\.materialize\(.*block_cls="):
        read(module)


def test_a_gradient_that_a_result_hides_is_refused_in_backward() -> None:
    def function(parameter: Tensor) -> SimpleNamespace:
        if torch.overrides.has_torch_function_unary(parameter):
            result: SimpleNamespace = torch.overrides.handle_torch_function(function, (parameter,), parameter)
            return result
        return SimpleNamespace(inside=parameter.pow(2))

    module, _ = offloaded_linear()
    hidden = function(module.weight).inside
    with pytest.raises(OffloadedAccessError, match="'weight'"):
        hidden.sum().backward()


def test_a_frozen_parameter_may_be_read_in_a_graph() -> None:
    module, record = offloaded_linear()
    module.requires_grad_(False)
    inputs = torch.randn(2, 4, requires_grad=True)
    module(inputs).sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad[0], record.source().content.sum(0))


def test_autograd_rules_still_apply() -> None:
    module, _ = offloaded_linear()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        module.weight.add_(1)


def test_changing_shape_or_dtype_is_refused() -> None:
    module, record = offloaded_linear()
    with pytest.raises(UnsupportedError, match=r"'weight' is \(3, 4\).*\(1,\).*Convert the model before"):
        module.weight.data = torch.zeros(1)
    with pytest.raises(UnsupportedError, match=r"torch\.float16"):
        module.half()
    assert record.source().writes == 0


def test_copies_and_pickles_are_ordinary_parameters() -> None:
    module, record = offloaded_linear()
    content = record.source().content
    stream = io.BytesIO()
    torch.save(module.state_dict(keep_vars=True), stream)
    stream.seek(0)
    module.weight.tag = "kept"
    twins = [copy.deepcopy(module).weight, torch.load(stream, weights_only=True)["weight"]]
    twins.append(pickle.loads(pickle.dumps(module.weight)))
    for twin in twins:
        assert type(twin) is nn.Parameter
        assert twin.requires_grad
        assert torch.equal(twin.detach(), content)
        assert not hasattr(twin, "_hetero")
    assert twins[-1].tag == "kept"


def test_pending_waits_once_for_values_and_never_for_metadata() -> None:
    module, record = offloaded_linear(ParameterState.PENDING)
    weight = module.weight
    _ = weight.shape, weight.grad, weight.requires_grad, repr(weight), torch.empty_like(weight)
    weight.register_post_accumulate_grad_hook(lambda p: None)
    assert record.waits == 0
    module(torch.ones(1, 4)).sum().backward()
    assert record.waits == 1
    assert type(weight) is nn.Parameter
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(3, 4))


def test_a_state_dict_of_pending_weights_waits_and_has_their_memory() -> None:
    module, record = offloaded_linear(ParameterState.PENDING)
    address = module.weight.data_ptr()
    found = module.state_dict()["weight"]
    assert record.waits == 1
    assert type(found) is Tensor
    assert found.data_ptr() == found.untyped_storage().data_ptr() == address


def test_pending_parameter_that_keeps_its_class_runs_on_its_own_memory() -> None:
    module, record = offloaded_linear(ParameterState.PENDING)
    weight = module.weight
    record.wait()
    record.state = ParameterState.PENDING
    offload([weight], {id(weight): record})
    assert weight.clone().requires_grad
    assert record.waits == 2


def test_pending_parameter_that_turns_out_released_is_read() -> None:
    module, record = offloaded_linear()
    record.state = ParameterState.PENDING
    record.wait = lambda: setattr(record, "state", ParameterState.RELEASED)
    with torch.no_grad():
        assert torch.equal(module.weight.clone(), record.source().content)


def test_toggling_keeps_identity_hooks_and_gradients() -> None:
    parameter = nn.Parameter(torch.ones(3))
    seen: list[tuple[type, bool]] = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append((type(p), p.grad is not None)))
    loss = (parameter * 2).sum()
    FakeRecord(parameter, "w", ParameterState.PENDING)
    loss.backward()
    assert seen == [(OffloadedParameter, True)]
    restore([parameter])
    assert type(parameter) is nn.Parameter
    assert vars(parameter) == {}
    (parameter * 3).sum().backward()
    assert seen[-1] == (nn.Parameter, True)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.full((3,), 5.0))


def test_inside_its_block_a_parameter_does_not_pass_through_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    module, record = offloaded_linear(ParameterState.PENDING)

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the fast path went through _access")

    module.register_forward_pre_hook(lambda m, _: restore(m.parameters()))
    monkeypatch.setattr(OffloadedParameter, "__torch_function__", fail)
    monkeypatch.setattr(offloaded_parameter, "_access", fail)
    module(torch.ones(1, 4)).sum().backward()
    assert record.waits == 0


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}])
def test_a_torch_optimizer_updates_released_parameters_through_the_door(options: dict[str, bool]) -> None:
    module, record = offloaded_linear()
    plain = nn.Parameter(record.source().content.clone())
    pairs = [(p, torch.optim.AdamW([p], lr=0.1, **options)) for p in (module.weight, plain)]
    for _ in range(3):
        for parameter, optimizer in pairs:
            parameter.grad = matrix() / 10
            optimizer.step()
    assert torch.equal(record.source().content, plain.detach())


def test_weight_averaging_reads_through_the_door() -> None:
    module, record = offloaded_linear()
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)
    record.source().content.add_(2)
    averaged.update_parameters(module)
    weight = averaged.module.weight
    assert type(weight) is nn.Parameter
    torch.testing.assert_close(weight.detach(), record.source().content - 1)


def test_equal_sources_of_a_view_and_its_base_stay_lazy_through_state_dict_round_trips() -> None:
    module, record = offloaded_linear()
    before = record.source().content.clone()
    other = nn.Linear(4, 3)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weight.detach(), before)
    assert record.source().reads == 1
