from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.profiling import presets
from lightning_hetero.profiling.presets import BOXES, DEVICES, DISKS, HOSTS, LINKS, MODELS, PAPER_MACHINES, Gpt, Llama
from lightning_hetero.profiling.presets.transformers import profile
from lightning_hetero.units import GIB

HARDWARE = presets.machine(device="rtx4090", host_memory="256GiB", disk="p5510x12")


def _model(name: str, *, batch: int = 1, sequence: int = 1024) -> ModelProfile:
    return presets.model(name, batch=batch, sequence=sequence, hardware=HARDWARE)


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        # What `sum(p.numel() for p in model.parameters())` gives for the published checkpoints.
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("opt-125m", 125_239_296),
        ("opt-13b", 12_853_473_280),
        ("opt-30b", 29_974_540_288),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("codellama-34b", 33_743_970_304),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
    ],
)
def test_parameters_equal_those_of_the_published_model(name: str, num_params: int) -> None:
    assert _model(name).num_params == num_params


def test_names_of_the_papers_tables_say_their_sizes() -> None:
    for name in MODELS:
        size = name.rsplit("-", 1)[-1]
        if not name.startswith(("lohan", "protrain", "dos")) or not size.endswith("b"):
            continue
        assert _model(name).num_params == pytest.approx(float(size[:-1]) * 1e9, rel=0.1), name


# ---- saved bytes and FLOP against torch ----------------------------------------------------------

BATCH, SEQUENCE, HIDDEN, HEADS, KV_HEADS, WIDE = 2, 24, 32, 4, 2, 96
TOKENS = BATCH * SEQUENCE


class _GptBlock(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.c_fc, self.out = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_split(t, HEADS) for t in self.c_attn(self.ln_1(x)).split(HIDDEN, dim=-1))
        x = x + self.c_proj(_join(F.scaled_dot_product_attention(q, k, v)))
        return x + self.out(self.act(self.c_fc(self.ln_2(x))))


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one number a token, as fused kernels do."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        scale = x.pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return grad


class _LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        narrow = HIDDEN // HEADS * KV_HEADS
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = nn.Linear(HIDDEN, narrow, bias=False), nn.Linear(HIDDEN, narrow, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)
        self.register_buffer("cos", torch.rand(SEQUENCE, HIDDEN // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        normed = _RmsNorm.apply(x)
        q, k, v = _split(self.q(normed), HEADS) * self.cos, _split(self.k(normed), KV_HEADS) * self.cos, self.v(normed)
        attended = F.scaled_dot_product_attention(q, k, _split(v, KV_HEADS), enable_gqa=True)
        x = x + self.o(_join(attended))
        normed = _RmsNorm.apply(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(BATCH, SEQUENCE, heads, -1).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(BATCH, SEQUENCE, -1)


def _saved_bytes(block: nn.Module) -> int:
    """Bytes of the distinct storages that a forward saves, parameters and constants aside."""
    own = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True))
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def _counted_flop(block: nn.Module) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        block(torch.randn(BATCH, SEQUENCE, HIDDEN))
    return counter.get_total_flops()


def _first_layer(architecture: Gpt | Llama, itemsize: int = 4) -> BlockProfile:
    made = profile("one", architecture, batch=BATCH, sequence=SEQUENCE, hardware=HARDWARE, itemsize=itemsize)
    return made.blocks[1]


def _gpt(**options: object) -> Gpt:
    return Gpt(layers=1, hidden=HIDDEN, heads=HEADS, vocabulary=64, **options)  # type: ignore[arg-type]


def _llama(**options: object) -> Llama:
    return Llama(layers=1, hidden=HIDDEN, heads=HEADS, vocabulary=64, intermediate=WIDE, kv_heads=KV_HEADS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "block", "statistics"),
    [
        # Two numbers a token of each LayerNorm, one a head of attention.
        (_gpt(dropout=False), lambda: _GptBlock(F.gelu), 4 * TOKENS * (2 * 2 + HEADS)),
        (_gpt(dropout=False, activation="relu"), lambda: _GptBlock(F.relu), 4 * TOKENS * (2 * 2 + HEADS)),
        (_llama(), _LlamaBlock, 4 * TOKENS * (2 * 1 + HEADS)),
    ],
    ids=["gelu", "relu", "llama"],
)
def test_saved_bytes_and_flop_are_torchs(architecture: Gpt | Llama, block: Callable[[], nn.Module], statistics: int) -> None:
    made, layer = block(), _first_layer(architecture)
    assert layer.activation_bytes + statistics == _saved_bytes(made)
    assert layer.forward_flop == _counted_flop(made)


def test_parameters_of_a_block_are_torchs() -> None:
    assert _first_layer(_gpt()).num_params == sum(p.numel() for p in _GptBlock(F.gelu).parameters())
    norms = 2 * HIDDEN  # that block's norms have no weights
    assert _first_layer(_llama()).num_params == norms + sum(p.numel() for p in _LlamaBlock().parameters())


def test_a_16_bit_block_with_dropout_saves_korthikantis_bytes() -> None:
    """Equation 1 of Korthikanti et al. 2022: s·b·h·(34 + 5·a·s/h)."""
    squares = 5 * HEADS * SEQUENCE * TOKENS
    assert _first_layer(_gpt(), itemsize=2).activation_bytes == 34 * TOKENS * HIDDEN
    assert _first_layer(_gpt(flash=False), itemsize=2).activation_bytes == 34 * TOKENS * HIDDEN + squares


# ---- shape of a profile --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MODELS))
def test_profiles_are_consistent_and_survive_json(name: str) -> None:
    model = _model(name, batch=2)
    assert ModelProfile.from_json(model.to_json()) == model
    embedding, *layers, head = model.blocks
    assert embedding.pinned
    assert head.pinned
    assert not any(b.pinned for b in layers)
    assert [b.name for b in layers] == [f"layers.{i}" for i in range(len(layers))]
    assert model.tokens == 2 * 1024
    for block in model.blocks:
        assert block.boundary_bytes + sum(o.bytes for o in block.operators) == block.activation_bytes
        assert sum(o.flop for o in block.operators) <= block.forward_flop
        assert block.forward_s == block.forward_flop / HARDWARE.device_flop_per_s
        assert block.backward_s == 2 * block.forward_s


def test_flop_are_six_a_parameter_and_token_and_attention() -> None:
    """Kaplan et al. 2020: forward and backward take 6 FLOP a parameter and token; attention over
    the square comes on top.
    """
    layers = [b for b in _model("lohan-175b").blocks if not b.pinned]
    matrices = sum(b.num_params for b in layers)
    attention = 96 * 3 * 4 * 1024 * 1024 * 12288
    assert 3 * sum(b.forward_flop for b in layers) == pytest.approx(6 * matrices * 1024 + attention, rel=1e-3)


def test_a_tied_head_has_only_its_norm_but_all_its_flop() -> None:
    tied, untied = (
        _first_and_last(Llama(layers=1, hidden=64, heads=4, tied=True)),
        _first_and_last(Llama(layers=1, hidden=64, heads=4)),
    )
    assert tied[1].num_params == 64
    assert untied[1].num_params == 64 + 32000 * 64
    assert tied[1].forward_flop == untied[1].forward_flop == 2 * TOKENS * 64 * 32000


def _first_and_last(architecture: Llama) -> tuple[BlockProfile, BlockProfile]:
    blocks = profile("x", architecture, batch=BATCH, sequence=SEQUENCE, hardware=HARDWARE).blocks
    return blocks[0], blocks[-1]


def test_a_head_in_chunks_keeps_nothing_of_the_vocabularys_size() -> None:
    whole = profile("x", Gpt(layers=1, hidden=64, heads=4), batch=4, sequence=512, hardware=HARDWARE).blocks[-1]
    chunked = profile("x", Gpt(layers=1, hidden=64, heads=4, head_tokens=16), batch=4, sequence=512, hardware=HARDWARE).blocks[-1]
    assert whole.activation_bytes == 2 * 2 * 2048 * 64 + 4 * 2048 * 50257
    assert chunked.activation_bytes == 3 * 2 * 2048 * 64
    assert chunked.transient_bytes == (2 + 8) * 16 * 50257


def test_generic_models_equal_those_of_the_table() -> None:
    made = presets.gpt(12, 768, 12, positions=1024, batch=4, sequence=512, hardware=HARDWARE, name="gpt2")
    assert made == _model("gpt2", batch=4, sequence=512)
    made = presets.llama(32, 4096, 32, intermediate=14336, kv_heads=8, batch=1, sequence=1024, hardware=HARDWARE, name="mistral-7b")
    assert made == _model("mistral-7b")


def test_a_model_by_its_dimensions_as_text() -> None:
    made = _model("gpt:layers=12, hidden=768,heads=12,positions=1024,dropout=false")
    assert made.num_params == 124_439_808
    assert made.blocks[0].operators == ()
    assert _model("llama:layers=2,hidden=64,heads=4,kv_heads=2,tied=true").blocks[-1].num_params == 64


def test_fp32_doubles_the_saved_hidden_states_of_16_bit() -> None:
    narrow = presets.gpt(1, 64, 4, batch=1, sequence=8, hardware=HARDWARE, dropout=False)
    wide = presets.gpt(1, 64, 4, batch=1, sequence=8, hardware=HARDWARE, dropout=False, itemsize=4)
    assert wide.blocks[1].activation_bytes == 2 * narrow.blocks[1].activation_bytes
    assert wide.compute_itemsize == 4


# ---- machines ------------------------------------------------------------------------------------


_NO_FIGURES = ("name", "world_size", "ranks", "shared_memory", "unified_memory", "gathers_in_place", "gathers_on_devices")


def _figures() -> list[str]:
    return [f.name for f in fields(HardwareProfile) if f.name not in (*_NO_FIGURES, "contention", "source")]


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_figure_of_a_machine_has_a_source(name: str) -> None:
    machine = presets.machine(device=name, host_memory="128GiB", disk="990pro x 2", count=2)
    assert set(machine.source) == set(_figures())
    assert all(machine.source.values())
    assert HardwareProfile.from_json(machine.to_json()) == machine
    assert machine.collective_bytes_per_s > 0


@pytest.mark.parametrize("name", sorted({**PAPER_MACHINES, **BOXES}))
def test_every_figure_of_a_papers_machine_has_a_source(name: str) -> None:
    machine = presets.paper_machine(name)
    assert set(machine.source) == set(_figures())
    assert machine.name == name
    assert HardwareProfile.from_json(machine.to_json()) == machine
    # CPU updates and the downcast cannot be faster than the memory that they move through.
    assert 28 * machine.cpu_update_params_per_s <= 1.001 * machine.host_dram_bytes_per_s


def test_devices_name_hosts_and_links_that_exist() -> None:
    for device in DEVICES.values():
        assert device.host in HOSTS
        assert device.link in LINKS
        assert 0 < device.utilisation.value < 1


def test_disks_side_by_side_add_up() -> None:
    one, twelve = presets.disk("p5510"), presets.disk("P5510 x12")
    assert twelve.name == "p5510x12"
    for key in ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s"):
        assert getattr(twelve, key).value == 12 * getattr(one, key).value
    assert presets.disk("p5510x1") == one
    assert presets.disk("p5800xx2").read_bytes_per_s.value == 2 * DISKS["p5800x"].read_bytes_per_s.value
    assert presets.disk("p5510\u00d73").name == "p5510x3"


def test_a_machine_is_the_sum_of_its_parts() -> None:
    assert HARDWARE.device_memory_bytes == 24 * GIB
    assert HARDWARE.host_memory_bytes == 256 * GIB
    assert HARDWARE.disk_capacity_bytes == 12 * 3_840_000_000_000
    assert HARDWARE.link_h2d_bytes_per_s == LINKS["pcie4"].value
    assert HARDWARE.collective_bytes_per_s == 0
    assert not HARDWARE.shared_memory
    slow = presets.machine(device="rtx4090", host_memory=64 * GIB, link="pcie3", host="desktop-ddr5")
    assert slow.link_d2h_bytes_per_s == LINKS["pcie3"].value
    assert slow.host_dram_bytes_per_s == HOSTS["desktop-ddr5"].dram_bytes_per_s.value
    assert (slow.disk_read_bytes_per_s, slow.disk_write_bytes_per_s, slow.disk_capacity_bytes) == (0, 0, 0)


def test_names_are_found_however_they_are_written() -> None:
    assert presets.device("RTX 4090") is DEVICES["rtx4090"]
    assert presets.device("A100-80GB") is DEVICES["a100-80"]
    assert presets.device("a100_40") is DEVICES["a100-40"]


# ---- against the papers' own figures -------------------------------------------------------------


def test_lohans_13b_at_batch_32() -> None:
    """Sections III-B and III-C: 12.5 GB between blocks, 213 GB of activations, 5.96 s of forward on
    an RTX 4090.
    """
    model = presets.model("lohan-13b", batch=32, sequence=1024, hardware=presets.paper_machine("lohan-rtx4090"))
    layers = [b for b in model.blocks if not b.pinned]
    assert sum(b.boundary_bytes for b in layers) / GIB == pytest.approx(12.5)
    assert sum(b.activation_bytes for b in layers) / GIB == pytest.approx(213, rel=0.01)
    assert sum(b.forward_s for b in model.blocks) == pytest.approx(5.96, rel=0.01)


def test_lohans_machine_swaps_and_streams_as_fast_as_the_paper_says() -> None:
    machine = presets.paper_machine("lohan-rtx4090")
    assert 213 * GIB / machine.link_d2h_bytes_per_s == pytest.approx(10, rel=0.01)
    assert 182e9 / machine.disk_read_bytes_per_s + 182e9 / machine.disk_write_bytes_per_s == pytest.approx(13, rel=0.01)
    one = presets.paper_machine("lohan-rtx4090", disk="p5510", host_memory="128GiB")
    assert (one.disk_read_bytes_per_s, one.disk_write_bytes_per_s) == (6.5e9, 3.4e9)
    assert one.host_memory_bytes == 128 * GIB


@pytest.mark.parametrize(
    ("name", "cpu", "device", "downcast", "link"),
    [("dos-v100", 2e9, 35e9, 8.7e9, 3e9), ("dos-h100", 8e9, 100e9, 62e9 / 4, 12e9)],
)
def test_deep_optimizer_states_machines_have_the_papers_rates(
    name: str, cpu: float, device: float, downcast: float, link: float
) -> None:
    """Sections 1 and 5.4, table 1: updates are those of the whole machine, copies those of one link
    (docs/adr/0007).
    """
    machine = presets.paper_machine(name)
    assert machine.world_size == 4
    assert (machine.cpu_update_params_per_s, machine.cpu_downcast_params_per_s) == (cpu, downcast)
    assert machine.device_update_params_per_s * machine.world_size == device
    assert machine.link_h2d_bytes_per_s == machine.link_d2h_bytes_per_s == 4 * link
    # Host memory must carry those updates, of 28 bytes each, and four links.
    assert machine.host_dram_bytes_per_s > 28 * cpu
    assert all("Deep Optimizer States" in machine.source[key] for key in ("cpu_update_params_per_s", "link_h2d_bytes_per_s"))


def test_deep_optimizer_states_table_2_counts_12_h_squared_a_layer() -> None:
    """The table's optimizer sizes are 16 bytes a parameter; 20B's are those of 44 layers, so it is
    left out.
    """
    for size, gib in {"7b": 96, "8.3b": 121, "10b": 150, "13b": 188}.items():
        layers = [b for b in _model(f"dos-{size}").blocks if not b.pinned]
        assert 16 * sum(b.num_params for b in layers) / GIB == pytest.approx(gib, rel=0.01), size


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "near", "known"),
    [
        (lambda: presets.device("rtx4900"), "device", "rtx4090", "mi300x"),
        (lambda: presets.device("a100"), "device", "a100-40", "a100-80"),
        (lambda: presets.disk("p5501x12"), "disk", "p5510", "990pro"),
        (lambda: presets.host("grase"), "host", "grace", "server-ddr4"),
        (lambda: presets.paper_machine("lohan-4090"), "machine", "lohan-rtx4090", "dos-h100"),
        (lambda: _model("lama-7b"), "model", "llama-7b", "gpt2-xl"),
        (lambda: _model("gtp:layers=1"), "model family", "gpt", "llama"),
        (lambda: presets.machine(device="h100", host_memory="1TiB", link="pcie6"), "link", "pcie5", "nvlink-c2c"),
    ],
)
def test_unknown_names_are_refused_with_near_and_known_ones(call: Callable[[], object], kind: str, near: str, known: str) -> None:
    with pytest.raises(ConfigError, match=rf"no {kind} preset .*Did you mean .*'{near}'.*Known: .*{known}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: presets.disk("p5510x0"), "count 0"),
        (lambda: presets.machine(device="h100", host_memory="1TiB", count=0), "count=0"),
        (lambda: presets.machine(device="h100", host_memory="lots"), "host_memory='lots'"),
        (lambda: _model("gpt2", batch=0), "batch=0"),
        (lambda: _model("gpt2", sequence=2048), r"sequence=2048; allowed: at most 1024"),
        (lambda: _model("gpt:layers=2,hidden=10,heads=3"), "hidden=10 and heads=3"),
        (lambda: _model("gpt:layers=2,hidden=12"), "needs heads"),
        (lambda: _model("gpt:layers=2,hidden=12,heads=3,colour=1"), "'colour=1'; allowed: key=value"),
        (lambda: _model("gpt:layers=two,hidden=12,heads=3"), "layers='two'"),
        (lambda: _model("gpt:layers=2,hidden=12,heads=3,activation=tanh"), "activation='tanh'"),
        (lambda: _model("llama:layers=2,hidden=12,heads=3,kv_heads=2"), "kv_heads=2"),
        (lambda: presets.gpt(1, 64, 4, batch=1, sequence=8, hardware=HARDWARE, itemsize=8), "itemsize=8"),
    ],
)
def test_impossible_dimensions_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_llamas_default_width_equals_the_published_models() -> None:
    for hidden, wide in {4096: 11008, 5120: 13824, 6656: 17920, 8192: 22016}.items():
        heads = hidden // 128
        made = presets.llama(1, hidden, heads, batch=1, sequence=8, hardware=HARDWARE).blocks[1]
        assert made.num_params == 4 * hidden**2 + 3 * hidden * wide + 2 * hidden
        assert math.gcd(wide, 256) == 256
